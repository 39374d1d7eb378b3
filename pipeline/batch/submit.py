"""Submitting a batch: a new one gets files and a record, one that was interrupted is found and goes on.

Owns what happens between the command and the first step. The same input, options and output path are the same
batch; anything else at an output path where a batch has not ended is an error. Knows nothing about steps.
"""

import asyncio
import os
import select
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline import wire
from pipeline.batch.directory import (
    BatchDirectory,
    Manifest,
    alone,
    clear_up,
    new_batch_id,
    spool,
    temporary_output,
)
from pipeline.batch.errors import BatchFilesDamaged, BatchMismatch, UnknownBatch
from pipeline.batch.input_index import InputSummary, summarise
from pipeline.batch.journal import REASONS, read_records
from pipeline.batch.options import BatchOptions, directory_name
from pipeline.batch.record import STEPS
from pipeline.batch.store import NOW, BatchStore, fresh_steps, later, line_request_id
from pipeline.errors import InvalidRequest, UnknownRequest
from pipeline.messages import Terminal
from pipeline.params import is_unicode

COPY_BYTES = 1 << 20
PIPE_POLL_S = 0.2  # how long a pipe that says nothing keeps a command from ending

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An unfinished batch whose files are gone, and which of its lines were finished."""

    batch_id: str
    finished: frozenset[int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch that has its files, and may or may not have a record."""

    manifest: Manifest
    directory: BatchDirectory
    num_lines: int
    num_finished: int
    """Lines that were finished by an earlier run."""
    is_new: bool
    given_up: GivenUp | None = None
    """The batch in whose place it is."""
    restarted: bool = False
    """It is to be done anew, whatever there was."""


def check(options: BatchOptions, batches: Path, tick: Tick = lambda: None, *, restart: bool = False) -> InputSummary:
    """Read the input once and see whether a batch of it could begin, before anything is started for it.

    Raises:
        InvalidRequest, BatchMismatch, BatchFilesDamaged, OSError: as prepare.
    """
    _check_paths(options, is_copied=False)
    summary = _summary(options.source, str(options.source), tick)
    if not restart:
        _manifest(BatchDirectory(batches / directory_name(options.target)), options, summary)
    return summary


def prepare(
    options: BatchOptions,
    batches: Path,
    stdin: BinaryIO | None = None,
    tick: Tick = lambda: None,
    *,
    restart: bool = False,
    checked: InputSummary | None = None,
) -> Prepared:
    """Read the input once, and find or make the batch's files; blocks, so call it in a thread.

    Args:
        options: What is asked for.
        batches: The directory of all batches.
        stdin: Where the requests come from, if not from options.source: they are copied.
        tick: Called now and then, also while standard input is silent; may raise.
        restart: Give an unfinished batch of this output up, with all it has finished.
        checked: What check has found in the same source, which is not read again then; validation notices a change.

    Raises:
        InvalidRequest: the input has no requests, or a path cannot be what it should be.
        BatchMismatch: another batch is at work on this output.
        BatchFilesDamaged: there is a batch that cannot be read.
        OSError: a file cannot be read or written.
    """
    _check_paths(options, is_copied=stdin is not None)
    batches.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = BatchDirectory(batches / directory_name(options.target))
    with _copied(stdin, batches, tick) as copy:
        source = copy or options.source
        summary = checked or _summary(source, "standard input" if copy else str(source), tick)
        if copy is not None:
            options = options.model_copy(update={"source": directory.input_copy})
        with alone(batches):
            clear_up(batches)
            given_up = _give_up(directory) if restart else None
            found = _manifest(directory, options, summary)
            batch_id = new_batch_id() if found is None else found.batch_id
            manifest = Manifest(batch_id=batch_id, options=options, input_sha256=summary.sha256)
            if found is None:
                directory.create(manifest)
            else:
                directory.replace_manifest(manifest)  # the input may have moved
            if copy is not None:
                copy.replace(directory.input_copy)
    num_finished = len(read_records(directory, summary.num_lines))
    return Prepared(manifest, directory, summary.num_lines, num_finished, found is None, given_up, restart)


async def submit(store: BatchStore, prepared: Prepared) -> str:
    """Give the batch a record, or let the one it has go on, and return its id.

    Repeated after the server lost its data, it makes the record again from the files.
    """
    manifest, batch_id = prepared.manifest, prepared.manifest.batch_id
    counts = await asyncio.to_thread(_counts, prepared)
    await store.create(manifest, str(prepared.directory.path), counts)
    record = await store.read(batch_id)
    timeout_s = manifest.options.timeout_s
    fields = {"options": manifest.options.model_dump_json(), "deadline_ms": later(timeout_s) if timeout_s else 0}
    if record.state == "failed":  # what made it fail may have been mended; lines in flight are found again
        anew = {"cursor": 0, "admitted": 0, "collected": 0, "succeeded": 0, "failed": 0, "recovered": 1}
        forgotten = {"error": "", "ending": "", "cancel_requested": 0, "ended_ms": 0}
        fields |= forgotten | anew | fresh_steps() | (counts or {})
        await store.move(batch_id, ["failed"], "validating", fields)
    else:
        await store.move(batch_id, tuple(STEPS), None, fields)
    return batch_id


async def end_given_up(store: BatchStore, cancel: Callable[[str, bytes], Awaitable[bool]], given_up: GivenUp) -> None:
    """End the record of a batch that was given up, and its lines in flight.

    Args:
        store: Where its record is.
        cancel: Ends a request with a terminal entry, as a transport does.
        given_up: What prepare found.
    """
    try:
        await store.move(given_up.batch_id, tuple(STEPS), "cancelled", {"ended_ms": NOW})
        record = await store.read(given_up.batch_id)
    except UnknownBatch:  # it never had a record, or the server lost it
        return
    terminal = wire.pack(Terminal(finish_reason="cancelled"))
    for index in range(record.cursor):
        if index not in given_up.finished:
            with suppress(UnknownRequest):
                await cancel(line_request_id(record.id, index), terminal)


def _summary(source: Path, named: str, tick: Tick) -> InputSummary:
    summary = summarise(source, tick)
    if not summary.num_lines:
        raise InvalidRequest("input", f"{named} has no requests")
    return summary


def _manifest(directory: BatchDirectory, options: BatchOptions, summary: InputSummary) -> Manifest | None:
    """Return the manifest of the unfinished batch that these options mean; None where there is none."""
    found = directory.manifest()
    identity = options.identity(summary.sha256)
    if found is not None and found.identity != identity:
        raise BatchMismatch(found.batch_id, options.target, identity, found.identity)
    return found


def _check_paths(options: BatchOptions, *, is_copied: bool) -> None:
    named = {"input": options.source, "output": options.target, "errors": options.errors}
    for field, path in named.items():
        if not is_unicode(str(path)):
            raise InvalidRequest(field, "has a name that is not UTF-8")
    if not is_copied and not options.source.is_file():
        raise InvalidRequest("input", f"{options.source} is not a file")
    for field, path in (("output", options.target), ("errors", options.errors)):
        _check_target(field, path)
        if not is_copied and path.exists() and path.samefile(options.source):
            raise InvalidRequest(field, f"is the input, {path}")


def _check_target(field: str, target: Path) -> None:
    if target.is_dir():
        raise InvalidRequest(field, f"{target} is a directory")
    if target.exists() and not target.is_file():
        raise InvalidRequest(field, f"{target} is no regular file, and would be replaced by one")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(target.parent, os.W_OK):
        raise InvalidRequest(field, f"{target.parent} cannot be written to")


def _give_up(directory: BatchDirectory) -> GivenUp | None:
    """Remove the files of a batch, whatever state they are in; None where they do not say whose they are."""
    given_up = None
    with suppress(BatchFilesDamaged):
        manifest = directory.manifest()
        if manifest is not None:
            for path in temporary_output(manifest.options.target, manifest.options.errors, manifest.batch_id):
                path.unlink(missing_ok=True)
            given_up = GivenUp(manifest.batch_id, frozenset())
            given_up = GivenUp(manifest.batch_id, frozenset(read_records(directory)["index"].tolist()))
    directory.drop()
    return given_up


def _counts(prepared: Prepared) -> dict[str, int] | None:
    """Return what the record has to say about lines that are finished; None where there are none."""
    records = read_records(prepared.directory, prepared.num_lines)
    failed = int((records["reason"] == REASONS.index("error")).sum())
    return {"succeeded": len(records) - failed, "failed": failed} if len(records) else None


@contextmanager
def _copied(stdin: BinaryIO | None, batches: Path, tick: Tick) -> Generator[Path | None]:
    """Copy a pipe to a file that is gone afterwards, unless it was moved away."""
    if stdin is None:
        yield None
        return
    with spool(batches) as (path, file):
        for piece in _pieces(stdin, tick):
            file.write(piece)
        file.flush()
        yield path


def _pieces(stdin: BinaryIO, tick: Tick) -> Iterator[bytes]:
    """Yield what comes out of a pipe."""
    try:
        descriptor = stdin.fileno()
    except OSError:  # not a real one
        yield from iter(lambda: stdin.read(COPY_BYTES), b"")
        return
    while True:
        tick()
        if not select.select([descriptor], [], [], PIPE_POLL_S)[0]:
            continue
        piece = os.read(descriptor, COPY_BYTES)
        if not piece:
            return
        yield piece
