"""`sluice up` on a tiny model while its stages are scaled: requests flow all the time, and nothing shows in them."""

import asyncio
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import pytest
from redis.asyncio import Redis

from ops.control import ask_scale, ask_status
from ops.procfile import default_procfile, read_procfile
from ops.running import AttachedStack, find_advert
from ops.serving import Serving
from ops.slot_status import SlotStatus
from ops.stack import stage_environment
from pipeline.client.asks import NewRequest
from pipeline.keys import HANDBACK
from tests.e2e.stacks import DEADLINE_S, Result, ask, new_settings, results_of

ROOT = Path(__file__).parents[2]
NUM_IN_FLIGHT = 6
POLL_S = 0.02


@asynccontextmanager
async def running_up(caches: Path, **fields: object) -> AsyncIterator[AttachedStack]:
    """Run `sluice up` in a new home, as a process, and use its stack; it has to stop cleanly."""
    home, pool = (Path(tempfile.mkdtemp(prefix=prefix)) for prefix in ("sl-", "sl-pool-"))
    (home / "cache").symlink_to(caches)
    settings = new_settings(home=home, kv_pool_dir=pool, **fields)
    with (home / "up.log").open("wb") as log:
        up = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ops.cli", "up"),
            cwd=ROOT,
            env=stage_environment(settings),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        await holds(lambda: ask_status(home))
        advert = await find_advert(home)
        assert advert is not None, (home / "up.log").read_text()
        async with AttachedStack(settings, advert) as stack:
            yield stack
        up.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(up.wait(), DEADLINE_S) == 128 + signal.SIGTERM
        said = (home / "up.log").read_text()
        assert "warning:" not in said
        assert "Traceback" not in said
        events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        ends = {event["process"]: event["how"] for event in events if event["event"] == "process_stopped"}
        assert ends.keys() >= {line.stage for line in read_procfile(default_procfile())}
        assert set(ends.values()) == {"ended with code 0"}
        assert [path.name for path in pool.iterdir() if not path.name.startswith(".")] == []
    finally:
        if up.returncode is None:
            up.kill()
            await up.wait()
        shutil.rmtree(home)
        shutil.rmtree(pool)


async def holds(condition: Callable[[], Awaitable[object]]) -> None:
    """Return when the condition holds; fail when it does not come to hold."""
    deadline = monotonic() + DEADLINE_S
    while not await condition():
        assert monotonic() < deadline, "it did not come to hold"
        await asyncio.sleep(POLL_S)


class Flow:
    """The same requests over and over, some at a time, until told to stop."""

    def __init__(self, stack: Serving, asks: Sequence[NewRequest]) -> None:
        self.results: list[tuple[int, Result]] = []
        self._stack = stack
        self._asks = asks
        self._next = itertools.count()
        self._stopping = False
        self._workers = [asyncio.create_task(self._work()) for _ in range(NUM_IN_FLIGHT)]

    async def more(self, number: int) -> None:
        """Return when so many more requests have ended."""
        wanted = len(self.results) + number

        async def reached() -> bool:
            return len(self.results) >= wanted or any(worker.done() for worker in self._workers)

        await holds(reached)

    async def stop(self) -> None:
        """End when everything in flight has ended."""
        self._stopping = True
        await asyncio.gather(*self._workers)

    async def _work(self) -> None:
        while not self._stopping:
            index = next(self._next) % len(self._asks)
            [result] = await results_of(self._stack, [self._asks[index]])
            self.results.append((index, result))


async def scale(stack: Serving, **replicas: int) -> list[SlotStatus]:
    """Change the numbers; everything has to be ready or gone."""
    slots = await ask_scale(stack.settings.home, replicas, DEADLINE_S)
    assert [slot.name for slot in slots if not slot.ready] == []
    for stage, number in replicas.items():
        assert sum(slot.stage == stage for slot in slots) == number
    return slots


async def registered_pids(stack: Serving) -> set[int]:
    return {int(process.consumer.split(":")[-2]) for process in await stack.transport.processes()}


async def consumer_pids(stack: Serving) -> dict[str, set[int]]:
    """The processes that have a name in a consumer group, by stage."""
    found: dict[str, set[int]] = {}
    async with Redis.from_url(str(stack.settings.redis_url), protocol=2) as client:
        async for key in client.scan_iter(match=f"{stack.settings.namespace}:stream:*", _type="stream"):
            for group in await client.xinfo_groups(key):
                names = [entry["name"].decode() for entry in await client.xinfo_consumers(key, group["name"])]
                stage = found.setdefault(group["name"].decode(), set())
                stage |= {int(name.split(":")[-2]) for name in names if name != HANDBACK}
    return found


@pytest.mark.timeout(300)
async def test_scaling_under_load_shows_in_no_result_and_leaves_nobody_behind(
    caches: Path, tiny_models: tuple[Path, Path]
) -> None:
    async with running_up(caches, model=str(tiny_models[0]), chunk_tokens=64, max_num_seqs=4) as stack:
        asks = [
            ask(stack, f"request number {number} " * (number % 5 + 1), 80, seed=number, temperature=0.8, logprobs=1)
            for number in range(10)
        ]
        expected = await results_of(stack, asks)
        flow = Flow(stack, asks)
        await flow.more(5)
        slots = await scale(stack, decode=3)
        await flow.more(10)
        decode_pids = {slot.pid for slot in slots if slot.stage == "decode"}
        assert (await consumer_pids(stack))["decode"] == decode_pids
        await scale(stack, decode=1, prefill=2)
        await flow.more(10)
        slots = await scale(stack, prefill=1)
        await flow.more(5)
        await flow.stop()
        assert [index for index, result in flow.results if result != expected[index]] == []
        assert [slot.name for slot in slots if slot.num_restarts] == []
        left = {slot.pid for slot in slots}
        assert await registered_pids(stack) == left
        assert set[int | None]().union(*(await consumer_pids(stack)).values()) <= left
        assert {slot.name for slot in slots} >= {"tokenizer", "prefill", "compressor", "decode"}
