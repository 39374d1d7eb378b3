"""Credit: enough for all of a request, never one that keeps others waiting for ever, and what ends a wait for room."""

import asyncio
import fcntl
import os
from pathlib import Path

import pytest

from kv_store.pool import FilePool
from pipeline.errors import ServerUnreachable, StateDamaged
from pipeline.keys import RETURNED, Priority
from pipeline.leases import HANG_TICKS
from pipeline.memory_credits import Credit
from pipeline.transport import Emit, Publish, Transaction
from stages.decode import admission
from stages.prefill import handover, room, stage
from stages.prefill.handover import Handover
from tests.stages import line as line_module
from tests.stages.alone import prompt_of, result_alone
from tests.stages.damage import delete
from tests.stages.line import CHUNK_TOKENS, Line, holds, soon

NUM_PROMPT = 4 * CHUNK_TOKENS


def bytes_for(line: Line, num_tokens: int, *, with_checkpoints: bool = True) -> int:
    with line.engine(1) as engine:
        of = Handover(engine, line.pool, chunk_tokens=CHUNK_TOKENS, seal=line.seal_in_prefill, compression="none")
        return of.bytes_for(num_tokens, with_checkpoints=with_checkpoints)


def leave_credit_for(line: Line, num_bytes: int) -> None:
    other = Credit(0, line.pool.quota_bytes - num_bytes)
    line.queues.broker.credits.by_pool.setdefault(line.pool.pool_id, {})["other"] = other


def publishes(transaction: Transaction) -> bool:
    return any(isinstance(effect, Publish) for effect in transaction.effects)


def nth_token(number: int):
    return lambda transaction: any(
        isinstance(effect, Emit) and effect.first_index + effect.num_tokens > number for effect in transaction.effects
    )


@pytest.mark.parametrize("priority", ["batch", "interactive"])
@pytest.mark.parametrize("stopped", [False, True])
async def test_a_credit_whose_prefill_is_gone_makes_way_for_who_is_served_first(
    line: Line, monkeypatch: pytest.MonkeyPatch, priority: Priority, stopped: bool
) -> None:
    """Else the one in front waits for credit that only its own end could give back."""
    monkeypatch.setattr(stage, "DRAIN_S", 0.0)
    leave_credit_for(line, bytes_for(line, NUM_PROMPT + 3) + 1000)
    first = await line.submit("first", prompt_of(NUM_PROMPT), 4)
    async with line.running("compressor", "decode"):
        async with line.process("prefill", hold=publishes) as leaving:
            await soon(leaving.transport.holding.wait())
            if stopped:
                leaving.stopping.set()
                leaving.transport.go_on.set()
                await soon(leaving.task)
            else:
                await leaving.kill()
        second = await line.submit("second", prompt_of(NUM_PROMPT, 1), 4, priority=priority)
        async with line.process("prefill") as prefill:
            await holds(lambda: bool({"first", "second"} & set(prefill.transport.asked)))
            line.clock.end_leases()
            answers = [await line.answer(message.request_id) for message in (first, second)]
    assert [answer.result for answer in answers] == [result_alone(line, message) for message in (first, second)]
    for name in line.pool.names():  # of the credit that made way: a sweeper's
        line.pool.release(name)
    line.queues.broker.credits.drop("other")
    line.assert_nothing_left()


async def test_a_credit_that_a_request_has_is_enough_when_there_are_fewer_slots(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_RECOMPUTED_TOKENS", 0)
    line.announce_decode(slots=2)  # for four requests
    messages = [await line.submit(f"r{n}", prompt_of(70 + n), 4) for n in range(4)]
    async with line.running("prefill", "compressor"):
        await holds(lambda: line.num_entries("decode") == 4)
    for name in line.pool.names():
        delete(line.pool_directory, name, "")
    line.announce_decode(slots=1)  # for two
    async with line.running("compressor", "decode"):
        await holds(lambda: line.queues.broker.length("prefill", RETURNED, None) == 4)
        async with line.running("prefill"):
            answers = [await line.answer(message.request_id) for message in messages]
    assert [answer.result for answer in answers] == [result_alone(line, message) for message in messages]
    line.assert_nothing_left()


async def test_what_a_killed_prefill_wrote_does_not_use_up_the_credit(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "POOL_WAIT_S", 3.0)
    needed = bytes_for(line, 6 * CHUNK_TOKENS + 1)
    ballast = line.fill_pool(left_bytes=needed)
    leave_credit_for(line, needed)
    message = await line.submit("r", prompt_of(6 * CHUNK_TOKENS), 2)
    async with line.running("compressor"):
        async with line.process("prefill", hold=publishes) as doomed:
            await soon(doomed.transport.holding.wait())
            await doomed.kill()
        line.clock.end_leases()
        async with line.running("prefill", "decode"):
            assert (await line.answer("r")).result == result_alone(line, message)
    line.pool.release(ballast.name)
    line.queues.broker.credits.drop("other")
    line.assert_nothing_left()


@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize("num_prompt", [1, CHUNK_TOKENS - 1, 2 * CHUNK_TOKENS - 1, 2 * CHUNK_TOKENS + 1])
async def test_no_request_ever_takes_more_than_its_credit(line: Line, seal: bool, num_prompt: int) -> None:
    line.seal_in_prefill = seal
    used_bytes: list[int] = []
    promised: list[int] = []

    def watch(_: Transaction) -> bool:
        used_bytes.append(line.pool.usage().used_bytes)
        promised.extend(credit.num_bytes for credit in line.queues.broker.credits.by_pool[line.pool.pool_id].values())
        return False

    message = await line.submit("r", prompt_of(num_prompt), 3 * CHUNK_TOKENS, speculate=False)
    stages = ("prefill",) if seal else ("prefill", "compressor")
    async with line.running(*stages), line.process("decode", hold=watch):
        assert (await line.answer("r")).result == result_alone(line, message)
    assert len(set(promised)) == 1
    assert 0 < max(used_bytes) <= promised[0]
    line.assert_nothing_left()


async def test_without_keeping_kv_a_request_that_is_sent_back_has_credit_for_its_output_too(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_RECOMPUTED_TOKENS", CHUNK_TOKENS)
    line.keep_kv = False
    promised: list[int] = []

    def watch(transaction: Transaction) -> bool:
        if transaction.attempt == 1:
            promised.extend(
                credit.num_bytes for credit in line.queues.broker.credits.by_pool[line.pool.pool_id].values()
            )
        return False

    message = await line.submit("r", prompt_of(2 * CHUNK_TOKENS), 6 * CHUNK_TOKENS, speculate=False)
    async with line.running("compressor"), line.process("prefill", hold=watch):
        async with line.process("decode", hold=nth_token(5 * CHUNK_TOKENS)) as doomed:
            await soon(doomed.transport.holding.wait())
            await doomed.kill()
        line.clock.end_leases()
        async with line.running("decode"):
            answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    assert min(promised) >= bytes_for(line, 7 * CHUNK_TOKENS - 2, with_checkpoints=False)
    line.assert_nothing_left()


@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("error", [ServerUnreachable("here", "no answer"), StateDamaged(("r",), (None,))])
async def test_a_commit_that_fails_in_mid_prompt_costs_time_only(line: Line, error: Exception, max_tokens: int) -> None:
    message = await line.submit("r", prompt_of(3 * CHUNK_TOKENS), max_tokens)
    async with line.running("compressor", "decode"), line.process("prefill") as prefill:
        commit, failed = prefill.transport.commit, asyncio.Event()

        async def fails_once(transactions):
            begun = any(publishes(t) or not t.effects for t in transactions) and len(prefill.transport.asked) >= 1
            if begun and not failed.is_set():
                failed.set()
                raise error
            return await commit(transactions)

        prefill.transport.commit = fails_once
        await soon(failed.wait())
        line.clock.end_leases()
        assert (await line.answer("r")).result == result_alone(line, message)
        assert not prefill.task.done()
    line.assert_nothing_left()


async def test_a_pool_that_is_locked_for_a_while_is_waited_for(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a process that was stopped in the moment in which it held the lock."""
    monkeypatch.setattr(line.pool._directory, "_lock_timeout_s", 0.1)
    message = await line.submit("r", prompt_of(20), 4)
    directory = os.open(line.pool_directory, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    async with line.running("compressor", "decode"), line.process("prefill") as prefill:
        await holds(lambda: "r" in prefill.transport.asked)
        await asyncio.sleep(0.5)  # several of its tries fail
        assert not prefill.task.done()
        os.close(directory)
        assert (await line.answer("r")).result == result_alone(line, message)
    line.assert_nothing_left()


@pytest.mark.parametrize("num_prompt", [20, 3 * CHUNK_TOKENS])
async def test_a_stop_while_it_waits_for_room_hands_the_prompt_back(
    line: Line, monkeypatch: pytest.MonkeyPatch, num_prompt: int
) -> None:
    monkeypatch.setattr(stage, "DRAIN_S", 0.0)
    ballast = line.fill_pool(left_bytes=2000)
    message = await line.submit("r", prompt_of(num_prompt), 4)
    async with line.process("prefill") as prefill:
        await holds(lambda: bool(line.queues.broker.credits.by_pool.get(line.pool.pool_id)))
        prefill.stopping.set()
        await soon(prefill.task)
    assert line.queues.broker.requests()["r"].state == "queued"
    line.pool.release(ballast.name)
    async with line.running("prefill", "compressor", "decode"):
        assert (await line.answer("r")).result == result_alone(line, message)
    line.assert_nothing_left()


async def test_waiting_for_room_is_no_hang(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, hung = [], []
    keeper = line_module.LeaseKeeper

    def watched(*args, **kwargs):
        kept.append(keeper(*args, on_hung=lambda: hung.append(1), **kwargs))
        return kept[-1]

    monkeypatch.setattr(line_module, "LeaseKeeper", watched)
    ballast = line.fill_pool(left_bytes=2000)
    message = await line.submit("r", prompt_of(3 * CHUNK_TOKENS), 4)
    async with line.process("prefill") as prefill, line.running("compressor", "decode"):
        await holds(lambda: bool(line.queues.broker.credits.by_pool.get(line.pool.pool_id)))
        for _ in range(2 * HANG_TICKS + 2):
            await kept[0].renew()
            await asyncio.sleep(0.03)  # longer than it looks again
        assert hung == []
        line.pool.release(ballast.name)
        assert (await line.answer("r")).result == result_alone(line, message)
        assert not prefill.task.done()
    line.assert_nothing_left()


async def test_a_prefill_whose_pool_has_no_decode_takes_nothing_from_the_others(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_CLOSED_S", 0.01)
    monkeypatch.setattr(room, "ASK_S", 0.05)
    ours = line.pool
    with FilePool.open(tmp_path / "other", ours.quota_bytes) as other:
        line.pool = other
        async with line.process("prefill") as lonely:
            await holds(lambda: lonely.transport.num_asked_processes > 2)
            line.pool = ours
            message = await line.submit("r", prompt_of(20), 4)
            async with line.running("prefill", "compressor", "decode"):
                assert (await line.answer("r")).result == result_alone(line, message)
            assert lonely.transport.asked == []
    line.assert_nothing_left()


async def test_a_prompt_that_no_prefill_has_pages_for_fails_and_others_go_on(line: Line) -> None:
    await line.submit("large", prompt_of(17 * CHUNK_TOKENS), 4)
    message = await line.submit("small", prompt_of(5), 4)
    async with line.running("prefill", "compressor", "decode"):
        failure = (await line.answer("large")).failure
        assert (await line.answer("small")).result == result_alone(line, message)
    assert (failure.stage, failure.code, failure.retryable) == ("prefill", "kv_cache_too_small", False)
    line.assert_nothing_left()
