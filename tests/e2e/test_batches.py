"""One batch of real processes on a tiny model, and everything that may happen to it: at the end nothing shows."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from kv_store.pool import FilePool
from ops.server.valkey import EmbeddedValkey
from ops.stack import stage_environment
from pipeline.batch.directory import BatchDirectory
from pipeline.batch.options import directory_name
from pipeline.batch.record import BatchRecord
from pipeline.batch.store import BatchStore
from pipeline.connect import host_and_pid, open_transport
from pipeline.keys import Keys
from pipeline.settings import Settings
from tests.e2e.stacks import DEADLINE_S, new_settings
from tests.leftovers import keys_that_stay
from tests.ops.waiting import wait_for_end

ROOT = Path(__file__).parents[2]
NUM_LINES = 300
WRONG_LINES = (7, 250)


@pytest.fixture
def settings(caches: Path, tiny_models: tuple[Path, Path]) -> Iterator[Settings]:
    """A home and a pool of their own."""
    home, pool = (Path(tempfile.mkdtemp(prefix=prefix)) for prefix in ("sl-", "sl-pool-"))
    (home / "cache").symlink_to(caches)
    yield new_settings(home=home, kv_pool_dir=pool, model=str(tiny_models[0]), chunk_tokens=64)
    shutil.rmtree(home)
    shutil.rmtree(pool)


class Run:
    """`sluice run` as a process of its own, which starts a stack of its own."""

    def __init__(self, process: asyncio.subprocess.Process, settings: Settings) -> None:
        self.process = process
        self.num_done = 0
        self._settings = settings

    async def event(self) -> dict[str, Any]:
        """The next line that it prints."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            line = await self.process.stdout.readline()
        assert line, "it ended"
        event: dict[str, Any] = json.loads(line)
        self.num_done = event.get("num_done", self.num_done)
        return event

    async def finishes(self, num_lines: int) -> None:
        """Return when so many lines are done, and fail when it is over by then."""
        while self.num_done < num_lines:
            assert (await self.event())["event"] in {"note", "progress"}
        assert self.num_done < NUM_LINES, "too late to interrupt anything"

    async def figures(self) -> dict[str, Any]:
        """What it says at its end."""
        while (event := await self.event())["event"] in {"note", "progress"}:
            pass
        return event

    async def pids(self) -> dict[str, int]:
        """The processes of its stack that have registered, and its server."""
        where = self._settings.model_copy(update={"redis_url": f"unix://{self._settings.home}/valkey/server.sock"})
        transport = await open_transport(where)
        server: Any = Redis.from_url(str(where.redis_url), protocol=2)
        try:
            found = {process.stage: host_and_pid(process.consumer)[1] for process in await transport.processes()}
            found["server"] = (await server.info("server"))["process_id"]
        finally:
            await transport.close()
            await server.aclose()
        return {name: pid for name, pid in found.items() if pid is not None}


@asynccontextmanager
async def sluice_run(settings: Settings, *words: object) -> AsyncIterator[Run]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.cli", "run", *map(str, words), "--json"),
        cwd=ROOT,
        env=stage_environment(settings),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Run(process, settings)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def write_input(directory: Path) -> Path:
    """Requests of all kinds: with seeds and without, short and in several chunks, and two that are wrong."""
    path = directory / "in.jsonl"
    with path.open("w") as file:
        for number in range(NUM_LINES):
            body: dict[str, object] = {"model": "one", "prompt": f"{number} and " * (1 + number % 12), "max_tokens": 12}
            body |= {"seed": number} if number % 2 else {}
            body |= {"temperature": 7} if number in WRONG_LINES else {}
            line = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


@asynccontextmanager
async def server_of(home: Path) -> AsyncIterator[Redis]:
    """What the server of a stopped stack still has."""
    server = EmbeddedValkey(home)
    client = Redis.from_url(await server.start(), protocol=2)
    try:
        yield client
    finally:
        await client.aclose()
        await server.stop()


async def record_of(raw: Redis, settings: Settings) -> BatchRecord:
    [record] = await BatchStore(raw, "test", Keys(settings.namespace)).all()
    return record


def finished_so_far(settings: Settings, target: Path) -> list[bytes]:
    """The whole lines that are on the disk, as they will be in the output; a killed process may leave half a one."""
    directory = BatchDirectory(settings.home / "batches" / directory_name(target))
    data = directory.finished_lines.read_bytes()
    return data[: data.rfind(b"\n") + 1].splitlines()


def is_whole(target: Path, settings: Settings, kept: list[list[bytes]]) -> None:
    results, errors = lines_of(target), lines_of(target.with_name("out.errors.jsonl"))
    assert [json.loads(line)["custom_id"] for line in results] == [
        f"id-{number}" for number in range(NUM_LINES) if number not in WRONG_LINES
    ]
    assert [json.loads(line)["error"]["line"] for line in errors] == [number + 1 for number in WRONG_LINES]
    for lines in kept:
        assert set(lines) <= {*results, *errors}, "a finished line was done again"
    assert [path.name for path in (settings.home / "batches").iterdir()] == [".lock"]
    assert sorted(path.name for path in target.parent.glob("*")) == ["in.jsonl", "out.errors.jsonl", "out.jsonl"]


async def test_interrupted_in_every_way_it_goes_on_and_nothing_shows(settings: Settings, tmp_path: Path) -> None:
    words = ("-i", write_input(tmp_path), "-o", tmp_path / "out.jsonl", "--window", 24)
    target, kept = tmp_path / "out.jsonl", list[list[bytes]]()

    # Ctrl-C.
    async with sluice_run(settings, *words) as run:
        await run.finishes(40)
        run.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(run.process.wait(), DEADLINE_S) == 130
    kept.append(finished_so_far(settings, target))
    assert len(kept[-1]) >= 40

    # kill -9 of everything at once: the command, which is the supervisor, the stages and the server.
    async with sluice_run(settings, *words) as run:
        await run.finishes(len(kept[-1]) + 40)
        pids = await run.pids()
        for pid in (run.process.pid, *pids.values()):
            os.kill(pid, signal.SIGKILL)
        assert set(pids) >= {"jobs", "tokenizer", "prefill", "compressor", "decode", "server"}
        for pid in pids.values():
            await asyncio.to_thread(wait_for_end, pid)
    kept.append(finished_so_far(settings, target))

    # kill -9 of the jobs process while the command goes on.
    async with sluice_run(settings, *words) as run:
        await run.finishes(len(kept[-1]) + 40)
        before = (await run.pids())["jobs"]
        os.kill(before, signal.SIGKILL)
        kept.append(finished_so_far(settings, target))
        figures = await run.figures()
        assert await asyncio.wait_for(run.process.wait(), DEADLINE_S) == 1  # because of the lines that are wrong
    assert (figures["event"], figures["num_lines"], figures["num_failed"]) == ("completed", NUM_LINES, len(WRONG_LINES))

    is_whole(target, settings, kept)
    async with server_of(settings.home) as raw:
        record = await record_of(raw, settings)
        # Each line was fed once: lines in flight went on where they were.
        assert (record.state, record.recovered, record.admitted) == ("completed", False, NUM_LINES)
        assert (record.succeeded, record.failed) == (NUM_LINES - len(WRONG_LINES), len(WRONG_LINES))
        assert await keys_that_stay(raw, settings.namespace) == []
    with FilePool.open(settings.pool_dir, settings.kv_pool_bytes) as pool:
        assert pool.names() == []
