"""The sampler's rhythm, whose turn it is, and what it outlives; on a real server and a real pool."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from kv_store.blob import BlobKind, BlobMeta
from kv_store.pool import FilePool, PoolUsage
from pipeline.errors import ServerRefused
from pipeline.keys import Keys
from pipeline.samples import SampleLog
from stages.jobs.sampler import sample_forever

AT_ONCE, NEVER = 0.002, 3_600.0
DEADLINE_S = 20.0
ALWAYS = (0, 2**55)


class CountingLog(SampleLog):
    num_tries = 0

    async def take(self, sampler: str, pool_id: str, usage: PoolUsage) -> int | None:
        self.num_tries += 1
        return await super().take(sampler, pool_id, usage)


@pytest.fixture
def log(raw_redis: Redis, namespace: str) -> SampleLog:
    return SampleLog(raw_redis, "test", Keys(namespace))


@pytest.fixture
def pool(tmp_path: Path) -> FilePool:
    return FilePool.open(tmp_path / "pool", 1 << 20)


@asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def holds(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(AT_ONCE)


def has_samples(log: SampleLog, num: int) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return len(await log.read(*ALWAYS)) >= num

    return condition


async def test_an_idle_stack_is_sampled_at_the_idle_pace(log: SampleLog, pool: FilePool) -> None:
    async with running(sample_forever(log, pool, "s", busy_s=NEVER, idle_s=AT_ONCE)):
        await holds(has_samples(log, 4))


async def test_while_a_queue_holds_something_the_pace_is_the_busy_one(
    raw_redis: Redis, log: SampleLog, pool: FilePool, namespace: str
) -> None:
    stream = Keys(namespace).stream("compressor", "batch", pool.pool_id)
    await raw_redis.xadd(stream, {"p": b""})
    async with running(sample_forever(log, pool, "s", busy_s=AT_ONCE, idle_s=NEVER)):
        await holds(has_samples(log, 4))


async def test_a_blob_in_the_pool_counts_as_busy(log: SampleLog, pool: FilePool) -> None:
    meta = BlobMeta(
        kind=BlobKind.PACKED,
        codec_id=1,
        fingerprint=bytes(32),
        content_address=bytes(32),
        start_token=0,
        num_tokens=1,
        attempt=0,
    )
    pool.write("kv_blob_1", meta, [b"bytes"])
    async with running(sample_forever(log, pool, "s", busy_s=AT_ONCE, idle_s=NEVER)):
        await holds(has_samples(log, 4))
    last = await log.last()
    assert last is not None
    assert (last.num_blobs, last.kv_used_bytes, last.kv_quota_bytes) == (1, pool.usage().used_bytes, 1 << 20)


async def test_the_second_sampler_waits_for_the_first_to_end(
    raw_redis: Redis, log: SampleLog, pool: FilePool, namespace: str
) -> None:
    lock = Keys(namespace).sampler(pool.pool_id)

    def is_sampler(name: bytes) -> Callable[[], Awaitable[bool]]:
        async def condition() -> bool:
            return await raw_redis.get(lock) == name

        return condition

    async with running(sample_forever(log, pool, "second", busy_s=AT_ONCE, idle_s=AT_ONCE)):
        await holds(is_sampler(b"second"))
        async with running(sample_forever(log, pool, "first", busy_s=AT_ONCE, idle_s=AT_ONCE)):
            await raw_redis.set(lock, "first", px=60_000)
            num_taken = len(await log.read(*ALWAYS))
            await holds(has_samples(log, num_taken + 3))
            assert await raw_redis.get(lock) == b"first"
        await raw_redis.delete(lock)  # as time does
        await holds(is_sampler(b"second"))


async def test_a_server_that_is_away_is_waited_for_and_said_once(tmp_path: Path, pool: FilePool) -> None:
    nowhere = Redis.from_url(f"unix://{tmp_path}/none.sock")
    away = CountingLog(nowhere, "nowhere", Keys("t"))

    async def was_tried_again() -> bool:
        return away.num_tries > 3

    with capture_logs() as lines:
        async with running(sample_forever(away, pool, "s", busy_s=AT_ONCE, idle_s=AT_ONCE)):
            await holds(was_tried_again)
    assert [line["event"] for line in lines if line["event"] == "not_sampled"] == ["not_sampled"]
    await nowhere.aclose()


async def test_a_refusal_ends_it(raw_redis: Redis, log: SampleLog, pool: FilePool, namespace: str) -> None:
    await raw_redis.set(Keys(namespace).samples(), "not a stream", ex=60)
    with pytest.raises(ServerRefused):
        await asyncio.wait_for(sample_forever(log, pool, "s"), DEADLINE_S)
