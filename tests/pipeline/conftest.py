"""Fixtures of the pipeline's tests: each transport that the contract holds for."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest
from redis.asyncio import Redis

from pipeline.server_acl import RULE
from tests.leftovers import delete_keys, keys_that_stay
from tests.pipeline.benches import Bench, MemoryBench, RedisBench


@pytest.fixture
async def redis_bench(
    valkey_url: str, namespace: str, raw_redis: Redis, leftovers: Callable[[], Awaitable[list[str]]]
) -> AsyncIterator[RedisBench]:
    bench = RedisBench(valkey_url, namespace, raw_redis, leftovers)
    yield bench
    await bench.close()


@pytest.fixture
async def narrow_bench(redis_server_url: str) -> AsyncIterator[RedisBench]:
    """On Debian's redis-server, with a user that may do exactly what docs/redis.md says."""
    raw = Redis.from_url(redis_server_url, protocol=2)
    namespace = f"t{secrets.token_hex(6)}"
    rules = RULE.format(namespace=namespace)
    await raw.execute_command("ACL", "SETUSER", namespace, "reset", "on", ">word", *rules.split())
    url = redis_server_url.replace("unix://", f"unix://{namespace}:word@")
    bench = RedisBench(url, namespace, raw, partial(keys_that_stay, raw, namespace))
    yield bench
    await bench.close()
    await delete_keys(raw, namespace)
    await raw.execute_command("ACL", "DELUSER", namespace)
    await raw.aclose()


@pytest.fixture(params=["memory", "server", "narrow"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """In memory; on the server of this test run; on redis-server with no more rights than are needed."""
    if request.param == "memory":
        return MemoryBench()
    return request.getfixturevalue("redis_bench" if request.param == "server" else "narrow_bench")
