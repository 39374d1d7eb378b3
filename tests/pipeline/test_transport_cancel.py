"""What every transport promises about cancelling, and about the log of requests that ended, however they did."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline.errors import UnknownRequest
from pipeline.keys import RESULT_TTL_S, Keys
from pipeline.transport import (
    AddChunk,
    DeadLetter,
    Effect,
    Emit,
    EndState,
    Exists,
    Finish,
    FinishedRequest,
    Outcome,
    Plan,
    Publish,
    ResultEntry,
    Transaction,
    Transport,
)
from tests.pipeline.benches import Bench, MemoryBench, RedisBench, soon, take_one

END = ResultEntry(None, b"cancelled")
EFFECTS: tuple[tuple[Effect, ...], ...] = (
    (),
    (Emit(b"b", 1, 1),),
    (Publish("prefill", "interactive", b"next"),),
    (AddChunk(1, b"x"),),
    (Plan(1, "interactive", b"plan"),),
    (Finish(b"end", "finished"),),
    (Finish(b"end", "failed"), DeadLetter("why")),
)


async def admitted(transport: Transport, request_id: str = "r") -> None:
    await transport.admit(request_id, "interactive", b"work")


async def entries(transport: Transport) -> list[ResultEntry]:
    return await transport.read_results("r", 0, block_s=0)


async def test_a_queued_request_ends_at_once_and_its_entry_when_somebody_takes_it(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    assert await transport.cancel("r", b"cancelled") is True
    assert await entries(transport) == [END]
    assert await bench.state_of("r") == "cancelled"
    assert await transport.queue_length("tokenizer", "interactive") == 1
    delivery = await take_one(transport, "tokenizer")
    publish = Transaction(delivery, "r", 0, (Publish("prefill", "interactive", b"next"),), ack=True)
    assert await transport.commit([publish]) == [Outcome.GONE]
    assert await bench.leftovers() == []


@pytest.mark.parametrize("effects", EFFECTS, ids=lambda effects: "+".join(type(e).__name__ for e in effects) or "ack")
@pytest.mark.parametrize("ack", [True, False])
async def test_whatever_its_holder_commits_later_is_gone_with_the_entry(
    bench: Bench, effects: tuple[Effect, ...], ack: bool
) -> None:
    transport = await bench.join()
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    started = Transaction(delivery, "r", 0, (Emit(b"a", 0, 1), AddChunk(0, b"x")), ack=False)
    assert await transport.commit([started]) == [Outcome.OK]
    assert await transport.cancel("r", b"cancelled") is True
    assert await transport.commit([Transaction(delivery, "r", 0, effects, ack)]) == [Outcome.GONE]
    assert await entries(transport) == [ResultEntry(1, b"a"), END]
    assert await transport.chunks("r", 0) == {}
    assert await bench.state_of("r") == "cancelled"
    assert await bench.leftovers() == []


async def test_what_waited_to_be_joined_never_reaches_decode(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    await admitted(transport, "s")
    first, second = await take_one(transport, "tokenizer"), await take_one(transport, "tokenizer")
    await transport.commit([Transaction(first, "r", 0, (Plan(2, "batch", b"plan"), AddChunk(0, b"x")), ack=False)])
    assert await transport.cancel("r", b"cancelled") is True
    late = Transaction(first, "r", 0, (AddChunk(1, b"x"),), ack=True)
    other = Transaction(second, "s", 0, (AddChunk(0, b"x"), Plan(1, "batch", b"plan")), ack=True)
    assert await transport.commit([late, other]) == [Outcome.GONE, Outcome.OK]
    assert (await take_one(transport, "decode")).payload == b"plan"
    assert await transport.queue_length("decode", "batch") == 1


async def test_a_request_is_cancelled_once_and_has_one_end(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    outcomes = await asyncio.gather(*(transport.cancel("r", f"by {number}".encode()) for number in range(5)))
    assert sorted(outcomes) == [False, False, False, False, True]
    assert await entries(transport) == [ResultEntry(None, f"by {outcomes.index(True)}".encode())]
    finish = Transaction(delivery, "r", 0, (Finish(b"end", "finished"),), ack=True)
    assert await transport.commit([finish]) == [Outcome.GONE]
    assert len(await entries(transport)) == 1


async def test_a_request_that_has_ended_stays_as_it_ended(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    end = Transaction(delivery, "r", 0, (Emit(b"a", 0, 1), Finish(b"end", "finished")), ack=True)
    assert await transport.commit([end]) == [Outcome.OK]
    assert await transport.cancel("r", b"cancelled") is False
    assert await entries(transport) == [ResultEntry(1, b"a"), ResultEntry(None, b"end")]
    assert await bench.state_of("r") == "finished"


async def test_a_request_that_nobody_knows_cannot_be_cancelled(bench: Bench) -> None:
    transport = await bench.join()
    with pytest.raises(UnknownRequest, match="nobody"):
        await transport.cancel("nobody", b"cancelled")
    assert await bench.state_of("nobody") is None
    assert await transport.finished(10) == []


async def test_a_waiting_reader_gets_the_end(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    waiting = asyncio.create_task(transport.read_results("r", 0, block_s=30))
    assert await transport.cancel("r", b"cancelled") is True
    assert await soon(waiting) == [END]


async def test_the_id_of_a_cancelled_request_stays_taken(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    await transport.cancel("r", b"cancelled")
    assert await transport.admit("r", "interactive", b"again") == Exists()


async def test_the_last_requests_that_ended_are_logged_in_their_order(bench: Bench) -> None:
    transport = await bench.join()
    for request_id in ("r", "s", "t", "u"):
        await admitted(transport, request_id)
    await transport.cancel("t", b"cancelled")
    endings: tuple[tuple[str, EndState], ...] = (("r", "finished"), ("s", "failed"))
    for request_id, state in endings:
        delivery = await take_one(transport, "tokenizer")
        end = Transaction(delivery, request_id, 0, (Finish(state.encode(), state),), ack=True)
        assert await transport.commit([end]) == [Outcome.OK]
    ended = [FinishedRequest("t", b"cancelled"), FinishedRequest("r", b"finished"), FinishedRequest("s", b"failed")]
    assert await transport.finished(10) == ended
    assert await transport.finished(2) == ended[1:]


async def test_what_is_left_of_a_cancelled_request_runs_out(redis_bench: RedisBench, raw_redis: Redis) -> None:
    transport = await redis_bench.join()
    keys = redis_bench._keys
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    started = (Emit(b"a", 0, 1), AddChunk(0, b"x"), Plan(2, "batch", b"plan"))
    await transport.commit([Transaction(delivery, "r", 0, started, ack=False)])
    await transport.cancel("r", b"cancelled")
    for key in (keys.request("r"), keys.results("r"), keys.finished()):
        assert 0 < await raw_redis.ttl(key) <= RESULT_TTL_S
    assert not await raw_redis.exists(keys.chunks("r", 0))
    state: Any = raw_redis  # its types do not know that it is asynchronous
    assert await state.hkeys(keys.request("r")) == [b"state", b"attempt", b"n", b"ticket", b"plan:0"]


async def test_the_log_is_bounded(
    monkeypatch: pytest.MonkeyPatch, redis_bench: RedisBench, raw_redis: Redis, namespace: str
) -> None:
    bound, slack = 20, 100  # the server trims its streams by whole nodes
    monkeypatch.setattr("pipeline.redis_streams.MAX_FINISHED", bound)
    monkeypatch.setattr("pipeline.memory_broker.MAX_FINISHED", bound)
    for transport in (await redis_bench.join(), await MemoryBench().join()):
        for number in range(3 * slack):
            await admitted(transport, f"r{number}")
            await transport.cancel(f"r{number}", b"cancelled")
        logged = await transport.finished(1000)
        assert bound <= len(logged) <= bound + slack
        assert logged[-1].request_id == f"r{3 * slack - 1}"
    assert await raw_redis.xlen(Keys(namespace).finished()) <= bound + slack
