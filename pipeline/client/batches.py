"""Batches, from the side of whoever submits them: durable jobs that a stack's jobs process works on.

Owns the wait for a batch. What a batch is and where it is kept is pipeline/batch's. Knows nothing about steps.
"""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Self

from pipeline.batch.errors import BatchFailed, UnknownBatch
from pipeline.batch.figures import BatchSummary
from pipeline.batch.input_index import InputSummary
from pipeline.batch.options import BatchOptions, served_name
from pipeline.batch.record import BatchRecord
from pipeline.batch.store import BatchStore, store_client
from pipeline.batch.submit import Prepared, end_given_up, prepare, submit
from pipeline.client.arguments import check_id
from pipeline.client.patience import PATIENCE_S, STALL_TIMEOUT_S, Patience
from pipeline.clock import Monotonic, monotonic_s
from pipeline.keys import Keys
from pipeline.server_url import read_address
from pipeline.settings import Settings
from pipeline.transport import Transport

NUM_CONNECTIONS = 4
POLL_S = 0.25  # how often a batch's record is read while somebody waits


class Batches:
    """The batches of one stack."""

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        *,
        patience_s: float = PATIENCE_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        monotonic: Monotonic = monotonic_s,
    ) -> None:
        """Use a transport that somebody else opened with these settings, and closes."""
        url = settings.redis_url or ""
        self._redis = store_client(url, NUM_CONNECTIONS)
        self._transport = transport
        self._home = settings.home
        self._patience = Patience(patience_s, stall_timeout_s, monotonic)
        self.store = BatchStore(self._redis, read_address(url).shown, Keys(settings.namespace))

    async def run(
        self,
        source: Path,
        target: Path,
        *,
        model: str,
        errors: Path | None = None,
        restart: bool = False,
        on_change: Callable[[BatchRecord], None] = lambda _: None,
    ) -> BatchSummary:
        """Run a file of requests to its end; called again after an interruption, it goes on where it was.

        Args:
            source: the requests, in OpenAI's batch format, as the jobs process can read them.
            target: where the results go, in the order of the input.
            model: what the stack was started with.
            errors: where lines that failed go; beside the target by default.
            restart: start over, even where an unfinished batch writes this target.
            on_change: gets the record now and then.

        Raises:
            InvalidRequest: the input has no requests, or a path is no file.
            BatchMismatch: an unfinished batch writes the same target and differs.
            BatchFailed: it cannot be done; says why.
        """
        options = batch_options(source, target, model=model, errors=errors)
        prepared = await prepare_in_thread(options, batches_dir(self._home), restart=restart)
        return summary_of(await self.follow(prepared, on_change))

    async def submit(self, prepared: Prepared) -> str:
        """Let a prepared batch begin, or go on, and return its id; the one in whose place it is ends."""
        given_up = prepared.given_up
        if given_up is not None:
            await self._patience.call(lambda: end_given_up(self.store, self._transport.cancel, given_up))
        return await self._patience.call(lambda: submit(self.store, prepared))

    async def follow(
        self, prepared: Prepared, on_change: Callable[[BatchRecord], None] = lambda _: None
    ) -> BatchRecord:
        """Submit a batch and return its record when it is over, also where the server loses its data meanwhile.

        Raises:
            Stalled: nothing moved for so long that something must be wrong.
        """
        if prepared.is_new and not prepared.restarted:
            missed = await self._missed(prepared)
            if missed is not None:
                await asyncio.to_thread(prepared.directory.remove)
                return missed
        while True:
            batch_id = await self.submit(prepared)
            try:
                record = await self.wait(batch_id, on_change)
            except UnknownBatch:
                continue  # its files know what it was and what is finished
            await self._patience.call(lambda batch_id=batch_id: self.store.saw(batch_id))
            return record

    async def _missed(self, prepared: Prepared) -> BatchRecord | None:
        """Return the same batch where it was completed while nobody followed it, and its output is still there."""
        identity = prepared.manifest.identity
        for record in reversed(await self.all()):
            same = record.options.identity(record.input_sha256) == identity
            if same and record.state == "completed" and not record.seen and record.options.target.is_file():
                await self._patience.call(lambda batch_id=record.id: self.store.saw(batch_id))
                return record
        return None

    async def read(self, batch_id: str) -> BatchRecord:
        """Return a batch's record.

        Raises:
            InvalidRequest: no batch can have this id.
            UnknownBatch: it has none.
        """
        check_id(batch_id, "batch_id")
        return await self._patience.call(lambda: self.store.read(batch_id))

    async def all(self) -> list[BatchRecord]:
        """Return all batches that have not ended, and those that ended within a day; oldest first."""
        return await self._patience.call(self.store.all)

    async def wait(
        self, batch_id: str, on_change: Callable[[BatchRecord], None] = lambda _: None, poll_s: float = POLL_S
    ) -> BatchRecord:
        """Return a batch's record when it is over; `on_change` sees it now and then.

        Raises:
            UnknownBatch: the server lost it; submitting it again goes on with what is on the disk.
            Stalled: nothing moved for so long that something must be wrong.
        """
        seen, began = None, self._patience.now()
        while True:
            record = await self.read(batch_id)
            if record != seen:
                self._patience.moved()
                on_change(record)
            seen = record
            if record.is_over:
                return record
            self._patience.check(began, f"batch {batch_id} stands still; is the jobs process of its stack running?")
            await asyncio.sleep(poll_s)

    async def cancel(self, batch_id: str) -> bool:
        """End a batch early: finished lines are kept, the others become errors. False where it was over.

        Raises:
            InvalidRequest: no batch can have this id.
            UnknownBatch: it has no record.
        """
        check_id(batch_id, "batch_id")
        return await self._patience.call(lambda: self.store.cancel(batch_id))

    async def close(self) -> None:
        """Release the connections; batches go on."""
        await self._redis.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def prepare_in_thread(
    options: BatchOptions,
    batches: Path,
    stdin: BinaryIO | None = None,
    *,
    restart: bool = False,
    checked: InputSummary | None = None,
) -> Prepared:
    """Do what prepare does, beside the event loop; cancelled, it stops reading."""
    stopped = threading.Event()

    def tick() -> None:
        if stopped.is_set():
            raise InterruptedError("nobody waits for it any more")

    try:
        return await asyncio.to_thread(prepare, options, batches, stdin, tick, restart=restart, checked=checked)
    finally:
        stopped.set()


def batch_options(
    source: Path, target: Path, *, model: str, errors: Path | None = None, **choices: Any
) -> BatchOptions:
    """Return the options of a batch with absolute paths; what is not among the choices has its default."""
    target = resolved(target)
    return BatchOptions(
        source=resolved(source),
        target=target,
        errors=errors_path(target) if errors is None else resolved(errors),
        model=served_name(model),
        stack_model=model,
        **choices,
    )


def errors_path(target: Path) -> Path:
    """Return where lines that failed go by default: out.jsonl has its errors in out.errors.jsonl."""
    return target.with_name(f"{target.stem}.errors{target.suffix}")


def batches_dir(home: Path) -> Path:
    """Return the directory that holds the files of all batches of a home."""
    return home / "batches"


def resolved(path: Path) -> Path:
    """Return a path that means the same file to everybody; a link stays a link, and its target gets the lines."""
    return path.expanduser().resolve()


def summary_of(record: BatchRecord) -> BatchSummary:
    """Return the figures of a batch that has ended.

    Raises:
        BatchFailed: it has none, because it failed.
    """
    if record.state == "failed":
        raise BatchFailed(record.id, record.error)
    return BatchSummary.model_validate_json(record.summary)
