"""Decode after accidents: blobs that are not what they were, processes that died. No token may differ."""

import pytest
from structlog.testing import capture_logs

from pipeline import wire
from pipeline.counters import KV_DAMAGED, KV_MISSING, KV_RECOMPUTED_TOKENS
from pipeline.keys import MAX_DELIVERIES
from pipeline.messages import Delta, SealedChunk
from pipeline.transport import Emit, Transaction
from tests.stages.alone import ascii_only, prompt_of, repetitive_prompt, result_alone
from tests.stages.damage import DAMAGES, Damage, swap
from tests.stages.line import CHUNK_TOKENS, Line, holds, soon

LIVELY = {
    "temperature": 0.8,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
    "top_p": 0.95,
    "logprobs": 3,
}
NUM_TOKENS = 2 * CHUNK_TOKENS + 5


async def sealed(line: Line, *request_ids: str) -> dict[str, list[str]]:
    """Bring requests up to decode's door; the names of their blobs, by request."""
    async with line.running("prefill", "compressor"):
        await holds(lambda: line.num_entries("decode") == len(request_ids))
    names: dict[str, list[str]] = {}
    for request_id in request_ids:
        stored = await line.transport("reader").chunks(request_id, 0)
        names[request_id] = [wire.unpack(stored[index], SealedChunk).ref.name for index in sorted(stored)]
    return names


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_blob_that_cannot_be_used_is_computed_again(line: Line, damage: Damage, chunk: int) -> None:
    message = await line.submit("r", prompt_of(NUM_TOKENS), 6, **LIVELY)
    names = (await sealed(line, "r"))["r"]
    other = (chunk + 1) % 2
    damage(line.pool_directory, names[chunk], names[other])
    with capture_logs() as logs:
        async with line.running("decode"):
            answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    bad = {chunk, other} if damage is swap else {chunk}
    num_bad_tokens = sum(min(CHUNK_TOKENS, NUM_TOKENS - index * CHUNK_TOKENS) for index in bad)
    assert [entry["num_tokens"] for entry in logs if entry["event"] == "kv_recomputed"] == [num_bad_tokens]
    usage = answer.terminal.usage
    assert usage is not None
    assert usage.recomputed_tokens == num_bad_tokens
    counted = line.counters.take()
    assert counted.get(KV_MISSING, 0) + counted.get(KV_DAMAGED, 0) == len(bad)
    assert counted[KV_RECOMPUTED_TOKENS] == num_bad_tokens
    line.assert_nothing_left()


async def test_chunks_of_two_requests_that_were_swapped_are_noticed(line: Line) -> None:
    messages = [await line.submit(f"r{n}", prompt_of(CHUNK_TOKENS, n), 6, **LIVELY) for n in range(2)]
    names = await sealed(line, "r0", "r1")
    swap(line.pool_directory, names["r0"][0], names["r1"][0])
    async with line.running("decode"):
        answers = [await line.answer(message.request_id) for message in messages]
    assert [answer.result for answer in answers] == [result_alone(line, message) for message in messages]
    line.assert_nothing_left()


async def test_a_reference_to_another_prompts_chunk_is_noticed(line: Line) -> None:
    """Whole and undamaged, but not what was asked for: the content address tells."""
    messages = [await line.submit(f"r{n}", prompt_of(CHUNK_TOKENS, n), 6, **LIVELY) for n in range(2)]
    await sealed(line, "r0", "r1")
    requests = line.queues.broker.requests()
    requests["r0"].chunks, requests["r1"].chunks = requests["r1"].chunks, requests["r0"].chunks
    async with line.running("decode"):
        answers = [await line.answer(message.request_id) for message in messages]
    assert [answer.result for answer in answers] == [result_alone(line, message) for message in messages]
    line.assert_nothing_left()


@pytest.mark.parametrize("num_seen", [1, 2, 9])
@pytest.mark.parametrize("speculate", [False, True])
async def test_a_request_whose_decode_was_killed_goes_on_after_the_last_token_seen(
    line: Line, num_seen: int, speculate: bool
) -> None:
    message = await line.submit("r", repetitive_prompt(NUM_TOKENS), 24, speculate=speculate, **LIVELY)

    def next_emission(transaction: Transaction) -> bool:
        return bool(transaction.effects) and line.queues.broker.requests()["r"].num_tokens >= num_seen

    async with line.running("prefill", "compressor"):
        async with line.process("decode", hold=next_emission) as doomed:
            await soon(doomed.transport.holding.wait())
            await doomed.kill()
        seen = [wire.unpack(e.data, Delta) for e in line.queues.broker.requests()["r"].results]
        line.clock.end_leases()
        async with line.running("decode"):
            answer = await line.answer("r")
    assert answer.deltas[: len(seen)] == tuple(seen)
    assert answer.result == result_alone(line, message)
    line.assert_nothing_left()


async def test_a_request_survives_one_death_after_another(line: Line) -> None:
    """More deaths than tries: each one made progress, so none of them counts against the request."""
    params = LIVELY | {"logit_bias": ascii_only(), "stop": ["\n\n", "zq"]}
    message = await line.submit("r", prompt_of(20), 2 * MAX_DELIVERIES + 9, speculate=False, **params)
    async with line.running("prefill", "compressor"):
        for death in range(MAX_DELIVERIES + 2):

            def second_emission(transaction: Transaction, first: int = 2 * death + 2) -> bool:
                return any(isinstance(e, Emit) and e.first_index == first for e in transaction.effects)

            async with line.process("decode", hold=second_emission) as doomed:
                await soon(doomed.transport.holding.wait())
                await doomed.kill()
            line.clock.end_leases()
        async with line.running("decode"):
            answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    line.assert_nothing_left()


async def test_a_request_that_was_taken_back_is_not_taken_over(line: Line) -> None:
    await line.submit("r", prompt_of(NUM_TOKENS), 6)
    await sealed(line, "r")
    await line.transport("crashing").receive("decode", 1, 1)
    line.clock.end_leases()
    line.forget("r")
    message = await line.submit("s", prompt_of(5), 3)
    with capture_logs() as logs:
        async with line.running("prefill", "compressor", "decode"):
            assert (await line.answer("s")).result == result_alone(line, message)
            await holds(lambda: line.num_entries("decode") == 0)
    assert "kv_recomputed" not in [entry["event"] for entry in logs]
    line.assert_nothing_left()


async def test_a_request_that_ended_every_decode_process_fails_and_leaves_no_blob(line: Line) -> None:
    await line.submit("r", prompt_of(NUM_TOKENS), 6)
    message = await line.submit("s", prompt_of(5), 3)
    await sealed(line, "r", "s")
    for _ in range(MAX_DELIVERIES):
        taken = await line.transport("crashing").receive("decode", 2, 1)
        others = [delivery for delivery in taken if wire.read_identity(delivery.payload) != ("r", 0)]
        await line.transport("crashing").hand_back(others)
        line.clock.end_leases()
    async with line.running("decode"):
        failure = (await line.answer("r")).failure
        assert (await line.answer("s")).result == result_alone(line, message)
    assert (failure.stage, failure.code, failure.retryable) == ("decode", "too_many_tries", False)
    assert len(line.dead_letters("decode")) == 1
    line.assert_nothing_left()


async def test_an_unreadable_entry_is_buried_and_others_are_served(line: Line) -> None:
    await line.append("decode", b"\xc1 not msgpack")
    message = await line.submit("r", prompt_of(5), 3)
    async with line.running("prefill", "compressor", "decode"):
        assert (await line.answer("r")).result == result_alone(line, message)
    [reason] = line.dead_letters("decode")
    assert reason.startswith("unreadable_message: not_msgpack")
    line.assert_nothing_left()
