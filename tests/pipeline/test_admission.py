"""The door: time limits of requests, and what happens while the server's memory is filled."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pipeline.batch.store import BatchStore, Feed, StepTurn, line_request_id
from pipeline.connect import open_transport
from pipeline.keys import Keys
from pipeline.memory import MemoryTransport
from pipeline.redis_calls import script_source
from pipeline.settings import Settings
from pipeline.time_limit import MAX_REQUEST_TIMEOUT_S, time_limit_ms
from pipeline.transport import (
    Accepted,
    Busy,
    Emit,
    Exists,
    Finish,
    Outcome,
    Publish,
    Transaction,
    Transport,
)
from tests.pipeline.batch.files import new_manifest
from tests.pipeline.benches import POOL, MemoryBench, RedisBench, take, take_one
from tests.servers import ServerKind, server_of_its_own

BATCH = "batch_1"
FEEDER = "whose turn it is"
LIMIT_BYTES = 16 << 20
PIECE_BYTES = 1 << 18

# Time limits


class Deadlines:
    """The index as the server has it."""

    def __init__(self, raw: Any, keys: Keys) -> None:
        self._raw = raw
        self._keys = keys

    async def left_s(self, request_id: str) -> float | None:
        """How long a request still has; None for one that has no end."""
        deadline_ms = await self._raw.zscore(self._keys.deadlines(), request_id)
        time: Any = await self._raw.time()
        return None if deadline_ms is None else deadline_ms / 1000 - time[0] - time[1] / 1e6


@pytest.fixture
def keys(namespace: str) -> Keys:
    return Keys(namespace)


@pytest.fixture
def deadlines(raw_redis: Any, keys: Keys) -> Deadlines:
    return Deadlines(raw_redis, keys)


async def finish(transport: Transport, request_id: str) -> None:
    delivery = await take_one(transport, "tokenizer")
    end = Transaction(delivery, request_id, 0, (Finish(b"end", "finished"),), ack=True)
    assert await transport.commit([end]) == [Outcome.OK]


@pytest.mark.parametrize("request_id", ["r", "a:req:b", "req:x"])
async def test_a_time_limit_runs_from_the_admission_and_goes_with_the_request(
    redis_bench: RedisBench, raw_redis: Any, keys: Keys, deadlines: Deadlines, request_id: str
) -> None:
    transport = await redis_bench.join()
    assert await transport.admit(request_id, "interactive", b"work", timeout_s=60.5) == Accepted()
    left_s = await deadlines.left_s(request_id)
    assert left_s is not None
    assert 30 < left_s <= 60.5
    assert await raw_redis.hget(keys.request(request_id), "deadlines") == keys.deadlines().encode()
    await finish(transport, request_id)
    assert await raw_redis.exists(keys.deadlines()) == 0
    assert await redis_bench.leftovers() == []


async def test_a_request_that_is_cancelled_has_no_deadline_any_more(
    redis_bench: RedisBench, deadlines: Deadlines
) -> None:
    transport = await redis_bench.join()
    await transport.admit("r", "interactive", b"work", timeout_s=60)
    await transport.cancel("r", b"cancelled")
    assert await deadlines.left_s("r") is None


async def test_a_request_without_a_time_limit_has_none(redis_bench: RedisBench, raw_redis: Any, keys: Keys) -> None:
    transport = await redis_bench.join()
    await transport.admit("r", "interactive", b"work")
    assert await raw_redis.exists(keys.deadlines()) == 0
    assert await raw_redis.hget(keys.request("r"), "deadlines") is None


async def test_a_call_for_an_id_that_is_taken_does_not_move_its_deadline(
    redis_bench: RedisBench, deadlines: Deadlines
) -> None:
    transport = await redis_bench.join()
    await transport.admit("r", "interactive", b"work", timeout_s=60)
    assert await transport.admit("r", "interactive", b"work", timeout_s=6000) == Exists()
    left_s = await deadlines.left_s("r")
    assert left_s is not None
    assert left_s <= 60


async def test_queues_in_memory_know_the_deadline_too() -> None:
    bench = MemoryBench()
    broker = bench.queues.broker
    transport = await bench.join()
    assert isinstance(transport, MemoryTransport)
    before = broker.monotonic()
    await transport.admit("r", "interactive", b"work", timeout_s=60)
    await transport.admit("s", "interactive", b"work")
    limited, unlimited = broker.request("r"), broker.request("s")
    assert limited is not None
    assert limited.deadline is not None
    assert before + 60 <= limited.deadline <= broker.monotonic() + 60
    assert unlimited is not None
    assert unlimited.deadline is None


def test_a_time_limit_is_never_rounded_to_none() -> None:
    assert [time_limit_ms(time_s) for time_s in (None, 1e-9, 0.0014, 1.5, MAX_REQUEST_TIMEOUT_S)] == [
        *(0, 1, 1, 1500, 86_400_000),
    ]


async def test_a_caller_of_before_there_were_time_limits_is_admitted(raw_redis: Any, keys: Keys) -> None:
    names = [keys.request("r"), keys.stream("tokenizer", "batch"), keys.stream("prefill", "batch")]
    args = ["ticket", 10, b"work", 0]
    assert await raw_redis.eval(script_source("admit"), 3, *names, *args) == b"accepted"
    with pytest.raises(ResponseError, match="a timeout needs the key"):
        await raw_redis.eval(script_source("admit"), 3, keys.request("s"), *names[1:], *args, 1000)
    assert await raw_redis.exists(keys.request("s")) == 0


@pytest.fixture
async def store(raw_redis: Any, keys: Keys) -> BatchStore:
    return await batch_in_progress(raw_redis, keys)


async def batch_in_progress(raw: Any, keys: Keys) -> BatchStore:
    store = BatchStore(raw, "test", keys)
    assert await store.create(new_manifest(Path("/nowhere"), BATCH), "/nowhere/batches/one")
    fields: dict[str, Any] = {"total": 3, "feed_nonce": FEEDER}
    assert await store.move(BATCH, ["validating"], "in_progress", fields) == "in_progress"
    return store


TURN = StepTurn(BATCH, "feed", 0, FEEDER)


async def test_the_time_of_a_line_begins_when_it_is_fed_and_ends_with_it(
    redis_bench: RedisBench, store: BatchStore, deadlines: Deadlines
) -> None:
    stage = await redis_bench.join()
    assert await store.feed(TURN, 0, Feed("request", b"work", timeout_s=60)) == "ok"
    assert await store.feed(TURN, 1, Feed("request", b"work")) == "ok"
    first, second = (line_request_id(BATCH, index) for index in (0, 1))
    left_s = await deadlines.left_s(first)
    assert left_s is not None
    assert 30 < left_s <= 60
    assert await deadlines.left_s(second) is None
    await finish(stage, first)
    assert await deadlines.left_s(first) is None


async def test_a_line_that_begins_anew_has_its_whole_time_and_one_that_goes_on_what_was_left(
    redis_bench: RedisBench, store: BatchStore, raw_redis: Any, keys: Keys, deadlines: Deadlines
) -> None:
    stage = await redis_bench.join()
    feeds = [Feed("request", b"work", attempt, timeout_s=60) for attempt in (1, 2)]
    for index in range(2):
        assert await store.feed(TURN, index, feeds[0]) == "ok"
    await stage.cancel(line_request_id(BATCH, 0), b"cancelled")
    begun = line_request_id(BATCH, 1)
    await raw_redis.zadd(keys.deadlines(), {begun: 1})
    await raw_redis.hset(keys.batch(BATCH), "cursor", 0)
    for index in range(2):
        assert await store.feed(TURN, index, feeds[1]) == "ok"
    left_s = await deadlines.left_s(line_request_id(BATCH, 0))
    assert left_s is not None
    assert left_s > 30
    assert await raw_redis.zscore(keys.deadlines(), begun) == 1


# Memory


class Filled:
    """A server that is filled to 85 % of its limit with something that can be deleted."""

    def __init__(self, raw: Any, settings: Settings) -> None:
        self.raw = raw
        self.settings = settings
        self.keys = Keys(settings.namespace)
        self._num_pieces = 0

    async def fill(self, part: float) -> None:
        while await self.part() < part:
            await self.raw.set(f"piece:{self._num_pieces}", b"x" * PIECE_BYTES)
            self._num_pieces += 1

    async def empty(self) -> None:
        await self.raw.delete(*(f"piece:{number}" for number in range(self._num_pieces)))

    async def part(self) -> float:
        memory = await self.raw.info("memory")
        return memory["used_memory"] / memory["maxmemory"]

    async def close_door(self) -> None:
        """Be full at once, whatever there is."""
        await self.raw.config_set("maxmemory", 1 << 20)

    async def open_door(self) -> None:
        await self.raw.config_set("maxmemory", 0)


@pytest.fixture(scope="module")
def small_server(server_kind: ServerKind) -> Iterator[str]:
    """A server of its own: what fills it must not be in the way of other tests."""
    with server_of_its_own(server_kind) as server:
        yield server.url


@pytest.fixture
async def filled(small_server: str, namespace: str) -> AsyncIterator[Filled]:
    raw = Redis.from_url(small_server, protocol=2)
    await raw.flushall()
    await raw.config_set("maxmemory", LIMIT_BYTES)
    filled = Filled(raw, Settings(redis_url=small_server, namespace=namespace))
    await filled.fill(0.7)
    yield filled
    await raw.aclose()


async def test_a_server_filled_to_four_fifths_closes_its_door_and_drains(filled: Filled) -> None:
    transport = await open_transport(filled.settings, pool_id=POOL, warn=lambda _: None)
    for request_id in ("r", "s"):
        assert await transport.admit(request_id, "interactive", b"work") == Accepted()
    await filled.fill(0.85)
    refusal = await transport.admit("t", "interactive", b"work")
    assert isinstance(refusal, Busy)
    assert refusal.retry_after_s > 0
    assert await filled.raw.exists(filled.keys.request("t")) == 0

    one, other = await take(transport, "tokenizer", 2)
    assert await transport.renew([one]) == [True]
    effects = (Emit(b"a", 0, 1), Publish("prefill", "interactive", b"next"))
    assert await transport.commit([Transaction(one, "r", 0, effects, ack=True)]) == [Outcome.OK]
    await transport.hand_back([other])
    assert await transport.cancel("s", b"cancelled") is True

    await filled.empty()
    assert await filled.part() < 0.8
    assert await transport.admit("t", "interactive", b"work") == Accepted()
    await transport.close()


async def test_work_goes_on_even_where_the_server_is_beyond_its_limit(filled: Filled) -> None:
    transport = await open_transport(filled.settings, pool_id=POOL, warn=lambda _: None)
    assert await transport.admit("r", "interactive", b"work") == Accepted()
    await filled.close_door()
    assert isinstance(await transport.admit("s", "interactive", b"work"), Busy)
    delivery = await take_one(transport, "tokenizer")
    effects = (Emit(b"a", 0, 1), Finish(b"end", "finished"))
    assert await transport.commit([Transaction(delivery, "r", 0, effects, ack=True)]) == [Outcome.OK]
    await transport.close()


async def test_a_server_without_a_limit_is_never_too_full(filled: Filled) -> None:
    transport = await open_transport(filled.settings, warn=lambda _: None)
    await filled.fill(0.85)
    await filled.open_door()
    assert await transport.admit("r", "interactive", b"work") == Accepted()
    await transport.close()


async def test_a_filled_server_takes_no_line_and_lets_known_ones_and_wrong_ones_pass(filled: Filled) -> None:
    store = await batch_in_progress(filled.raw, filled.keys)
    stage = await open_transport(filled.settings, pool_id=POOL, warn=lambda _: None)
    assert await store.feed(TURN, 0, Feed("request", b"work", 1)) == "ok"
    await stage.cancel(line_request_id(BATCH, 0), b"cancelled")
    assert await store.feed(TURN, 1, Feed("request", b"work", 1)) == "ok"
    await filled.raw.hset(filled.keys.batch(BATCH), "cursor", 0)
    await filled.fill(0.85)
    assert await store.feed(TURN, 0, Feed("request", b"work", 2)) == "busy"
    assert await filled.raw.hget(filled.keys.request(line_request_id(BATCH, 0)), "state") == b"cancelled"
    await filled.raw.hset(filled.keys.batch(BATCH), "cursor", 1)
    assert await store.feed(TURN, 1, Feed("request", b"work", 2)) == "ok"
    assert await store.feed(TURN, 2, Feed("refused")) == "ok"
    await filled.empty()
    await filled.raw.hset(filled.keys.batch(BATCH), "cursor", 0)
    assert await store.feed(TURN, 0, Feed("request", b"work", 2)) == "ok"
    await stage.close()
