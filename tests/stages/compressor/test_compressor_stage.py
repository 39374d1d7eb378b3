"""The compressor: raw chunks in, sealed ones out, and every blob with exactly one owner on the way."""

import dataclasses
from pathlib import Path

import pytest

from kv_store.blob import BlobKind, BlobMeta
from kv_store.pool import FilePool
from kv_store.ref import BlobRef
from pipeline import faults, wire
from pipeline.keys import MAX_DELIVERIES
from pipeline.messages import RawChunk, SealedChunk
from pipeline.transport import AddChunk, Outcome
from tests.stages.alone import packed_alone, prompt_of, result_alone
from tests.stages.damage import DAMAGES, Damage
from tests.stages.line import CHUNK_TOKENS, Line, holds, soon


async def prefilled(line: Line, prompt: list[int], **params: object) -> None:
    """Run prefill on a request "r", so that its raw chunks wait."""
    await line.submit("r", prompt, 4, **params)  # pyright: ignore[reportArgumentType] - sampling parameters
    async with line.running("prefill"):
        await holds(lambda: line.num_entries("prefill") == 0)


def raw_payloads(line: Line) -> list[bytes]:
    streams = line.queues.broker.streams
    return [entry.payload for name in streams if ":compressor:" in name for entry in streams[name].values()]


async def sealed_chunks(line: Line) -> list[SealedChunk]:
    stored = await line.transport("reader").chunks("r", 0)
    return [wire.unpack(stored[index], SealedChunk) for index in sorted(stored)]


def copy_blob(pool: FilePool, ref: BlobRef, name: str) -> BlobRef:
    """Write the same raw blob again, as a prefill that had lost its lease would."""
    with pool.read(ref) as (header, payload):
        meta = BlobMeta(**{field.name: getattr(header, field.name) for field in dataclasses.fields(BlobMeta)})
        return pool.write(name, meta, [bytes(payload)])


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int8", "raw"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_sealed_bytes_are_the_engines_own_and_the_raw_blob_is_freed(
    line: Line, codec: str, compression: str
) -> None:
    line.codec = codec
    line.compression = "zstd" if compression == "zstd" else "none"
    prompt = prompt_of(CHUNK_TOKENS + 7)
    await prefilled(line, prompt)
    async with line.running("compressor"):
        await holds(lambda: line.num_entries("decode") == 1)
    sealed = await sealed_chunks(line)
    assert [chunk.chunk_index for chunk in sealed] == [0, 1]
    assert line.pool.names() == sorted(chunk.ref.name for chunk in sealed)
    for chunk, (start, length) in zip(sealed, [(0, CHUNK_TOKENS), (CHUNK_TOKENS, 7)], strict=True):
        with line.pool.read(chunk.ref) as (header, payload):
            assert bytes(payload) == packed_alone(line, prompt, start, length)
            assert (header.kind, header.start_token, header.num_tokens) == (BlobKind.PACKED, start, length)
            assert header.content_address == chunk.content_address


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_raw_chunk_that_cannot_be_used_costs_time_and_no_token(line: Line, damage: Damage) -> None:
    prompt = prompt_of(2 * CHUNK_TOKENS + 5)
    await prefilled(line, prompt, temperature=0.8)
    message = await line.submit("unharmed", prompt, 4, temperature=0.8)
    raw = [wire.unpack(payload, RawChunk) for payload in raw_payloads(line)]
    damage(line.pool_directory, raw[1].ref.name, raw[0].ref.name)
    async with line.running("prefill", "compressor", "decode"):
        answer = await line.answer("r")
        assert answer.result == (await line.answer("unharmed")).result == result_alone(line, message)
    line.assert_nothing_left()


async def test_the_second_of_two_equal_chunks_takes_the_place_of_the_first_and_both_go_with_the_request(
    line: Line,
) -> None:
    await prefilled(line, prompt_of(5))
    [payload] = raw_payloads(line)
    raw = wire.unpack(payload, RawChunk)
    again = raw.model_copy(update={"ref": copy_blob(line.pool, raw.ref, "raw_another_writer")})
    await line.append("compressor", wire.pack(again))
    async with line.process("compressor") as compressor:
        await holds(lambda: len(compressor.transport.committed) == 2)
    assert [outcome for _, outcome in compressor.transport.committed] == [Outcome.OK, Outcome.OK]
    [sealed] = await sealed_chunks(line)
    added = [
        wire.unpack(e.ref, SealedChunk)
        for t, _ in compressor.transport.committed
        for e in t.effects
        if isinstance(e, AddChunk)
    ]
    assert [one.ref.name for one in added][1:] == [sealed.ref.name]
    assert set(line.pool.names()) == {one.ref.name for one in added}
    async with line.running("decode"):
        await line.answer("r")
    line.assert_nothing_left()


async def test_chunks_of_a_request_that_has_gone_are_freed_the_sealed_ones_too(line: Line) -> None:
    await prefilled(line, prompt_of(2 * CHUNK_TOKENS + 5))

    def last_chunk(transaction: object) -> bool:
        return len(line.queues.broker.requests()["r"].chunks) == 2

    async with line.process("compressor", hold=last_chunk) as compressor:
        await soon(compressor.transport.holding.wait())
        line.forget("r")
        compressor.transport.go_on.set()
        await holds(lambda: line.num_entries("compressor") == 0)
    assert [outcome for _, outcome in compressor.transport.committed] == [Outcome.OK, Outcome.OK, Outcome.GONE]
    line.assert_nothing_left()


async def test_a_compressor_that_lost_its_lease_frees_its_own_and_leaves_the_raw_blob(line: Line) -> None:
    message = await line.submit("r", prompt_of(5), 4)
    async with line.running("prefill"):
        async with line.process("compressor", hold=lambda _: True) as slow:
            await soon(slow.transport.holding.wait())
            line.clock.end_leases()
            [taken] = await line.transport("other").receive("compressor", 1, 1)
            slow.transport.go_on.set()
            await holds(lambda: [outcome for _, outcome in slow.transport.committed] == [Outcome.FENCED])
        assert line.pool.names() == [wire.unpack(taken.payload, RawChunk).ref.name]
        await line.transport("other").hand_back([taken])
        async with line.running("compressor", "decode"):
            assert (await line.answer("r")).result == result_alone(line, message)
    line.assert_nothing_left()


async def test_a_compressor_killed_before_its_commit_changes_nothing(line: Line) -> None:
    message = await line.submit("r", prompt_of(CHUNK_TOKENS + 1), 4, temperature=0.8)
    async with line.running("prefill", "decode"):
        async with line.process("compressor", hold=lambda _: True) as doomed:
            await soon(doomed.transport.holding.wait())
            await doomed.kill()
        line.clock.end_leases()
        async with line.running("compressor"):
            answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    line.assert_nothing_left()


async def test_a_full_pool_always_leaves_room_to_seal(line: Line) -> None:
    """Raw chunks alone must not fill the pool: then nothing could be sealed, and nothing be freed."""
    line.pool.quota_bytes = 50_000  # not enough for all four
    messages = [await line.submit(f"r{n}", prompt_of(2 * CHUNK_TOKENS, n), 3) for n in range(4)]
    async with line.process("prefill") as prefill:
        await holds(lambda: line.pool.usage().num_blobs >= 2)
        await holds(lambda: prefill.transport.num_refused_credits > 5)  # it waits for room
        async with line.process("compressor") as compressor, line.running("decode"):
            answers = [await line.answer(message.request_id) for message in messages]
    assert [answer.result for answer in answers] == [result_alone(line, message) for message in messages]
    assert {transaction.delivery.tries for transaction, _ in compressor.transport.committed} == {1}
    line.assert_nothing_left()


async def test_an_unreadable_entry_is_buried_and_others_are_served(line: Line) -> None:
    await line.append("compressor", b"\xc1 not msgpack")
    message = await line.submit("r", prompt_of(5), 4)
    async with line.running("prefill", "compressor", "decode"):
        assert (await line.answer("r")).result == result_alone(line, message)
    [reason] = line.dead_letters("compressor")
    assert reason.startswith("unreadable_message: not_msgpack")
    line.assert_nothing_left()


async def test_a_chunk_that_ended_every_compressor_costs_time_and_no_token(line: Line) -> None:
    prompt = prompt_of(2 * CHUNK_TOKENS + 5)
    await prefilled(line, prompt, temperature=0.8)
    raw = [wire.unpack(payload, RawChunk) for payload in raw_payloads(line)]
    await wear_out(line, num_entries=1)
    async with line.process("compressor") as compressor:
        await holds(lambda: line.num_entries("compressor") == 0)
    assert [outcome for _, outcome in compressor.transport.committed] == [Outcome.OK] * 3
    sealed = await sealed_chunks(line)
    assert sealed[0].ref == raw[0].ref  # never touched again
    assert line.pool.names() == sorted(chunk.ref.name for chunk in sealed[1:])
    await assert_same_as_unharmed(line, prompt)


async def test_a_pool_that_stays_full_costs_time_and_no_token(line: Line) -> None:
    prompt = prompt_of(5)
    await prefilled(line, prompt, temperature=0.8)
    [payload] = raw_payloads(line)
    ballast = line.fill_pool()
    async with line.process("compressor") as compressor:
        for tries in range(1, MAX_DELIVERIES + 1):
            await holds(lambda tries=tries: tries_of(line) == [tries] or not line.num_entries("compressor"))
            line.clock.end_leases()
        await holds(lambda: line.num_entries("compressor") == 0)
    [(transaction, outcome)] = compressor.transport.committed
    assert (transaction.delivery.tries, outcome) == (MAX_DELIVERIES, Outcome.OK)
    assert [chunk.ref for chunk in await sealed_chunks(line)] == [wire.unpack(payload, RawChunk).ref]
    assert line.pool.names() == [ballast.name]
    line.pool.release(ballast.name)
    await assert_same_as_unharmed(line, prompt)


async def test_an_unreadable_entry_that_ended_every_compressor_is_buried(line: Line) -> None:
    await line.append("compressor", b"\xc1 not msgpack")
    await wear_out(line, num_entries=1)
    async with line.running("compressor"):
        await holds(lambda: line.num_entries("compressor") == 0)
    [reason] = line.dead_letters("compressor")
    assert reason.startswith("too_many_tries: ")


async def test_giving_a_chunk_up_that_another_has_by_now_leaves_the_raw_blob_to_it(line: Line) -> None:
    await prefilled(line, prompt_of(5))
    await wear_out(line, num_entries=1)
    async with line.process("compressor", hold=lambda _: True) as slow:
        await soon(slow.transport.holding.wait())
        line.clock.end_leases()
        [taken] = await line.transport("other").receive("compressor", 1, 1)
        slow.transport.go_on.set()
        await holds(lambda: [outcome for _, outcome in slow.transport.committed] == [Outcome.FENCED])
    assert line.pool.names() == [wire.unpack(taken.payload, RawChunk).ref.name]


async def test_a_compressor_that_fails_between_blob_and_commit_seals_the_chunk_again(
    line: Line, tmp_path: Path
) -> None:
    prompt = prompt_of(5)
    await prefilled(line, prompt, temperature=0.8)
    faults.configure("compressor.sealed=fail", tmp_path / "faults")
    try:
        async with line.running("compressor"):
            await holds(lambda: bool(faults.struck(tmp_path / "faults", "compressor.sealed")))
            line.clock.end_leases()
            await holds(lambda: line.num_entries("decode") == 1)
    finally:
        faults.configure(None, None)
    [sealed] = await sealed_chunks(line)
    assert len(line.pool.names()) == 2  # the first one's blob has no reference, and goes with the request
    assert sealed.ref.name in line.pool.names()
    await assert_same_as_unharmed(line, prompt)


async def wear_out(line: Line, num_entries: int) -> None:
    """Deliver the first entries so often that they are poison, each time to somebody who dies of them."""
    for _ in range(MAX_DELIVERIES):
        assert len(await line.transport("crashing").receive("compressor", num_entries, 1)) == num_entries
        line.clock.end_leases()


async def assert_same_as_unharmed(line: Line, prompt: list[int]) -> None:
    message = await line.submit("unharmed", prompt, 4, temperature=0.8)
    async with line.running("prefill", "compressor", "decode"):
        answer = await line.answer("r")
        assert answer.result == (await line.answer("unharmed")).result == result_alone(line, message)
    assert line.dead_letters("compressor") == []
    line.assert_nothing_left()


def tries_of(line: Line) -> list[int]:
    """How often each entry of the compressor was delivered."""
    streams = line.queues.broker.streams
    return [entry.tries for name in streams if ":compressor:" in name for entry in streams[name].values()]
