"""Batches on a real server with a jobs process inside the test: started, stopped and killed as a test likes.

Owns the namespace's connections and the directory of batches. The other stages are whatever a test lets answer
(tests/ops/answering.py).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.batch.options import BatchOptions
from pipeline.batch.record import STEPS, BatchRecord, BatchState
from pipeline.batch.schedule import BatchScheduler, arq_client
from pipeline.batch.store import BatchStore, store_client
from pipeline.batch.submit import Prepared, prepare, submit
from pipeline.client.batches import errors_path
from pipeline.connect import open_transport
from pipeline.keys import Keys
from pipeline.settings import Settings
from stages.jobs.reconcile import reconcile_forever
from stages.jobs.token_names import TokenNames
from stages.jobs.turn import Jobs, take_turn
from stages.jobs.worker import STEP_FUNCTIONS, work
from tests.ops.answering import serve

MODEL = "tiny"
POOL = "pool-1"
DEADLINE_S = 30.0  # for things that take milliseconds, on a machine that may be busy
POLL_S = 0.005
NUM_CONNECTIONS = 32


class NoScheduler(BatchScheduler):
    """Asks for nothing: whoever takes turns by hand knows what is next."""

    async def drive(self, store: BatchStore, batch_id: str, state: BatchState) -> None:
        return


class JobsBench:
    """One namespace and one directory of batches."""

    def __init__(self, settings: Settings, directory: Path, raw: Any) -> None:
        self.settings = settings
        self.directory = directory
        self.raw = raw
        self.keys = Keys(settings.namespace)
        self._exit = AsyncExitStack()
        self.store: BatchStore

    async def __aenter__(self) -> "JobsBench":
        client = store_client(str(self.settings.redis_url), NUM_CONNECTIONS)
        self._exit.push_async_callback(client.aclose)
        self.store = BatchStore(client, "test", self.keys)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    # What a command does

    def options(self, source: Path, target: Path | None = None, **fields: Any) -> BatchOptions:
        target = target or self.directory / "out.jsonl"
        named = {"errors": errors_path(target), "model": MODEL, "stack_model": MODEL} | fields
        return BatchOptions(source=source, target=target, **named)

    def prepare(self, source: Path, target: Path | None = None, *, restart: bool = False, **fields: Any) -> Prepared:
        return prepare(self.options(source, target, **fields), self.batches, restart=restart)

    async def submit(self, source: Path, target: Path | None = None, **fields: Any) -> str:
        """Do what the command does until it waits."""
        return await submit(self.store, self.prepare(source, target, **fields))

    @property
    def batches(self) -> Path:
        return self.directory / "batches"

    # What the processes of a stack do

    @asynccontextmanager
    async def jobs(self) -> AsyncIterator[Jobs]:
        """What a jobs process works with."""
        url = str(self.settings.redis_url)
        client, scheduling = store_client(url, NUM_CONNECTIONS), arq_client(url, self.keys, answer_timeout_s=None)
        transport = await open_transport(self.settings, pool_id=POOL)
        try:
            yield Jobs(
                store=BatchStore(client, "test", self.keys, strict=self.settings.durability == "strict"),
                scheduler=BatchScheduler(scheduling, "test", self.keys),
                transport=transport,
                names=TokenNames(self.directory / "no-model"),
                stopping=asyncio.Event(),
                max_queue=self.settings.max_queue,
            )
        finally:
            await transport.close()
            await scheduling.aclose()
            await client.aclose()

    async def drive(self, jobs: Jobs, batch_id: str, *, until: Callable[[BatchRecord], bool]) -> BatchRecord:
        """Take the turns of a batch by hand, one after the other and without arq, until the record is as wanted."""
        jobs = replace(jobs, scheduler=NoScheduler(None, "test", self.keys))  # pyright: ignore[reportArgumentType]
        async with asyncio.timeout(DEADLINE_S):
            while not until(record := await self.store.read(batch_id)):
                for step in STEPS.get(record.state, ()):
                    number = await self.store.revive(batch_id, step)
                    if number is not None:
                        await take_turn(jobs, step, STEP_FUNCTIONS[step], batch_id, number)
                await asyncio.sleep(POLL_S)
        return record

    @asynccontextmanager
    async def working(self) -> AsyncIterator[Jobs]:
        """A jobs process, which is told to stop at the end."""
        async with self.jobs() as jobs, asyncio.TaskGroup() as tasks:
            tasks.create_task(reconcile_forever(jobs))
            tasks.create_task(work(jobs, lambda: arq_client(str(self.settings.redis_url), self.keys)))
            yield jobs
            jobs.stopping.set()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """All other stages: each request is answered at once."""
        transport = await open_transport(self.settings, pool_id=POOL)
        stopping = asyncio.Event()
        task = asyncio.create_task(serve(transport, stopping))
        try:
            yield
        finally:
            stopping.set()
            await task
            await transport.close()

    # What tests look at

    async def ended(self, batch_id: str) -> BatchRecord:
        """Return the record when the batch is over."""
        return await self.sees(batch_id, lambda record: record.is_over)

    async def reaches(self, batch_id: str, *states: BatchState) -> BatchRecord:
        """Return the record when the batch is in one of the states."""
        return await self.sees(batch_id, lambda record: record.state in states)

    async def sees(self, batch_id: str, condition: Callable[[BatchRecord], bool]) -> BatchRecord:
        """Return the record when it is as wanted."""
        record = await self.store.read(batch_id)
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition(record):
                    await asyncio.sleep(POLL_S)
                    record = await self.store.read(batch_id)
        except TimeoutError:
            raise AssertionError(f"it did not come to hold: {record}") from None
        return record

    async def sees_soon(self, batch_id: str, condition: Callable[[BatchRecord], bool]) -> BatchRecord:
        """The same for a record that is about to be made."""

        async def exists() -> bool:
            return bool(await self.raw.exists(self.keys.batch(batch_id)))

        await self.holds(exists)
        return await self.sees(batch_id, condition)

    async def holds(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Return when the condition holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not await condition():  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(POLL_S)


def chat(custom_id: str, text: str = "a b c", **body: object) -> str:
    """One line of a batch."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "seed": 1, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def records_in(path: Path) -> list[dict[str, Any]]:
    """The lines of an output; none where there is no file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def ids_in(path: Path) -> list[str | None]:
    return [record["custom_id"] for record in records_in(path)]


def names_in(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()}
