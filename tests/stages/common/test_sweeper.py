"""Sweeping on a real server and a real pool: what is left over goes without new work, and nothing else does."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from kv_store.directory import TEMPORARY_PREFIX
from kv_store.pool import FilePool
from pipeline import wire
from pipeline.connect import open_transport
from pipeline.counters import (
    CONSUMERS_REMOVED,
    CREDITS_RELEASED,
    KV_MISSING,
    ORPHANS_REMOVED,
    REQUESTS_EXPIRED,
    Counters,
)
from pipeline.errors import ServerRefused, ServerUnreachable
from pipeline.keys import Keys
from pipeline.messages import Terminal
from pipeline.redis_streams import RedisStreams
from pipeline.settings import Settings
from pipeline.transport import Outcome, Restart, Transaction
from pipeline.upkeep import Upkeep, open_upkeep
from stages.common import sweeper as sweeper_module
from stages.common.capacity import Capacity, capacity_of
from stages.common.kv_blobs import owner_of
from stages.common.pool_mark import PoolMark
from stages.common.pool_sweeper import PoolSweeper
from stages.common.stage_process import stage_process
from stages.common.sweeper import Sweeper, interval_s, sweep_forever, sweeping
from tests.stages.leavings import AT_ONCE_S, DEADLINE_S, META, blob, until, with_credit

LOCK_TIMEOUT_S = 0.02
QUOTA_BYTES = 1 << 20


@pytest.fixture
def settings(valkey_url: str, namespace: str, tmp_path: Path) -> Settings:
    return Settings(
        redis_url=valkey_url,
        namespace=namespace,
        home=tmp_path / "home",
        kv_pool_dir=tmp_path / "pool",
        kv_pool_bytes=QUOTA_BYTES,
        lease_s=0.2,
    )


@pytest.fixture
def keys(namespace: str) -> Keys:
    return Keys(namespace)


@pytest.fixture
def pool(settings: Settings) -> FilePool:
    return FilePool.open(settings.pool_dir, QUOTA_BYTES, lock_timeout_s=LOCK_TIMEOUT_S)


@pytest.fixture
async def transport(settings: Settings, pool: FilePool) -> AsyncIterator[RedisStreams]:
    transport = await open_transport(settings, pool_id=pool.pool_id)
    yield transport
    await transport.close()


@pytest.fixture
async def upkeep(settings: Settings) -> AsyncIterator[Upkeep]:
    async with open_upkeep(settings) as upkeep:
        yield upkeep


@pytest.fixture
async def sweeper(
    settings: Settings, transport: RedisStreams, upkeep: Upkeep, pool: FilePool
) -> AsyncIterator[Sweeper]:
    counters = Counters()
    with PoolMark(settings.pool_dir, "ours") as mark:
        yield Sweeper("decode", transport, upkeep, counters, PoolSweeper(pool, mark, upkeep, counters))


@asynccontextmanager
async def running(sweeper: Sweeper) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(sweep_forever(sweeper, AT_ONCE_S))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# Blobs


async def test_blobs_go_with_the_credit_of_their_request(
    transport: RedisStreams, sweeper: Sweeper, pool: FilePool
) -> None:
    open_request, restarted = await with_credit(transport, "open"), await with_credit(transport, "restarted")
    kept = [blob(pool, "open", index=index) for index in range(2)]
    blob(pool, "restarted")
    blob(pool, "never-known")
    foreign = pool.write("kv_of_nobody", META, [b"bytes"]).name
    await transport.commit([Transaction(restarted, "restarted", 0, (Restart(1, b"payload"),), ack=True)])
    kept.append(blob(pool, "restarted", attempt=1))
    await sweeper.sweep_pool()
    assert sorted(pool.names()) == sorted([*kept, foreign])
    assert sweeper.counters.take() == {ORPHANS_REMOVED: 2}
    await transport.cancel("open", wire.pack(Terminal(finish_reason="cancelled")))
    await sweeper.sweep_pool()
    assert sorted(pool.names()) == sorted([kept[2], foreign])
    assert await transport.commit([Transaction(open_request, "open", 0, (), ack=True)]) == [Outcome.GONE]


class LateUpkeep(Upkeep):
    """Somebody takes a credit and writes a blob right after the credits were read."""

    def __init__(self, upkeep: Upkeep, transport: RedisStreams, pool: FilePool) -> None:
        vars(self).update(vars(upkeep))
        self._transport, self._pool = transport, pool

    async def credits(self, pool_id: str) -> dict[str, int]:
        found = await super().credits(pool_id)
        await with_credit(self._transport, "late")
        blob(self._pool, "late")
        return found


async def test_a_blob_that_is_written_meanwhile_is_no_orphan(
    settings: Settings, transport: RedisStreams, upkeep: Upkeep, pool: FilePool
) -> None:
    blob(pool, "orphan")
    with PoolMark(settings.pool_dir, "ours") as mark:
        await PoolSweeper(pool, mark, LateUpkeep(upkeep, transport, pool), Counters()).sweep()
    assert pool.names() == [f"kv{owner_of('late', 0)}0_00c0ffee"]


async def test_where_another_stack_has_processes_its_blobs_are_left_alone(
    settings: Settings, sweeper: Sweeper, pool: FilePool
) -> None:
    name = blob(pool, "theirs")
    with PoolMark(settings.pool_dir, "theirs"):
        await sweeper.sweep_pool()
        assert pool.names() == [name]
    await sweeper.sweep_pool()
    assert pool.names() == []


async def test_files_of_dead_writers_go_and_those_of_living_ones_stay(settings: Settings, sweeper: Sweeper) -> None:
    dead, living = (settings.pool_dir / f"{TEMPORARY_PREFIX}{name}" for name in ("dead", "living"))
    for path in (dead, living):
        path.touch(mode=0o600)
    with living.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        await sweeper.sweep_pool()
        assert (dead.exists(), living.exists()) == (False, True)
    assert sweeper.counters.take() == {ORPHANS_REMOVED: 1}


# Requests, consumers and credits


async def test_a_request_that_is_given_up_says_where_and_why(transport: RedisStreams, sweeper: Sweeper) -> None:
    await with_credit(transport, "r", AT_ONCE_S)

    async def is_over() -> bool:
        await sweeper.expire()
        return bool(await transport.read_results("r", 0, 0))

    await until(is_over)
    [entry] = await transport.read_results("r", 0, 0)
    terminal = wire.unpack(entry.data, Terminal)
    assert terminal.finish_reason == "error"
    assert terminal.failure is not None
    assert (terminal.failure.stage, terminal.failure.code, terminal.failure.retryable) == (
        "deadline",
        "deadline_exceeded",
        True,
    )
    assert [(stamp.boundary, stamp.by) for stamp in terminal.stamps] == [("finished", transport.consumer)]
    assert sweeper.counters.take() == {REQUESTS_EXPIRED: 1}


async def test_names_of_dead_consumers_of_its_own_stage_go(
    settings: Settings, sweeper: Sweeper, raw_redis: Any, keys: Keys, pool: FilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper_module, "CONSUMER_IDLE_S", AT_ONCE_S)
    streams = {stage: keys.stream(stage, "batch", pool.pool_id) for stage in ("compressor", "decode")}
    for stage, stream in streams.items():
        await raw_redis.xgroup_create(stream, stage, mkstream=True)
        for consumer in ("dead", "alive"):
            await raw_redis.xgroup_createconsumer(stream, stage, consumer)
    alive = await open_transport(settings, consumer="alive")
    await alive.register("decode", b"info", 60)

    async def names(stage: str) -> set[bytes]:
        return {consumer["name"] for consumer in await raw_redis.xinfo_consumers(streams[stage], stage)}

    async def is_tidy() -> bool:
        return await names("decode") == {b"alive"}

    async with running(sweeper):
        await until(is_tidy)
    assert await names("compressor") == {b"dead", b"alive"}
    await sweeper.flush()
    assert await sweeper.upkeep.counters() == {CONSUMERS_REMOVED: 1}
    await alive.close()


async def test_credits_without_a_request_go(sweeper: Sweeper, raw_redis: Any, keys: Keys, pool: FilePool) -> None:
    await raw_redis.hset(keys.credits(pool.pool_id), "unknown", "0:100")
    await sweeper.sweep()
    assert await raw_redis.exists(keys.credits(pool.pool_id)) == 0
    assert sweeper.counters.take() == {CREDITS_RELEASED: 1}


# Counts


class DeafUpkeep(Upkeep):
    """Counts, and then loses the reply."""

    def __init__(self, upkeep: Upkeep) -> None:
        vars(self).update(vars(upkeep))
        self.is_deaf = True

    async def count(self, counts: Mapping[str, int], ticket: str) -> None:
        await super().count(counts, ticket)
        if self.is_deaf:
            raise ServerUnreachable("test", "the reply was lost")


async def test_counts_arrive_once_also_where_a_reply_was_lost(transport: RedisStreams, upkeep: Upkeep) -> None:
    deaf = DeafUpkeep(upkeep)
    sweeper = Sweeper("tokenizer", transport, deaf, Counters(), None)
    sweeper.counters.add(KV_MISSING, 3)
    for _ in range(2):
        with pytest.raises(ServerUnreachable):
            await sweeper.flush()
        sweeper.counters.add(KV_MISSING)
    deaf.is_deaf = False
    await sweeper.flush()
    assert await upkeep.counters() == {KV_MISSING: 5}
    await sweeper.flush()
    assert await upkeep.counters() == {KV_MISSING: 5}


async def test_what_was_counted_is_handed_on_at_the_end(
    settings: Settings, transport: RedisStreams, upkeep: Upkeep
) -> None:
    async with sweeping("tokenizer", settings, transport, None) as sweeper:
        sweeper.counters.add(KV_MISSING)
    assert await upkeep.counters() == {KV_MISSING: 1}


async def test_an_end_without_a_server_is_no_failure(settings: Settings, transport: RedisStreams) -> None:
    nowhere = settings.model_copy(update={"redis_url": "unix:///nowhere/none.sock"})
    async with sweeping("tokenizer", nowhere, transport, None) as sweeper:
        sweeper.counters.add(KV_MISSING)


# The clock


async def test_without_new_work_everything_that_is_due_goes(
    transport: RedisStreams, sweeper: Sweeper, pool: FilePool, upkeep: Upkeep
) -> None:
    await with_credit(transport, "r", 20 * AT_ONCE_S)
    blob(pool, "r")
    sweeper.counters.add(KV_MISSING)

    async def is_counted() -> bool:
        return await upkeep.counters() == {KV_MISSING: 1, REQUESTS_EXPIRED: 1, ORPHANS_REMOVED: 1}

    async with running(sweeper):
        await until(is_counted)
    assert pool.names() == []


async def test_a_server_that_is_away_is_waited_for_and_said_once(transport: RedisStreams, tmp_path: Path) -> None:
    client = Redis.from_url(f"unix://{tmp_path}/none.sock")
    away = Upkeep(client, "nowhere", Keys("t"), patience_s=0)
    num_tries = 0

    class Counting(Sweeper):
        async def expire(self) -> None:
            nonlocal num_tries
            num_tries += 1
            await super().expire()

    with capture_logs() as lines:
        async with running(Counting("tokenizer", transport, away, Counters(), None)) as task:
            await until(lambda: num_tries > 3)
            assert not task.done()
    assert [line["event"] for line in lines if line["event"] == "not_swept"] == ["not_swept"]
    await client.aclose()


async def test_a_pool_that_is_locked_keeps_nothing_else_waiting(
    settings: Settings, transport: RedisStreams, sweeper: Sweeper, pool: FilePool, upkeep: Upkeep
) -> None:
    blob(pool, "orphan")
    directory = os.open(settings.pool_dir, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)

    async def has_expired() -> bool:
        return (await upkeep.counters()).get(REQUESTS_EXPIRED) == 1

    async with running(sweeper):
        await transport.admit("r", "batch", b"payload", timeout_s=AT_ONCE_S)
        await until(has_expired)
        assert len(pool.names()) == 1
        os.close(directory)
        await until(lambda: pool.names() == [])


async def test_a_refusal_ends_it(sweeper: Sweeper, raw_redis: Any, keys: Keys) -> None:
    await raw_redis.set(keys.deadlines(), "no sorted set", ex=60)
    with pytest.raises(ServerRefused):
        await asyncio.wait_for(sweep_forever(sweeper, AT_ONCE_S), DEADLINE_S)


@pytest.mark.parametrize(("lease_s", "expected_s"), [(0.2, 0.25), (4.0, 1.0), (10.0, 2.0)])
def test_the_shorter_the_leases_the_more_often_it_sweeps(lease_s: float, expected_s: float) -> None:
    assert interval_s(lease_s) == expected_s


async def test_every_stage_says_what_it_takes_and_sweeps_for_as_long_as_it_runs(
    settings: Settings, pool: FilePool, upkeep: Upkeep
) -> None:
    blob(pool, "orphan")

    async def is_counted() -> bool:
        return await upkeep.counters() == {KV_MISSING: 1, ORPHANS_REMOVED: 1}

    capacity = {"slots": 3, "pages": 9}
    async with stage_process("decode", settings, {}, pool.pool_id, capacity=capacity) as process:
        assert capacity_of(await process.transport.processes(), pool.pool_id) == Capacity(slots=3, pages=9)
        process.counters.add(KV_MISSING)
        await until(is_counted)
        assert pool.names() == []
        process.counters.add(KV_MISSING)
    assert await upkeep.counters() == {KV_MISSING: 2, ORPHANS_REMOVED: 1}
