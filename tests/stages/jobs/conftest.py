"""Fixtures of the jobs process's tests: a bench on the server, and steps whose waits are short."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pipeline.batch import store
from pipeline.settings import Settings
from stages.jobs import collect, reconcile, turn, worker
from tests.stages.jobs.bench import JobsBench

LEASE_S, GRACE_S = 0.4, 0.2


def shorten_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds among processes takes a tenth of it."""
    for module in (store, turn):
        monkeypatch.setattr(module, "STEP_LEASE_S", LEASE_S)
        monkeypatch.setattr(module, "STEP_GRACE_S", GRACE_S)
    monkeypatch.setattr(reconcile, "INTERVAL_S", 0.05)
    monkeypatch.setattr(worker, "POLL_S", 0.02)
    monkeypatch.setattr(worker, "RECONNECT_S", 0.05)
    monkeypatch.setattr(collect, "BLOCK_S", 0.05)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch)


@pytest.fixture
async def bench(
    valkey_url: str, namespace: str, raw_redis: Redis, tmp_path: Path, short_waits: None
) -> AsyncIterator[JobsBench]:
    settings = Settings(redis_url=valkey_url, namespace=namespace, home=tmp_path / "home")
    async with JobsBench(settings, tmp_path, raw_redis) as bench:
        yield bench
