"""Shared memory is gone after a restart of the host, with work under way: the answers are what they would have been."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from ops.stack import Stack
from pipeline.batch.results import Completion
from pipeline.client.asks import NewRequest
from pipeline.counters import DIVERGENCES, REQUESTS_SENT_BACK
from pipeline.keys import Keys
from pipeline.messages import Delta
from pipeline.settings import Settings
from pipeline.upkeep import open_upkeep
from tests.e2e.stacks import DEADLINE_S, QUICK, ask, new_settings, pids_of, pool_of, results_of

NUM_REQUESTS = 4
LONG_AGO_MS = 1


@pytest.fixture
def settings(caches: Path, tiny_models: tuple[Path, Path]) -> Iterator[Settings]:
    """Of a home and a pool of their own, with short leases."""
    home, pool = (Path(tempfile.mkdtemp(prefix=prefix)) for prefix in ("sl-", "sl-pool-"))
    (home / "cache").symlink_to(caches)
    yield new_settings(home=home, kv_pool_dir=pool, model=str(tiny_models[0]), chunk_tokens=64, lease_s=1.0)
    shutil.rmtree(home)
    shutil.rmtree(pool)


def asks_of(stack: Stack) -> list[NewRequest]:
    return [ask(stack, f"{n} and then " * 10, 500, seed=n, temperature=0.8, logprobs=2) for n in range(NUM_REQUESTS)]


async def begin(stack: Stack) -> dict[str, list[int]]:
    """Send requests, and end all processes at once when each has some tokens out; returns these by request."""
    client = stack.client(stall_timeout_s=DEADLINE_S)
    seen: dict[str, list[int]] = {f"r{n}": [] for n in range(NUM_REQUESTS)}

    async def see(request_id: str) -> None:
        async for entry in client.stream(request_id):
            assert isinstance(entry, Delta), "it ended too early to lose anything"
            seen[request_id] += entry.token_ids
            if len(seen[request_id]) >= 10:
                return

    for request_id, one in zip(seen, asks_of(stack), strict=True):
        await client.submit(one, request_id=request_id)
    await asyncio.wait_for(asyncio.gather(*map(see, seen)), DEADLINE_S)
    for pid in pids_of(stack).values():
        os.kill(pid, signal.SIGKILL)
    return seen


async def test_requests_outlive_the_pool_that_their_kv_lay_in(settings: Settings) -> None:
    warnings: list[str] = []
    async with Stack(settings, policy=QUICK, warn=warnings.append) as stack:
        stack.leave_work = True
        seen = await begin(stack)
    with pool_of(settings) as pool:
        lost = pool.pool_id
    shutil.rmtree(settings.pool_dir)
    async with Stack(settings, policy=QUICK, warn=warnings.append) as stack:
        async with Redis.from_url(str(stack.settings.redis_url)) as raw:
            await raw.zadd(Keys(settings.namespace).pools(), {lost: LONG_AGO_MS})  # as half a minute does
        client = stack.client(stall_timeout_s=DEADLINE_S)
        outcomes = [await asyncio.wait_for(client.result(request_id), DEADLINE_S) for request_id in seen]
        expected = await results_of(stack, asks_of(stack))
        async with open_upkeep(stack.settings) as upkeep:
            counters = await upkeep.counters()
            assert lost not in (await upkeep.pools())[1]
    for outcome, result, before in zip(outcomes, expected, seen.values(), strict=True):
        assert isinstance(outcome, Completion), outcome
        assert outcome.token_ids[: len(before)] == tuple(before)
        assert (outcome.token_ids, outcome.text, outcome.logprobs) == (result.token_ids, result.text, result.logprobs)
    assert counters[REQUESTS_SENT_BACK] == NUM_REQUESTS
    assert DIVERGENCES not in counters
    assert warnings == []
