"""Fixtures of the jobs process's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pipeline.settings import Settings
from tests.stages.jobs.bench import JobsBench


@pytest.fixture
async def bench(valkey_url: str, namespace: str, raw_redis: Redis, tmp_path: Path) -> AsyncIterator[JobsBench]:
    settings = Settings(redis_url=valkey_url, namespace=namespace, home=tmp_path / "home")
    async with JobsBench(settings, tmp_path, raw_redis) as bench:
        yield bench
