"""Decode takes over: from the blobs of a request and its checkpoints, from those that stop, and after crashes."""

import asyncio

import pytest

from pipeline import counters as names
from pipeline import wire
from pipeline.errors import ServerUnreachable, StateDamaged
from pipeline.keys import RETURNED
from pipeline.messages import TokenizedPrompt
from pipeline.transport import Emit, GiveCredit, Outcome, Restart, ResultEntry, Transaction
from stages.common.kv_blobs import owner_of
from stages.common.restart import MAX_RESTARTS
from stages.decode import admission, stage
from stages.engine import stepping
from tests.stages.alone import ascii_only, prompt_of, repetitive_prompt, result_alone
from tests.stages.damage import delete
from tests.stages.line import CHUNK_TOKENS, Line, holds, soon

LIVELY = {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "top_p": 0.95, "logprobs": 3}
PROMPTS = [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 5]


def blobs_of(line: Line, request_id: str, attempt: int = 0) -> list[str]:
    return [name for name in line.pool.names() if owner_of(request_id, attempt) in name]


def num_tokens_of(line: Line, request_id: str) -> int:
    return line.queues.broker.requests()[request_id].num_tokens


def nth_token(line: Line, number: int, request_id: str = "r"):
    """Whether an emission would bring a request's token `number` or a later one."""

    def is_it(transaction: Transaction) -> bool:
        return transaction.request_id == request_id and any(
            isinstance(effect, Emit) and effect.first_index + effect.num_tokens > number
            for effect in transaction.effects
        )

    return is_it


async def killed_at_token(line: Line, number: int) -> None:
    """Run decode until it is about to emit that token, and kill it."""
    async with line.process("decode", hold=nth_token(line, number)) as doomed:
        await soon(doomed.transport.holding.wait())
        await doomed.kill()
    line.clock.end_leases()


@pytest.mark.parametrize("num_prompt", PROMPTS)
@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_a_request_taken_over_loads_prompt_and_checkpoints_and_replays_only_the_rest(
    line: Line, num_prompt: int, compression: str
) -> None:
    line.compression = "zstd" if compression == "zstd" else "none"
    num_output = 2 * CHUNK_TOKENS + 20
    message = await line.submit("r", prompt_of(num_prompt), num_output, speculate=False, **LIVELY)
    async with line.running("prefill", "compressor"):
        await killed_at_token(line, num_output - 5)
        num_seen = num_tokens_of(line, "r")
        first = num_prompt // CHUNK_TOKENS * CHUNK_TOKENS  # pages and chunks are of one size here
        num_kept = first + (num_prompt + num_seen - 1 - first) // CHUNK_TOKENS * CHUNK_TOKENS
        num_chunks = -(-num_prompt // CHUNK_TOKENS) + (num_kept - first) // CHUNK_TOKENS
        assert len(blobs_of(line, "r")) == num_chunks
        line.counters.take()
        async with line.running("decode"):
            answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    assert line.counters.take() == {
        names.REQUESTS_TAKEN_OVER: 1,
        names.TOKENS_REPLAYED: num_prompt + num_seen - 1 - num_kept,
    }
    assert answer.terminal.usage is not None
    assert answer.terminal.usage.recomputed_tokens == num_prompt + num_seen - 1 - num_kept < CHUNK_TOKENS
    line.assert_nothing_left()


async def test_a_lost_checkpoint_costs_a_longer_replay_and_nothing_else(line: Line) -> None:
    message = await line.submit("r", prompt_of(20), 2 * CHUNK_TOKENS + 10, **LIVELY)
    async with line.running("prefill", "compressor"):
        await killed_at_token(line, 2 * CHUNK_TOKENS)
        [_, checkpoint] = sorted(blobs_of(line, "r"), key=lambda name: name.split("_")[3])[:2]
        delete(line.pool_directory, checkpoint, "")
        line.counters.take()
        async with line.running("decode"):
            answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    counted = line.counters.take()
    assert counted[names.KV_MISSING] == 1
    assert counted[names.TOKENS_REPLAYED] > CHUNK_TOKENS
    line.assert_nothing_left()


async def test_without_keeping_kv_blobs_and_credit_go_when_decode_has_them_and_a_take_over_computes(line: Line) -> None:
    line.keep_kv = False
    message = await line.submit("r", prompt_of(CHUNK_TOKENS + 3), 30, **LIVELY)
    async with line.running("prefill", "compressor"):
        async with line.process("decode", hold=nth_token(line, 20)) as doomed:
            await soon(doomed.transport.holding.wait())
            assert line.pool.names() == []
            assert line.queues.broker.credits.by_pool[line.pool.pool_id] == {}
            await doomed.kill()
        line.clock.end_leases()
        async with line.running("decode"):
            answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    line.assert_nothing_left()


@pytest.mark.parametrize("num_seen", [1, 40])
async def test_what_is_lost_in_large_goes_back_to_prefill_and_keeps_what_was_emitted(
    line: Line, monkeypatch: pytest.MonkeyPatch, num_seen: int
) -> None:
    monkeypatch.setattr(admission, "MAX_RECOMPUTED_TOKENS", CHUNK_TOKENS)
    params = LIVELY | {"logit_bias": ascii_only(), "stop": ["zq"]}
    message = await line.submit("r", prompt_of(2 * CHUNK_TOKENS + 5), 100, **params)
    async with line.running("compressor"):
        async with line.running("prefill"):
            if num_seen > 1:
                await killed_at_token(line, num_seen)
            else:
                await holds(lambda: line.num_entries("decode") == 1)
        seen = list(line.queues.broker.requests()["r"].results)
        for name in blobs_of(line, "r"):
            delete(line.pool_directory, name, "")
        async with line.process("decode") as decode:
            await holds(lambda: line.queues.broker.length("prefill", RETURNED, None) == 1)
            async with line.process("prefill") as prefill:
                answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    assert line.queues.broker.requests()["r"].results[: len(seen)] == seen
    [restart] = [e for t, _ in decode.transport.committed for e in t.effects if isinstance(e, Restart)]
    again = wire.unpack(restart.payload, TokenizedPrompt)
    assert (again.attempt, again.num_restarts, again.prompt_token_ids) == (1, 1, message.prompt_token_ids)
    emitted = [e for t, _ in prefill.transport.committed for e in t.effects if isinstance(e, Emit)]
    assert emitted == [], "token 0 was out already"
    assert line.counters.take()[names.REQUESTS_SENT_BACK] == 1
    line.assert_nothing_left()


async def test_a_request_whose_blobs_are_lost_every_time_is_computed_here_in_the_end(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_RECOMPUTED_TOKENS", 0)
    message = await line.submit("r", prompt_of(2 * CHUNK_TOKENS + 5), 6, **LIVELY)
    for restart in range(MAX_RESTARTS + 1):
        async with line.running("prefill", "compressor"):
            await holds(lambda: line.num_entries("decode") == 1)
        for name in blobs_of(line, "r", restart):
            delete(line.pool_directory, name, "")
        async with line.running("decode"):
            await holds(lambda: line.num_entries("decode") == 0)
    answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    assert line.counters.take()[names.REQUESTS_SENT_BACK] == MAX_RESTARTS
    line.assert_nothing_left()


async def test_a_stop_hands_over_what_would_take_long_and_others_go_on_at_once(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "DRAIN_S", 0.0)
    messages = [await line.submit(f"r{n}", repetitive_prompt(30 + n), 200, **LIVELY) for n in range(3)]
    async with line.running("prefill", "compressor"):
        async with line.process("decode") as leaving:
            await holds(lambda: min(num_tokens_of(line, f"r{n}") for n in range(3)) > 5)
        assert leaving.task.done()
        assert max(num_tokens_of(line, f"r{n}") for n in range(3)) < 200
        entries = [
            entry
            for name, all_of in line.queues.broker.streams.items()
            if ":decode:" in name
            for entry in all_of.values()
        ]
        assert [(entry.nonce, entry.tries) for entry in entries] == [(None, 0)] * 3
        async with line.running("decode"):  # no lease has to end
            answers = [await line.answer(message.request_id) for message in messages]
    assert [answer.result for answer in answers] == [result_alone(line, message) for message in messages]
    line.assert_nothing_left()


async def test_a_request_that_crashed_decode_twice_runs_alone_until_it_has_moved(line: Line) -> None:
    suspect = await line.submit("suspect", prompt_of(20), 8, **LIVELY)
    async with line.running("prefill", "compressor"):
        await holds(lambda: line.num_entries("decode") == 1)
        for _ in range(2):
            await line.transport("crashing").receive("decode", 1, 1)
            line.clock.end_leases()
        mate = await line.submit("mate", prompt_of(21), 150, **LIVELY)
        late = await line.submit("late", prompt_of(22), 4, **LIVELY)
        alone: list[set[str]] = []

        def watch(transactions_of: Transaction) -> bool:
            if transactions_of.request_id == "suspect" and not alone:
                alone.append({request_id for request_id in ("mate", "late") if num_tokens_of(line, request_id) > 1})
            return False

        async with line.process("decode", hold=watch):
            answers = [await line.answer(message.request_id) for message in (suspect, mate, late)]
    assert alone == [set()], "nobody else had begun when it made its first step"
    assert [answer.result for answer in answers] == [result_alone(line, m) for m in (suspect, mate, late)]
    line.assert_nothing_left()


async def test_a_server_that_goes_away_for_longer_than_the_patience_costs_time_only(line: Line) -> None:
    messages = [await line.submit(f"r{n}", prompt_of(20 + n), 30, **LIVELY) for n in range(2)]
    async with line.running("prefill", "compressor"):
        await holds(lambda: line.num_entries("decode") == 2)
        async with line.process("decode") as decode:
            commit, failed = decode.transport.commit, asyncio.Event()

            async def lost(transactions):
                if not failed.is_set() and any(num_tokens_of(line, t.request_id) > 4 for t in transactions):
                    failed.set()
                    raise ServerUnreachable("here", "no answer")
                return await commit(transactions)

            decode.transport.commit = lost
            await soon(failed.wait())
            line.clock.end_leases()
            answers = [await line.answer(message.request_id) for message in messages]
    assert [answer.result for answer in answers] == [result_alone(line, message) for message in messages]
    line.assert_nothing_left()


async def test_damaged_state_of_one_request_does_not_end_the_others(line: Line) -> None:
    messages = [await line.submit(f"r{n}", prompt_of(20 + n), 30, **LIVELY) for n in range(2)]
    async with line.running("prefill", "compressor"):
        await holds(lambda: line.num_entries("decode") == 2)
        async with line.process("decode") as decode:
            commit, damaged = decode.transport.commit, asyncio.Event()

            async def contradicts(transactions):
                outcomes = await commit([t for t in transactions if t.request_id != "r0"])
                both = iter(outcomes)
                emits = any(isinstance(e, Emit) for t in transactions for e in t.effects if t.request_id == "r0")
                if emits and not damaged.is_set():
                    damaged.set()
                    words = tuple(None if t.request_id == "r0" else next(both).value for t in transactions)
                    raise StateDamaged(("r0",), words)
                return [(await commit([t]))[0] if t.request_id == "r0" else next(both) for t in transactions]

            decode.transport.commit = contradicts
            answer = await line.answer("r1")
            assert damaged.is_set()
            line.clock.end_leases()
            other = await line.answer("r0")
    assert [other.result, answer.result] == [result_alone(line, message) for message in messages]
    line.assert_nothing_left()


async def test_a_lost_checkpoint_is_written_again_by_the_next_holder(line: Line) -> None:
    message = await line.submit("r", prompt_of(20), 5 * CHUNK_TOKENS, speculate=False)
    async with line.running("prefill", "compressor"):
        await killed_at_token(line, 2 * CHUNK_TOKENS)
        [_, checkpoint] = sorted(blobs_of(line, "r"), key=lambda name: name.split("_")[3])[:2]
        delete(line.pool_directory, checkpoint, "")
        await killed_at_token(line, 3 * CHUNK_TOKENS)
        [credit] = line.queues.broker.credits.by_pool[line.pool.pool_id].values()
        for number in (4, 5):
            line.counters.take()
            await killed_at_token(line, number * CHUNK_TOKENS - 20)
            counted = line.counters.take()
            assert names.KV_MISSING not in counted
            assert counted[names.TOKENS_REPLAYED] < CHUNK_TOKENS
            assert line.pool.usage().used_bytes <= credit.num_bytes
        async with line.running("decode"):
            answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    line.assert_nothing_left()


@pytest.mark.parametrize("where", ["chunks", "results"])
async def test_state_of_a_request_that_cannot_be_read_takes_no_other_one_along(line: Line, where: str) -> None:
    bad, good = [await line.submit(name, prompt_of(20 + n), 40) for n, name in enumerate(("bad", "good"))]
    async with line.running("prefill", "compressor"):
        await holds(lambda: line.num_entries("decode") == 2)
    state = line.queues.broker.requests()["bad"]
    if where == "chunks":
        state.chunks[0] = b"rubbish"
    else:
        state.results[0] = ResultEntry(1, b"rubbish")
    async with line.process("decode") as decode:
        assert (await line.answer("good")).result == result_alone(line, good)
        if where == "chunks":
            assert (await line.answer("bad")).result == result_alone(line, bad)
        else:
            await holds(lambda: line.queues.broker.requests()["bad"].state == "failed")
        assert not decode.task.done()
    assert len(line.dead_letters("decode")) == (where == "results")


async def test_a_stop_in_a_long_replay_hands_the_request_over(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "DRAIN_S", 0.0)
    line.keep_kv = False
    message = await line.submit("r", prompt_of(20), 6 * CHUNK_TOKENS, speculate=False)
    async with line.running("prefill", "compressor"):
        await killed_at_token(line, 5 * CHUNK_TOKENS)
        async with line.process("decode") as leaving:
            assert leaving.engine is not None
            compute, num_pieces = leaving.engine.compute, 0

            async def watched(function, *args, **kwargs):
                nonlocal num_pieces
                num_pieces += function is stepping.replay
                leaving.stopping.set()
                return await compute(function, *args, **kwargs)

            leaving.engine.compute = watched
            await soon(leaving.task)
        assert num_pieces == 1
        async with line.running("decode"):  # no lease has to end
            assert (await line.answer("r")).result == result_alone(line, message)
    line.assert_nothing_left()


async def test_whoever_lost_a_request_while_loading_it_leaves_its_blobs_to_the_new_holder(line: Line) -> None:
    line.keep_kv = False
    message = await line.submit("r", prompt_of(3 * CHUNK_TOKENS), 10)

    def gives(transaction: Transaction) -> bool:
        return any(isinstance(effect, GiveCredit) for effect in transaction.effects)

    async with line.running("prefill", "compressor"):
        async with line.process("decode", hold=gives) as slow:
            await soon(slow.transport.holding.wait())
            line.clock.end_leases()
            taken = await line.transport("other").receive("decode", 1, 1)
            slow.transport.go_on.set()
            await holds(lambda: any(outcome is Outcome.FENCED for _, outcome in slow.transport.committed))
            assert len(line.pool.names()) == 3
        await line.transport("other").hand_back(taken)
        line.clock.end_leases()
        line.counters.take()
        async with line.running("decode"):
            assert (await line.answer("r")).result == result_alone(line, message)
    assert names.KV_MISSING not in line.counters.take()
    line.assert_nothing_left()


async def test_a_batch_request_that_waits_for_pages_lets_an_interactive_one_pass(line: Line) -> None:
    line.num_pages = 8
    messages = [await line.submit("running", prompt_of(20), 250, speculate=False)]  # five pages
    async with line.running("prefill", "compressor"), line.process("decode") as decode:
        await holds(lambda: num_tokens_of(line, "running") > 2)
        messages.append(await line.submit("large", prompt_of(20), 250, speculate=False))
        await holds(lambda: "large" in decode.transport.asked)
        messages.append(await line.submit("urgent", prompt_of(20), 4, priority="interactive"))
        await line.answer("urgent")
        assert num_tokens_of(line, "running") < 250
        answers = [await line.answer(message.request_id) for message in messages]
    assert [answer.result for answer in answers] == [result_alone(line, message) for message in messages]
    line.assert_nothing_left()
