"""The janitor on a real server: what no stage does for itself, and all that sweepers do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from kv_store.pool import FilePool
from pipeline import wire
from pipeline.batch.schedule import arq_client
from pipeline.connect import open_transport
from pipeline.counters import (
    CONSUMERS_REMOVED,
    CREDITS_RELEASED,
    ORPHANS_REMOVED,
    REQUESTS_EXPIRED,
    REQUESTS_SENT_BACK,
    Counters,
)
from pipeline.keys import RETURNED, Keys
from pipeline.messages import SealedChunk, Terminal, TokenizedPrompt
from pipeline.redis_streams import RedisStreams
from pipeline.restart import begin_again
from pipeline.settings import Settings
from pipeline.transport import AddChunk, Outcome, Process, Publish, TakeCredit, Transaction
from pipeline.upkeep import Upkeep, open_upkeep
from stages.common import sweeper as sweeper_module
from stages.common.handshake import Registration
from stages.common.pool_mark import PoolMark
from stages.common.pool_sweeper import PoolSweeper
from stages.common.restart import MAX_RESTARTS
from stages.common.sweeper import Sweeper
from stages.jobs import janitor as janitor_module
from stages.jobs import worker
from stages.jobs.janitor import POOL_GONE_S, Janitor, gone_pools
from tests.leftovers import keys_that_stay
from tests.stages.jobs.bench import JobsBench
from tests.stages.leavings import AT_ONCE_S, Prefilled, blob, commit, until, with_credit

GONE = "gone"
LONG_AGO_MS = 1


class Stack:
    """A stack whose host has one pool, and whose other host, with its pool, is gone."""

    def __init__(
        self, settings: Settings, raw: Any, pool: FilePool, here: RedisStreams, away: RedisStreams, upkeep: Upkeep
    ) -> None:
        self.settings = settings
        self.raw = raw
        self.keys = Keys(settings.namespace)
        self.pool = pool
        self.here = here
        self.away = away
        """A transport of the pool that is gone."""
        self.upkeep = upkeep
        self.counters = Counters()
        self.mark = PoolMark(settings.pool_dir, "ours")
        sweeping = PoolSweeper(pool, self.mark, upkeep, self.counters)
        self.sweeper = Sweeper("jobs", here, upkeep, self.counters, sweeping)
        self.janitor = self.another_janitor()

    def another_janitor(self) -> Janitor:
        return Janitor(self.sweeper, self.here, self.settings)

    async def lose_the_host(self) -> None:
        """What is seen when registrations have run out; decode of the other pool lives."""
        await Registration(self.here, "decode", {}, self.pool.pool_id).announce()
        await self.raw.zadd(self.keys.pools(), {GONE: LONG_AGO_MS})

    async def is_forgotten(self) -> bool:
        await self.janitor.clean()
        return GONE not in (await self.upkeep.pools())[1]

    async def returned(self) -> list[TokenizedPrompt]:
        """What waits for prefill in the lane of what came back."""
        entries = await self.raw.xrange(self.keys.stream("prefill", RETURNED))
        return [wire.unpack(fields[b"p"], TokenizedPrompt) for _, fields in entries]

    async def terminal(self, request_id: str) -> Terminal:
        *_, last = await self.here.read_results(request_id, 0, 0)
        return wire.unpack(last.data, Terminal)


@pytest.fixture
def settings(valkey_url: str, namespace: str, tmp_path: Path) -> Settings:
    return Settings(redis_url=valkey_url, namespace=namespace, home=tmp_path / "home", kv_pool_dir=tmp_path / "pool")


@pytest.fixture
async def stack(settings: Settings, raw_redis: Redis) -> AsyncIterator[Stack]:
    with FilePool.open(settings.pool_dir, 1 << 20) as pool:
        here = await open_transport(settings, pool_id=pool.pool_id)
        away = await open_transport(settings, consumer="away", pool_id=GONE)
        async with open_upkeep(settings) as upkeep:
            stack = Stack(settings, raw_redis, pool, here, away, upkeep)
            yield stack
        stack.mark.close()
        await away.close()
        await here.close()


# Pools that are gone


async def test_what_waits_for_a_pool_that_is_gone_goes_back_to_prefill(stack: Stack) -> None:
    in_compressor, in_decode = Prefilled.of("a", GONE), Prefilled.of("b", GONE)
    await in_decode.put(stack.away)
    [chunk] = await stack.away.receive("compressor", 1, 1)
    sealed = SealedChunk(chunk_index=0, ref=in_decode.chunk.ref, content_address=bytes(32))
    await commit(stack.away, chunk, "b", AddChunk(0, wire.pack(sealed)), ack=True)
    await in_compressor.put(stack.away)
    await stack.lose_the_host()
    await until(stack.is_forgotten)
    back = {message.request_id: message for message in await stack.returned()}
    assert set(back) == {"a", "b"}
    for request in (in_compressor.message, in_decode.message):
        came = back[request.request_id]
        assert came == begin_again(request, request.attempt + 1, request.num_restarts + 1)
        assert (came.attempt, came.num_restarts) == (1, 1)
        assert [entry.offset for entry in await stack.here.read_results(request.request_id, 0, 0)] == [1]
        assert await stack.here.chunks(request.request_id, 0) == {}
    assert stack.counters.take() == {REQUESTS_SENT_BACK: 2}
    assert [key async for key in stack.raw.scan_iter(match=f"{stack.settings.namespace}:*{GONE}*")] == []


async def test_a_request_that_came_back_finds_its_credit_in_another_pool(stack: Stack) -> None:
    await Prefilled.of("r", GONE).put(stack.away)
    await stack.lose_the_host()
    await until(stack.is_forgotten)
    [delivery] = await stack.here.receive("prefill", 1, 1)
    assert await stack.upkeep.credits(stack.pool.pool_id) == {}
    again = wire.unpack(delivery.payload, TokenizedPrompt)
    taken = Transaction(delivery, "r", again.attempt, (TakeCredit(1, 1, 1),), ack=False)
    assert await stack.here.commit([taken]) == [Outcome.OK]
    assert await stack.upkeep.credits(stack.pool.pool_id) == {"r": 1}
    await stack.here.cancel("r", b"terminal")
    assert await stack.upkeep.credits(stack.pool.pool_id) == {}


async def test_a_request_that_lost_its_kv_again_and_again_fails(stack: Stack) -> None:
    await Prefilled.of("r", GONE, num_restarts=MAX_RESTARTS).put(stack.away)
    await stack.lose_the_host()
    await until(stack.is_forgotten)
    failure = (await stack.terminal("r")).failure
    assert failure is not None
    assert (failure.stage, failure.code, failure.retryable) == ("decode", "kv_lost", True)
    assert await stack.returned() == []


async def test_chunks_of_a_request_that_began_again_elsewhere_are_no_ones_chunks(stack: Stack) -> None:
    await stack.away.admit("r", "batch", b"payload")
    [delivery] = await stack.away.receive("tokenizer", 1, 1)
    chunk = Publish("compressor", "batch", wire.pack(Prefilled.of("r", GONE).chunk))
    await commit(stack.away, delivery, "r", TakeCredit(1, 10, 10), chunk, ack=False)
    await stack.away.hand_back([delivery])
    [delivery] = await stack.here.receive("tokenizer", 1, 1)
    await commit(stack.here, delivery, "r", TakeCredit(1, 10, 10), ack=False)
    await stack.lose_the_host()
    await until(stack.is_forgotten)
    assert await stack.here.chunks("r", 0) == {}
    assert await stack.here.renew([delivery]) == [True]


async def test_what_cannot_be_read_is_kept_as_a_dead_letter(stack: Stack) -> None:
    for stage in ("compressor", "decode"):
        delivery = await with_credit(stack.away, stage)
        await commit(stack.away, delivery, stage, Publish(stage, "batch", b"no message"), ack=True)
    await stack.lose_the_host()
    await until(stack.is_forgotten)
    for stage in ("compressor", "decode"):
        assert await stack.raw.xlen(stack.keys.dead(stage)) == 1


async def test_each_run_does_a_bounded_part_and_the_next_one_goes_on(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor_module, "MAX_SALVAGED", 3)
    for number in range(5):
        await Prefilled.of(f"r{number}", GONE).put(stack.away)
    await stack.lose_the_host()
    seen: list[int] = []

    async def is_forgotten() -> bool:
        is_over = await stack.is_forgotten()
        seen.append(len(await stack.returned()))
        return is_over

    await until(is_forgotten)
    # Five chunks and five requests, three entries at a time; it is forgotten when a run has time left.
    assert seen == [0, 1, 4, 5]


async def test_what_a_dead_process_of_the_pool_still_holds_waits_for_its_lease(stack: Stack) -> None:
    stack.settings = stack.settings.model_copy(update={"lease_s": 0.2})
    stack.janitor = stack.another_janitor()
    await Prefilled.of("r", GONE).put(stack.away)
    [chunk] = await stack.away.receive("compressor", 1, 1)
    await stack.lose_the_host()
    assert not await stack.is_forgotten()
    assert await stack.here.chunks("r", 0) == {}
    await until(stack.is_forgotten)
    assert [message.request_id for message in await stack.returned()] == ["r"]
    assert await stack.away.renew([chunk]) == [False]


async def test_several_janitors_at_once_send_everything_on_once(stack: Stack) -> None:
    for number in range(20):
        await Prefilled.of(f"r{number}", GONE).put(stack.away)
    janitors = [stack.another_janitor() for _ in range(4)]

    async def is_forgotten() -> bool:
        await asyncio.gather(*(janitor.clean() for janitor in janitors))
        return GONE not in (await stack.upkeep.pools())[1]

    await is_forgotten()  # each has been here before
    await stack.lose_the_host()
    await until(is_forgotten)
    back = await stack.returned()
    assert sorted(message.request_id for message in back) == sorted(f"r{number}" for number in range(20))
    assert {message.attempt for message in back} == {1}


async def test_a_pool_whose_sign_of_life_was_lost_too_is_found(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor_module, "POOL_GONE_S", 0.05)
    await Prefilled.of("r", GONE).put(stack.away)
    await Registration(stack.here, "decode", {}, stack.pool.pool_id).announce()
    await stack.raw.delete(stack.keys.pools())  # as a day without processes does

    async def is_back() -> bool:
        await stack.janitor.clean()
        return bool(await stack.returned())

    await until(is_back)


def process(stage: str, pool_id: str | None) -> Process:
    return Process(stage, "a", msgpack.packb({"parts": {}, "pool": pool_id}) or b"")


NOW_MS = 1_000_000_000
OLD_MS = NOW_MS - round(1000 * POOL_GONE_S) - 1


@pytest.mark.parametrize(
    ("seen_ms", "processes", "gone"),
    [
        ({"p": OLD_MS, "q": NOW_MS}, [process("decode", "q")], ["p"]),
        ({"p": OLD_MS, "q": OLD_MS}, [process("decode", "q")], ["p"]),
        ({"p": OLD_MS + 2, "q": NOW_MS}, [process("decode", "q")], []),  # it may only be cut off
        ({"p": OLD_MS, "q": NOW_MS}, [process("decode", "q"), process("jobs", "p")], []),  # somebody is there
        ({"p": OLD_MS, "q": NOW_MS}, [process("prefill", "q")], []),  # nobody could take it
        ({"p": OLD_MS, "q": NOW_MS}, [process("decode", None), Process("decode", "b", b"?")], []),
        ({"p": NOW_MS + 10 * POOL_GONE_S * 1000, "q": NOW_MS}, [process("decode", "q")], ["p"]),  # a clock was set back
        ({}, [process("decode", "q")], []),
    ],
)
def test_a_pool_is_gone_when_nobody_has_announced_it_for_long(
    seen_ms: dict[str, int], processes: list[Process], gone: list[str]
) -> None:
    assert gone_pools(NOW_MS, seen_ms, processes) == gone


# What sweepers do, too


async def test_it_clears_up_for_all_stages_and_pools(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper_module, "CONSUMER_IDLE_S", 0.001)
    await stack.here.register("decode", b"info", 60)
    await stack.away.register("decode", b"info", 60)  # a pool that lives
    for stage, pool_id in (("tokenizer", None), ("decode", GONE), ("compressor", stack.pool.pool_id)):
        stream = stack.keys.stream(stage, "interactive", pool_id)
        await stack.raw.xgroup_create(stream, stage, mkstream=True)
        await stack.raw.xgroup_createconsumer(stream, stage, "dead")
    for pool_id in (GONE, stack.pool.pool_id):
        await stack.raw.hset(stack.keys.credits(pool_id), "unknown", "0:100")
    await stack.here.admit("late", "batch", b"payload", timeout_s=AT_ONCE_S)
    blob(stack.pool, "unknown")
    counted: dict[str, int] = {}

    async def is_clean() -> bool:
        await stack.janitor.clean()
        for name, num in stack.counters.take().items():
            counted[name] = counted.get(name, 0) + num
        return len(counted) == 4 and counted[CONSUMERS_REMOVED] == 3

    await until(is_clean)
    assert counted == {CONSUMERS_REMOVED: 3, CREDITS_RELEASED: 2, REQUESTS_EXPIRED: 1, ORPHANS_REMOVED: 1}


async def test_a_server_that_is_away_is_left_to_the_next_run(stack: Stack, tmp_path: Path) -> None:
    client = Redis.from_url(f"unix://{tmp_path}/none.sock")
    away = Upkeep(client, "nowhere", stack.keys, patience_s=0)
    janitor = Janitor(Sweeper("jobs", stack.here, away, Counters(), None), stack.here, stack.settings)
    with capture_logs() as lines:
        await janitor.clean()
    assert [line["event"] for line in lines] == ["not_cleaned"]
    await client.aclose()


# As arq's cron job


@asynccontextmanager
async def arq_worker(bench: JobsBench, stack: Stack) -> AsyncIterator["asyncio.Task[None]"]:
    """A jobs process's worker with the janitor; told to stop at the end."""
    async with bench.jobs() as jobs:
        url = str(stack.settings.redis_url)
        task = asyncio.create_task(worker.work(jobs, lambda: arq_client(url, stack.keys), stack.janitor))
        try:
            yield task
        finally:
            jobs.stopping.set()
            await asyncio.gather(task, return_exceptions=True)


async def test_it_comes_at_the_start_and_again_and_again(
    bench: JobsBench, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "INTERVAL_S", 1)
    num_runs = 0

    async def clean() -> None:
        nonlocal num_runs
        num_runs += 1

    monkeypatch.setattr(stack.janitor, "clean", clean)
    async with arq_worker(bench, stack):
        await until(lambda: num_runs >= 3)


async def test_of_several_jobs_processes_one_does_it_each_time(
    bench: JobsBench, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "INTERVAL_S", 1)
    seconds: list[int] = []

    async def clean() -> None:
        seconds.append(int((await stack.raw.time())[0]))

    monkeypatch.setattr(stack.janitor, "clean", clean)
    async with arq_worker(bench, stack), arq_worker(bench, stack):
        await until(lambda: bool(seconds) and max(seconds) - min(seconds) >= 3)
    after_the_start = [second for second in seconds if second > min(seconds) + 1]
    assert len(after_the_start) == len(set(after_the_start)) > 0


async def test_a_run_that_nobody_comes_for_does_not_stay(
    bench: JobsBench, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "INTERVAL_S", 1)

    async def is_asked_for() -> bool:
        return bool(await stack.raw.exists(stack.keys.arq()))

    async with arq_worker(bench, stack) as task:
        await until(is_asked_for)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [line for line in await keys_that_stay(stack.raw, stack.settings.namespace) if ":arq" in line] == []
