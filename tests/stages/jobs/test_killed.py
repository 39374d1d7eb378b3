"""Jobs processes that die in every step: whoever comes after them goes on, and nothing is lost or there twice."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline.batch.record import BatchRecord, BatchState
from pipeline.batch.store import BatchStore
from pipeline.redis_calls import RedisCalls
from pipeline.settings import Settings
from stages.jobs import turn
from stages.jobs.turn import Jobs
from tests.leftovers import delete_keys, keys_that_stay
from tests.ops.answering import HANG_WORD
from tests.stages.jobs.bench import DEADLINE_S, JobsBench, chat, ids_in, names_in, records_in, write_lines
from tests.stages.jobs.dying import POINTS

ROOT = Path(__file__).parents[3]
NUM_AT_A_TIME = 7
LINES = [chat("one"), "{", chat("two"), chat("three")]
HANGING = [chat("one"), chat("hangs", HANG_WORD), chat("hangs too", HANG_WORD)]


@asynccontextmanager
async def bench_of(url: str, namespace: str, directory: Path, raw: Redis) -> AsyncIterator[JobsBench]:
    make(directory)
    settings = Settings(redis_url=url, namespace=namespace, home=directory / "home")
    async with JobsBench(settings, directory, raw) as bench:
        yield bench
    await delete_keys(raw, namespace)


def make(directory: Path) -> None:
    directory.mkdir()


class Dying:
    """Starts jobs processes that kill themselves, and tells when they have."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ended: dict[str, asyncio.Future[int]] = {}

    async def killed(self, bench: JobsBench, point: str) -> None:
        """Run a jobs process until it has killed itself."""
        assert self._process.stdin is not None
        self._ended[point] = asyncio.get_running_loop().create_future()
        words = (bench.settings.namespace, str(bench.settings.redis_url), str(bench.directory), point)
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        try:
            assert await asyncio.wait_for(self._ended[point], DEADLINE_S) == -signal.SIGKILL, point
        except TimeoutError:
            raise AssertionError(f"it did not come to {point}") from None

    async def listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            point, code = json.loads(line)
            self._ended[point].set_result(code)


@asynccontextmanager
async def dying_processes() -> AsyncIterator[Dying]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.stages.jobs.dying"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    dying = Dying(process)
    listening = asyncio.create_task(dying.listen())
    try:
        yield dying
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        process.kill()
        await process.wait()


def bytes_of(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


async def dies_and_goes_on(bench: JobsBench, dying: Dying, point: str) -> None:
    """Let a jobs process die at a point; the next one has to bring the batch to its end."""
    ends_early = point.startswith(("cancel", "expire"))
    source = write_lines(bench.directory / "in.jsonl", HANGING if ends_early else LINES)
    target, errors = bench.directory / "out.jsonl", bench.directory / "out.errors.jsonl"
    directory = bench.prepare(source).directory
    async with bench.answering():
        batch_id = await bench.submit(source)
        killed = asyncio.create_task(dying.killed(bench, point))
        if ends_early:
            await bench.sees(batch_id, lambda record: record.cursor == 3 and record.num_finished == 1)
        if point.startswith("cancel"):
            await bench.store.cancel(batch_id)
        elif point.startswith("expire"):
            await bench.store.move(batch_id, ["in_progress"], None, {"deadline_ms": 1})
        await killed
        before = bytes_of(directory.finished_lines), bytes_of(target), bytes_of(errors)
        async with bench.working():
            record = await bench.ended(batch_id)
    is_right(record, point, num_lines=3 if ends_early else 4)
    written = bytes_of(target) + bytes_of(errors)
    if not ends_early:
        assert ids_in(target) == ["one", "two", "three"], point
        assert set(before[0].splitlines()) <= set(written.splitlines()), point
    assert before[1] in (b"", bytes_of(target)), point
    assert before[2] in (b"", bytes_of(errors)), point
    assert names_in(bench.directory) == {"in.jsonl", "out.jsonl", "out.errors.jsonl", "batches"}, point
    left = [name for name in names_in(bench.batches) if not name.startswith(".removed-")]
    assert left == [".lock"], point
    assert await keys_that_stay(bench.raw, bench.settings.namespace) == await work_that_hangs(bench), point


def is_right(record: BatchRecord, point: str, num_lines: int) -> None:
    ending: dict[str, BatchState] = {"cancel": "cancelled", "expire": "expired"}
    assert record.state == ending.get(point.partition(":")[0], "completed"), (point, record)
    assert (record.total, record.admitted, record.collected) == (num_lines, num_lines, num_lines), (point, record)
    assert (record.succeeded, record.failed) == ((1, 2) if num_lines == 3 else (3, 1)), (point, record)


async def work_that_hangs(bench: JobsBench) -> list[str]:
    """The stand-in stage never lets go of hanging lines; a stage would be told that they are over."""
    stream = bench.keys.stream("tokenizer", "batch")
    names = [stream, bench.keys.claims(stream), bench.keys.tries(stream)]
    num = await bench.raw.xlen(stream)
    said = [f"{stream} holds {num} entries", *(f"{name} has no TTL" for name in names[1:])]
    return [line for line in await keys_that_stay(bench.raw, bench.settings.namespace) if num and line in said]


async def test_killed_at_any_point_of_any_step(
    valkey_url: str, namespace: str, raw_redis: Redis, tmp_path: Path, short_waits: None
) -> None:
    free = asyncio.Semaphore(NUM_AT_A_TIME)

    async def try_out(number: int, point: str) -> None:
        async with free, bench_of(valkey_url, f"{namespace}-{number}", tmp_path / str(number), raw_redis) as bench:
            await dies_and_goes_on(bench, dying, point)

    async with dying_processes() as dying, asyncio.TaskGroup() as tasks:
        for number, point in enumerate(POINTS):
            tasks.create_task(try_out(number, point))


class Killed(BaseException):
    """Stands for kill -9: nobody catches it."""


class DyingCalls(RedisCalls):
    """Calls the server so often, and then never again."""

    def __init__(self, calls: RedisCalls, num_left: int, *, after: bool) -> None:
        vars(self).update(vars(calls))
        self.num_left = num_left
        self.num_done = 0
        self._after = after

    async def call(self, send: Callable[[], Awaitable[Any]], what: str) -> Any:
        self.num_done += 1
        if self.num_done > self.num_left or (self.num_done == self.num_left and not self._after):
            raise Killed
        result = await super().call(send, what)
        if self.num_done == self.num_left:
            raise Killed
        return result


def mortal(jobs: Jobs, num_calls: int, *, after: bool) -> tuple[Jobs, DyingCalls]:
    """A jobs process that ends with its num-th call, before the server hears of it or before the answer comes."""
    store = BatchStore(jobs.store._client, "test", jobs.store.keys)
    calls = DyingCalls(store._calls, num_calls, after=after)
    store._calls = calls
    return replace(jobs, store=store), calls


@pytest.mark.parametrize("ending", ["completed", "cancelled", pytest.param("expired", marks=pytest.mark.slow)])
async def test_killed_at_any_call_to_the_server(bench: JobsBench, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(turn, "SLICE_S", 0.2)
    monkeypatch.setattr(turn, "RENEWALS_PER_LEASE", 0.01)  # so that the number of calls is always the same

    async def run(jobs: Jobs, num_calls: int, *, after: bool) -> int:
        """Return how many calls were made by a process that died, or lived."""
        name = f"{ending}-{num_calls}-{after}"
        source = write_lines(bench.directory / f"{name}.in", LINES if ending == "completed" else HANGING)
        target = bench.directory / f"{name}.jsonl"
        batch_id = await bench.submit(source, target)
        if ending != "completed":
            await bench.drive(jobs, batch_id, until=lambda record: record.cursor == 3 and record.num_finished == 1)
        if ending == "cancelled":
            await bench.store.cancel(batch_id)
        elif ending == "expired":
            await bench.store.move(batch_id, ["in_progress"], "expiring")
        dying, calls = mortal(jobs, num_calls, after=after)
        with suppress(Killed):
            await bench.drive(dying, batch_id, until=lambda record: record.is_over)
        record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
        is_right(record, "cancel" if ending == "cancelled" else "expire" if ending == "expired" else "", record.total)
        assert ids_in(target) == (["one", "two", "three"] if ending == "completed" else ["one"])
        codes = [line["error"]["code"] for line in records_in(target.with_name(f"{name}.errors.jsonl"))]
        assert codes == (["invalid_json"] if ending == "completed" else [f"batch_{ending}"] * 2)
        return calls.num_done

    async with bench.answering(), bench.jobs() as jobs:
        num_calls = await run(jobs, 10_000, after=False)
        assert num_calls > 10
        async with asyncio.TaskGroup() as tasks:
            for number in range(1, num_calls + 1):
                for after in (False, True):
                    tasks.create_task(run(jobs, number, after=after))
    assert names_in(bench.batches) == {".lock"}
