"""Steps as arq jobs: msgpack, one job for one turn, and a queue that does not outlive its use."""

from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from pipeline.batch.schedule import JOB_EXPIRES_MS, BatchScheduler, arq_client, pack_job, unpack_job
from pipeline.batch.store import BatchStore
from pipeline.keys import Keys


@pytest.fixture
async def arq(valkey_url: str, namespace: str) -> AsyncIterator[ArqRedis]:
    client = arq_client(valkey_url, Keys(namespace))
    yield client
    await client.aclose()


@pytest.fixture
def scheduler(arq: ArqRedis, namespace: str) -> BatchScheduler:
    return BatchScheduler(arq, "test", Keys(namespace))


def test_a_job_is_msgpack_and_comes_back() -> None:
    job = {"t": 1, "f": "feed", "a": ("batch_1", 7), "k": {}, "et": 1796015658899}
    assert unpack_job(pack_job(job)) == job | {"a": ["batch_1", 7]}
    assert msgpack.unpackb(pack_job(job))["a"] == ["batch_1", 7]


def test_what_is_not_plain_becomes_its_name() -> None:
    assert unpack_job(pack_job({"r": ValueError("with a prompt in it")})) == {"r": "ValueError"}


async def test_asking_twice_for_a_turn_is_as_good_as_once(
    scheduler: BatchScheduler, arq: ArqRedis, raw_redis: Redis, namespace: str
) -> None:
    for _ in range(2):
        await scheduler.enqueue("batch_1", "feed", 3)
    await scheduler.enqueue("batch_1", "feed", 4)
    await scheduler.enqueue("batch_1", "collect", 3)
    jobs = await arq.queued_jobs(queue_name=Keys(namespace).arq())
    assert sorted((job.function, *job.args) for job in jobs) == [
        ("collect", "batch_1", 3),
        ("feed", "batch_1", 3),
        ("feed", "batch_1", 4),
    ]


async def test_everything_that_arq_keeps_goes_away_by_itself(
    scheduler: BatchScheduler, raw_redis: Redis, namespace: str
) -> None:
    await scheduler.enqueue("batch_1", "feed", 3)
    keys: list[bytes] = [key async for key in raw_redis.scan_iter(match=f"*{namespace}:*")]
    assert sorted(keys) == [f"arq:job:{namespace}:batch_1:feed:3".encode(), f"{namespace}:arq".encode()]
    for key in keys:
        assert 0 < await raw_redis.pttl(key) <= JOB_EXPIRES_MS
    await raw_redis.delete(*keys)


async def test_the_steps_of_a_state_are_asked_for_once(
    scheduler: BatchScheduler, arq: ArqRedis, raw_redis: Redis, namespace: str
) -> None:
    keys = Keys(namespace)
    raw: Any = raw_redis
    await raw.hset(keys.batch("batch_1"), mapping={"state": "in_progress", "id": "batch_1"})
    store = BatchStore(raw_redis, "test", keys)
    for _ in range(2):
        await scheduler.drive(store, "batch_1", "in_progress")
    jobs = await arq.queued_jobs(queue_name=keys.arq())
    assert sorted((job.function, *job.args) for job in jobs) == [("collect", "batch_1", 1), ("feed", "batch_1", 1)]
    await scheduler.drive(store, "batch_1", "completed")
    await scheduler.drive(store, "batch_gone", "in_progress")
    assert len(await arq.queued_jobs(queue_name=keys.arq())) == 2
    await raw_redis.delete(*[key async for key in raw_redis.scan_iter(match=f"arq:*{namespace}:*")])
