"""`sluice up` on a tiny model, scaled and stopped while requests flow: nothing shows in them, and nobody is left."""

import asyncio
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic

import pytest
from redis.asyncio import Redis

from ops.control.client import ask_scale, ask_status
from ops.running import AttachedStack, find_advert
from ops.serving import Serving
from ops.stack import DRAIN_ORDER, stage_environment
from ops.supervision.slot_status import SlotStatus
from pipeline.batch.results import Completion
from pipeline.client.asks import NewRequest
from pipeline.client.client import Client
from pipeline.keys import HANDBACK
from pipeline.messages import Failure
from pipeline.settings import Settings
from tests.e2e.stacks import DEADLINE_S, Result, ask, new_settings, results_of

ROOT = Path(__file__).parents[2]
NUM_IN_FLIGHT = 6
POLL_S = 0.02


@contextmanager
def new_home(caches: Path, **fields: object) -> Iterator[Settings]:
    """Settings with a home and a pool of their own; no blob may be left in the end."""
    home, pool = (Path(tempfile.mkdtemp(prefix=prefix)) for prefix in ("sl-", "sl-pool-"))
    try:
        (home / "cache").symlink_to(caches)
        yield new_settings(home=home, kv_pool_dir=pool, **fields)
        assert [path.name for path in pool.iterdir() if not path.name.startswith(".")] == []
    finally:
        shutil.rmtree(home)
        shutil.rmtree(pool)


@asynccontextmanager
async def running_up(settings: Settings) -> AsyncIterator[AttachedStack]:
    """Run `sluice up` as a process, and use its stack; in the end, SIGTERM has to stop all processes cleanly."""
    path = settings.home / "up.log"
    with path.open("wb") as log:
        up = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ops.cli", "up"),
            cwd=ROOT,
            env=stage_environment(settings),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        await holds(lambda: ask_status(settings.home))
        advert = await find_advert(settings)
        assert advert is not None, path.read_text()
        async with AttachedStack(settings, advert) as stack:
            yield stack
        up.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(up.wait(), DEADLINE_S) == 128 + signal.SIGTERM
        assert set(ends_in(path.read_text()).values()) == {"ended with code 0"}
    finally:
        if up.returncode is None:
            up.kill()
            await up.wait()


def ends_in(log: str) -> dict[str, str]:
    """How the processes ended that were asked to, in the order in which they did; each line of the stages has a name
    before it, those of `up` itself begin with a brace.
    """
    assert "Traceback" not in log
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return {event["process"]: event["how"] for event in events if event["event"] == "process_stopped"}


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
    with new_home(caches, model=str(tiny_models[0]), chunk_tokens=64, max_num_seqs=4) as settings:
        async with running_up(settings) as stack:
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


def texts_of(outcome: Completion | Failure) -> tuple[tuple[int, ...], str]:
    """What must not depend on who did the work; how many drafts it took may."""
    assert isinstance(outcome, Completion), outcome
    return outcome.token_ids, outcome.text


@pytest.mark.timeout(300)
async def test_stages_stop_in_order_under_load_and_the_next_start_goes_on(
    caches: Path, tiny_models: tuple[Path, Path]
) -> None:
    with new_home(caches, model=str(tiny_models[0]), chunk_tokens=64, max_num_seqs=2) as settings:
        async with running_up(settings) as stack:
            asks = [ask(stack, f"request number {number}", 400, seed=number, temperature=0.8) for number in range(16)]
            expected = [await stack.client().answer(one) for one in asks]
            async with await Client.connect(stack.settings.redis_url) as client:
                ids = [(await client.submit(one)).request_id for one in asks]
                await anext(client.stream(ids[0]))
        assert list(ends_in((settings.home / "up.log").read_text())) == list(DRAIN_ORDER)
        async with running_up(settings) as stack, await Client.connect(stack.settings.redis_url) as client:
            results = [await client.result(request_id) for request_id in ids]
        assert [texts_of(result) for result in results] == [texts_of(answer.outcome) for answer in expected]
