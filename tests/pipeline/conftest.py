"""Fixtures of the pipeline's tests: each transport that the contract holds for."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.asyncio import Redis

from tests.pipeline.benches import Bench, MemoryBench, RedisBench


@pytest.fixture
async def redis_bench(
    valkey_url: str, namespace: str, raw_redis: Redis, leftovers: Callable[[], Awaitable[list[str]]]
) -> AsyncIterator[RedisBench]:
    bench = RedisBench(valkey_url, namespace, raw_redis, leftovers)
    yield bench
    await bench.close()


@pytest.fixture(params=["memory", "valkey"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return request.getfixturevalue("redis_bench") if request.param == "valkey" else MemoryBench()
