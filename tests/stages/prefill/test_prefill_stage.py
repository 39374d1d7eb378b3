"""Prefill: prompts in chunks, token 0, and what is handed to whom."""

import pytest

from kv_store.blob import BlobKind
from kv_store.errors import InvalidValue
from kv_store.packing import pack, pages_of
from pipeline import wire
from pipeline.keys import MAX_DELIVERIES
from pipeline.memory_broker import Entry
from pipeline.memory_credits import Credit
from pipeline.messages import PrefilledPrompt, RawChunk
from pipeline.transport import Emit, Finish, Outcome, Plan, Publish, Transaction
from stages.prefill import handover, room, stage
from stages.prefill.handover import Handover
from tests.stages.alone import ascii_only, packed_alone, prompt_of, result_alone
from tests.stages.line import CHUNK_TOKENS, Line, holds, soon

LENGTHS = [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS + 1]
ALL = ("prefill", "compressor", "decode")


def raw_chunks(line: Line) -> list[RawChunk]:
    """What prefill has put in front of the compressor, oldest first."""
    streams = line.queues.broker.streams
    return [
        wire.unpack(entry.payload, RawChunk)
        for name, entries in streams.items()
        if ":compressor:" in name
        for entry in entries.values()
    ]


def plan_of(line: Line, request_id: str) -> Plan | None:
    request = line.queues.broker.request(request_id)
    assert request is not None
    return request.plan


def entries_of(line: Line, stage_name: str) -> list[Entry]:
    streams = line.queues.broker.streams
    return [entry for name, all_of in streams.items() if f":{stage_name}:" in name for entry in all_of.values()]


def emits(transaction: Transaction) -> bool:
    return any(isinstance(effect, Emit) for effect in transaction.effects)


def publishes(transaction: Transaction) -> bool:
    return any(isinstance(effect, Publish) for effect in transaction.effects)


@pytest.mark.parametrize("num_tokens", LENGTHS)
async def test_chunks_come_in_order_and_hold_what_one_pass_over_the_prompt_computes(
    line: Line, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    await line.submit("r", prompt, 4)
    async with line.process("prefill") as prefill:
        await holds(lambda: plan_of(line, "r") is not None)
        engine = prefill.engine
    assert engine is not None
    starts = list(range(0, num_tokens, CHUNK_TOKENS))
    chunks = raw_chunks(line)
    assert [(chunk.chunk_index, chunk.start_token) for chunk in chunks] == list(enumerate(starts))
    for chunk in chunks:
        with line.pool.read(chunk.ref) as (header, payload):
            length = header.num_tokens
            pages = pages_of(payload, engine.config.kv_layout, engine.codec, length)
            packed = pack(pages, engine.config.kv_layout, engine.codec, length)
        assert header.kind is BlobKind.PAGED
        assert length == min(CHUNK_TOKENS, num_tokens - chunk.start_token)
        assert packed == packed_alone(line, prompt, chunk.start_token, length)


@pytest.mark.parametrize("num_tokens", LENGTHS)
async def test_a_prompt_of_any_length_gives_what_it_gives_without_chunks(line: Line, num_tokens: int) -> None:
    message = await line.submit("r", prompt_of(num_tokens), 6, temperature=0.8, logprobs=2)
    async with line.running(*ALL):
        answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    line.assert_nothing_left()


async def test_token_0_comes_once_with_the_plan(line: Line) -> None:
    prompt = prompt_of(CHUNK_TOKENS + 1)
    message = await line.submit("r", prompt, 5, speculate=False)
    async with line.process("prefill") as prefill:
        await holds(lambda: line.num_entries("prefill") == 0)
    emitting = [transaction for transaction, _ in prefill.transport.committed if emits(transaction)]
    assert [[type(effect) for effect in transaction.effects] for transaction in emitting] == [[Emit, Publish, Plan]]
    plan = plan_of(line, "r")
    assert plan is not None
    assert plan.num_chunks == 2
    handed_on = wire.unpack(plan.payload, PrefilledPrompt)
    token_ids = result_alone(line, message)[0]
    assert isinstance(token_ids, tuple)
    assert handed_on.first_token_id == token_ids[0]
    assert (handed_on.num_chunks, handed_on.chunk_tokens, handed_on.speculate) == (2, CHUNK_TOKENS, False)
    assert (handed_on.prompt_token_ids, handed_on.max_tokens) == (tuple(prompt), 5)


@pytest.mark.parametrize("why", ["eos", "stop"])
async def test_a_request_that_ends_with_token_0_never_reaches_decode_and_leaves_no_blob(line: Line, why: str) -> None:
    prompt = prompt_of(2 * CHUNK_TOKENS + 1)
    printable = ascii_only()  # which token it is depends on the processor; half a character would wait
    first = result_alone(line, await line.submit("probe", prompt, 1, logit_bias=printable))[0]
    line.forget("probe")
    assert isinstance(first, tuple)
    stop = [line.tokenizer.decode(first)] if why == "stop" else []
    if why == "eos":
        line.end_text_with(first[0])
    await line.submit("r", prompt, 8, stop=stop, logit_bias=printable)
    async with line.running("compressor"), line.process("prefill", hold=emits) as prefill:
        await soon(prefill.transport.holding.wait())
        # Sealed before the end, so that no later commit of theirs is told that the request has gone.
        await holds(lambda: len(line.queues.broker.requests()["r"].chunks) == 2)
        prefill.transport.go_on.set()
        answer = await line.answer("r")
    assert answer.completion.token_ids == first
    assert answer.completion.finish_reason == "stop"
    assert answer.completion.text == ("" if why == "stop" else line.tokenizer.decode(first))
    line.assert_nothing_left()


@pytest.mark.parametrize("num_tokens", LENGTHS)
async def test_a_request_for_one_token_sends_no_chunk_at_all(line: Line, num_tokens: int) -> None:
    message = await line.submit("r", prompt_of(num_tokens), 1)
    async with line.process("prefill") as prefill:
        answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    assert answer.completion.finish_reason == "length"
    assert [[type(e) for e in t.effects] for t, _ in prefill.transport.committed] == [[Emit, Finish]]
    line.assert_nothing_left()


async def test_prefill_pauses_while_decode_has_enough(line: Line) -> None:
    line.max_decode_queue = 1
    line.queues.broker.credits.by_pool[line.pool.pool_id] = {"other": Credit(0, 1)}
    await line.submit("r", prompt_of(3), 4)
    async with line.process("prefill") as prefill:
        await holds(lambda: prefill.transport.num_refused_credits > 3)
        assert prefill.transport.committed == []
        assert plan_of(line, "r") is None
        line.queues.broker.credits.drop("other")
        await holds(lambda: plan_of(line, "r") is not None)


async def test_prefill_begins_nothing_while_no_decode_process_is_there(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "ASK_S", 0.05)
    line.announce_decode(slots=0)
    monkeypatch.setattr(stage, "_CLOSED_S", 0.01)
    await line.submit("r", prompt_of(3), 4)
    async with line.process("prefill") as prefill:
        await holds(lambda: prefill.transport.num_asked_processes > 3)
        [entry] = entries_of(line, "prefill")
        assert not entry.delivered, "another pool's prefill may take it"
        line.announce_decode(slots=1)
        await holds(lambda: plan_of(line, "r") is not None)


async def test_a_prompt_that_waits_for_credit_is_handed_back_when_decode_goes_away(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "ASK_S", 0.05)
    monkeypatch.setattr(stage, "_CLOSED_S", 0.01)
    line.queues.broker.credits.by_pool[line.pool.pool_id] = {"other": Credit(0, line.pool.quota_bytes - 1)}
    await line.submit("r", prompt_of(3), 4)
    async with line.process("prefill") as prefill:
        await holds(lambda: prefill.transport.num_refused_credits > 3)
        line.announce_decode(slots=0)
        await holds(lambda: [(entry.nonce, entry.tries) for entry in entries_of(line, "prefill")] == [(None, 0)])


async def test_prefill_pauses_while_the_bytes_of_the_pool_are_promised(line: Line) -> None:
    line.queues.broker.credits.by_pool[line.pool.pool_id] = {"other": Credit(0, line.pool.quota_bytes - 1)}
    await line.submit("r", prompt_of(3), 4)
    async with line.process("prefill") as prefill:
        await holds(lambda: prefill.transport.num_refused_credits > 3)
        assert plan_of(line, "r") is None
        line.queues.broker.credits.drop("other")
        await holds(lambda: plan_of(line, "r") is not None)


async def test_a_credit_lasts_until_the_request_ends_and_covers_all_of_its_kv(line: Line) -> None:
    message = await line.submit("r", prompt_of(CHUNK_TOKENS + 1), 2 * CHUNK_TOKENS)
    seen: list[tuple[int, int]] = []

    def watch(transaction: Transaction) -> bool:
        [credit] = line.queues.broker.credits.by_pool[line.pool.pool_id].values()
        seen.append((line.pool.usage().used_bytes, credit.num_bytes))
        return False

    async with line.running("prefill", "compressor"), line.process("decode", hold=watch):
        assert (await line.answer("r")).result == result_alone(line, message)
    assert len({promised for _, promised in seen}) == 1
    assert 0 < max(used for used, _ in seen) <= seen[0][1]
    line.assert_nothing_left()


async def test_a_batch_prompt_that_waits_for_credit_lets_an_interactive_one_pass(line: Line) -> None:
    with line.engine(1) as engine:
        page_bytes = sum(buffer.nbytes for buffer in engine.cache.page(0).buffers())
    line.queues.broker.credits.by_pool[line.pool.pool_id] = {"other": Credit(0, line.pool.quota_bytes - 4 * page_bytes)}
    await line.submit("large", prompt_of(8 * CHUNK_TOKENS), 4)
    async with line.running("compressor", "decode"), line.process("prefill") as prefill:
        await holds(lambda: prefill.transport.num_refused_credits > 3)
        small = await line.submit("small", prompt_of(5), 3, priority="interactive")
        assert (await line.answer("small")).result == result_alone(line, small)
        await line.cancel("large")
        await holds(lambda: line.num_entries("prefill") == 0)
    line.queues.broker.credits.drop("other")
    line.assert_nothing_left()


async def test_a_prompt_that_the_pool_could_never_hold_fails_at_once(line: Line) -> None:
    with line.engine(1) as engine:
        page = sum(buffer.nbytes for buffer in engine.cache.page(0).buffers())
    line.pool.quota_bytes = 2 * page + page // 2
    await line.submit("r", prompt_of(4 * CHUNK_TOKENS), 4)
    async with line.running("prefill"):
        answer = await line.answer("r")
    assert (answer.failure.code, answer.failure.retryable) == ("kv_pool_too_small", False)
    line.assert_nothing_left()


async def test_a_pool_that_stays_full_fails_the_request_so_that_it_can_be_tried_again(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may fill it after a prompt has begun."""
    monkeypatch.setattr(handover, "POOL_WAIT_S", 0.05)
    await line.submit("r", prompt_of(4 * CHUNK_TOKENS), 4)
    async with line.process("prefill", hold=publishes) as prefill:
        await soon(prefill.transport.holding.wait())
        ballast = line.fill_pool()
        prefill.transport.go_on.set()
        answer = await line.answer("r")
    assert (answer.failure.stage, answer.failure.code, answer.failure.retryable) == ("prefill", "kv_pool_full", True)
    line.pool.release(ballast.name)
    async with line.running("compressor"):
        await holds(lambda: line.num_entries("compressor") == 0)
    line.assert_nothing_left()


async def test_chunks_of_a_request_that_has_gone_are_released(line: Line) -> None:
    await line.submit("r", prompt_of(2 * CHUNK_TOKENS + 1), 4)
    async with line.process("prefill", hold=publishes) as prefill:
        await soon(prefill.transport.holding.wait())
        line.forget("r")
        prefill.transport.go_on.set()
        await holds(lambda: line.num_entries("prefill") == 0 and not line.pool.names())
    assert {outcome for _, outcome in prefill.transport.committed} <= {Outcome.GONE, Outcome.ALREADY}
    line.assert_nothing_left()


async def test_a_prefill_that_lost_its_lease_frees_its_chunk_and_the_other_one_answers(line: Line) -> None:
    message = await line.submit("r", prompt_of(2 * CHUNK_TOKENS + 1), 4)
    other = line.transport("other")
    async with line.process("prefill", hold=publishes) as slow:
        await soon(slow.transport.holding.wait())
        line.clock.end_leases()
        taken = await other.receive("prefill", 1, 1)
        slow.transport.go_on.set()
        await holds(lambda: bool(slow.transport.committed) and not line.pool.names())
        assert [outcome for _, outcome in slow.transport.committed] == [Outcome.FENCED]
    await other.hand_back(taken)
    async with line.running(*ALL):
        assert (await line.answer("r")).result == result_alone(line, message)
    line.assert_nothing_left()


async def test_a_prefill_killed_in_mid_prompt_changes_nothing(line: Line) -> None:
    message = await line.submit("r", prompt_of(4 * CHUNK_TOKENS + 1), 4, temperature=0.8)

    def second_chunk(transaction: Transaction) -> bool:
        [first, *_] = transaction.effects
        return isinstance(first, Publish) and wire.unpack(first.payload, RawChunk).chunk_index == 1

    async with line.running("compressor", "decode"):
        async with line.process("prefill", hold=second_chunk) as doomed:
            await soon(doomed.transport.holding.wait())
            await doomed.kill()
        line.clock.end_leases()
        async with line.running("prefill"):
            answer = await line.answer("r")
        await holds(lambda: line.num_entries("compressor") == 0)
    assert answer.result == result_alone(line, message)
    line.assert_nothing_left()


async def test_a_prompt_that_ended_every_prefill_fails_leaves_no_blob_and_others_are_served(line: Line) -> None:
    await line.submit("r", prompt_of(2 * CHUNK_TOKENS + 1), 4)

    async with line.running("compressor"), line.process("prefill", hold=emits) as doomed:
        await soon(doomed.transport.holding.wait())
        await holds(lambda: len(line.queues.broker.requests()["r"].chunks) == 2)
        await doomed.kill()
    for _ in range(MAX_DELIVERIES - 1):
        line.clock.end_leases()
        await line.transport("crashing").receive("prefill", 1, 1)
    line.clock.end_leases()
    message = await line.submit("s", prompt_of(5), 3)
    async with line.running(*ALL):
        failure = (await line.answer("r")).failure
        assert (await line.answer("s")).result == result_alone(line, message)
    assert (failure.stage, failure.code, failure.retryable) == ("prefill", "too_many_tries", False)
    assert len(line.dead_letters("prefill")) == 1
    line.assert_nothing_left()


async def test_an_unreadable_entry_is_buried_and_others_are_served(line: Line) -> None:
    await line.append("prefill", b"\xc1 not msgpack")
    message = await line.submit("r", prompt_of(5), 3)
    async with line.running(*ALL):
        assert (await line.answer("r")).result == result_alone(line, message)
    [reason] = line.dead_letters("prefill")
    assert reason.startswith("unreadable_message: not_msgpack")
    line.assert_nothing_left()


async def test_a_prefill_that_seals_needs_no_compressor(line: Line) -> None:
    line.seal_in_prefill = True
    message = await line.submit("r", prompt_of(2 * CHUNK_TOKENS + 1), 4, temperature=0.8)
    async with line.running("prefill", "decode"):
        assert (await line.answer("r")).result == result_alone(line, message)
    line.assert_nothing_left()


@pytest.mark.parametrize("seal", [False, True])
async def test_a_pool_that_could_never_hold_a_chunk_stops_the_start(line: Line, seal: bool) -> None:
    line.pool.quota_bytes = 9000
    with line.engine(1) as engine, pytest.raises(InvalidValue, match="kv_pool_bytes is 9000, expected at least"):
        Handover(engine, line.pool, chunk_tokens=2 * CHUNK_TOKENS, seal=seal, compression="none")


async def test_a_stop_in_mid_prompt_hands_it_back_and_the_next_process_answers(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "DRAIN_S", 0.0)
    message = await line.submit("r", prompt_of(6 * CHUNK_TOKENS), 4)
    async with line.running("compressor"):
        async with line.process("prefill", hold=publishes) as leaving:
            await soon(leaving.transport.holding.wait())
            leaving.stopping.set()
            await soon(leaving.task)
        [entry] = entries_of(line, "prefill")
        assert (entry.nonce, entry.tries) == (None, 0)
        async with line.running("prefill", "decode"):
            answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    line.assert_nothing_left()
