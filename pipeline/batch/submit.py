"""Submitting a batch: a new one gets files and a record, one that was interrupted is found and goes on.

Owns what happens between the command and the first step. The same input, options and output path are the same
batch; anything else at an output path where a batch has not ended is an error. Knows nothing about steps.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline import wire
from pipeline.batch.directory import BatchDirectory, Manifest, new_batch_id
from pipeline.batch.errors import BatchMismatch, UnknownBatch
from pipeline.batch.input_index import summarise
from pipeline.batch.journal import REASONS, read_records
from pipeline.batch.options import BatchOptions, directory_name
from pipeline.batch.record import STEPS
from pipeline.batch.store import BatchStore, line_request_id
from pipeline.errors import InvalidRequest, UnknownRequest
from pipeline.messages import Terminal

COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch that has its files, and may or may not have a record."""

    manifest: Manifest
    directory: BatchDirectory
    num_lines: int
    num_finished: int
    """Lines that were finished by an earlier run."""
    num_failed: int
    """Of those, the ones that failed."""
    is_new: bool


def prepare(
    options: BatchOptions,
    batches: Path,
    stdin: BinaryIO | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Prepared:
    """Read the input once, and find or make the batch's files; blocks, so call it in a thread.

    Args:
        options: What is asked for.
        batches: The directory of all batches.
        stdin: Where the requests come from, if not from options.source: they are copied.
        tick: Called now and then; may raise.

    Raises:
        InvalidRequest: the input has no requests, or the output cannot be a file.
        BatchMismatch: another batch is at work on this output.
        OSError: a file cannot be read or written.
    """
    _check_target("output", options.target)
    _check_target("errors", options.errors)
    batches.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = BatchDirectory(batches / directory_name(options.target))
    with _spooled(stdin, batches) as spool:
        source = spool or options.source
        summary = summarise(source, tick)
        if not summary.num_lines:
            raise InvalidRequest("input", f"{'standard input' if spool else source} has no requests")
        with _alone(batches):
            found = directory.manifest()
            if found is not None and found.identity != options.identity(summary.sha256):
                raise BatchMismatch(found.batch_id, options.target, options.identity(summary.sha256), found.identity)
            if spool is not None:
                options = options.model_copy(update={"source": directory.input_copy})
            manifest = Manifest(
                batch_id=new_batch_id() if found is None else found.batch_id,
                options=options,
                input_sha256=summary.sha256,
            )
            if found is None:
                directory.create(manifest)
            else:
                directory.replace_manifest(manifest)  # the input may have moved
            if spool is not None:
                spool.replace(directory.input_copy)
    records = read_records(directory, summary.num_lines)
    num_failed = int((records["reason"] == REASONS.index("error")).sum())
    return Prepared(manifest, directory, summary.num_lines, len(records), num_failed, is_new=found is None)


async def submit(store: BatchStore, prepared: Prepared) -> str:
    """Give the batch a record, or let the one it has go on, and return its id."""
    manifest, batch_id = prepared.manifest, prepared.manifest.batch_id
    recovered = None
    if prepared.num_finished:
        succeeded = prepared.num_finished - prepared.num_failed
        recovered = {"succeeded": succeeded, "failed": prepared.num_failed}
    if await store.create(manifest, str(prepared.directory.path), recovered):
        return batch_id
    record = await store.read(batch_id)
    options = {"options": manifest.options.model_dump_json()}
    if record.state == "failed":  # what made it fail may have been mended; lines in flight are found again
        counts = {"cursor": 0, "admitted": 0, "collected": 0, "succeeded": 0, "failed": 0, "recovered": 1}
        await store.move(batch_id, ["failed"], "validating", {**options, "error": "", **counts, **(recovered or {})})
    elif not record.is_over:
        await store.move(batch_id, [record.state], record.state, options)
    return batch_id


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An unfinished batch whose files are gone, and which of its lines were finished."""

    batch_id: str
    finished: frozenset[int]


def give_up(batches: Path, target: Path) -> GivenUp | None:
    """Remove the files of the unfinished batch of an output path, if there is one, with all it has finished."""
    directory = BatchDirectory(batches / directory_name(target))
    manifest = directory.manifest()
    if manifest is None:
        return None
    finished = frozenset(read_records(directory)["index"].tolist())
    directory.remove()
    return GivenUp(manifest.batch_id, finished)


async def end_given_up(store: BatchStore, cancel: Callable[[str, bytes], Awaitable[bool]], given_up: GivenUp) -> None:
    """End the record of a batch that was given up, and its lines in flight.

    Args:
        store: Where its record is.
        cancel: Ends a request with a terminal entry, as a transport does.
        given_up: What give_up returned.
    """
    try:
        await store.move(given_up.batch_id, tuple(STEPS), "cancelled", {"ended_ms": "now"})
        record = await store.read(given_up.batch_id)
    except UnknownBatch:  # it never had a record, or the server lost it
        return
    terminal = wire.pack(Terminal(finish_reason="cancelled"))
    for index in range(record.cursor):
        if index not in given_up.finished:
            with suppress(UnknownRequest):
                await cancel(line_request_id(record.id, index), terminal)


def _check_target(field: str, target: Path) -> None:
    if target.is_dir():
        raise InvalidRequest(field, f"{target} is a directory")
    if target.exists() and not target.is_file():
        raise InvalidRequest(field, f"{target} is no regular file, and would be replaced by one")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(target.parent, os.W_OK):
        raise InvalidRequest(field, f"{target.parent} cannot be written to")


@contextmanager
def _spooled(stdin: BinaryIO | None, batches: Path) -> Generator[Path | None]:
    """Copy a pipe to a file that is gone afterwards, unless it was moved away."""
    if stdin is None:
        yield None
        return
    descriptor, name = tempfile.mkstemp(prefix=".input-", dir=batches)
    path = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            shutil.copyfileobj(stdin, file, COPY_BYTES)
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _alone(batches: Path) -> Generator[None]:
    """Let no other command look for or make a batch meanwhile, which takes milliseconds."""
    descriptor = os.open(batches / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
