"""Batches on the disk, for tests: a directory with a manifest, and lines as they finish."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from pipeline.batch.directory import BatchDirectory, Manifest, alone, new_batch_id
from pipeline.batch.journal import FinishedLine
from pipeline.batch.options import BatchOptions


def new_manifest(directory: Path, batch_id: str | None = None, **fields: Any) -> Manifest:
    """The manifest of a batch whose input and output lie in a directory."""
    named = {
        "source": directory / "in.jsonl",
        "target": directory / "out.jsonl",
        "errors": directory / "out.errors.jsonl",
        "model": "tiny",
        "stack_model": "tiny",
    }
    options = BatchOptions(**named | fields)
    return Manifest(batch_id=batch_id or new_batch_id(), options=options, input_sha256="0" * 64)


def new_directory(parent: Path, manifest: Manifest | None = None) -> BatchDirectory:
    """A batch's directory, made as submission makes it."""
    batches = parent / "batches"
    batches.mkdir(exist_ok=True)
    directory = BatchDirectory(batches / "one")
    with alone(batches):
        directory.create(manifest or new_manifest(parent))
    return directory


def finished(index: int, reason: str = "stop", **figures: Any) -> FinishedLine:
    """A line whose bytes tell which it is, and whose length differs from its neighbours'."""
    return FinishedLine(index, reason, f"line {index} {'x' * (index % 7)}\n".encode(), **figures)


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """No file of this process may become longer: writing fails as on a full disk, in the middle of a write.

    Nothing is logged meanwhile, since that may go to a file as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        with capture_logs():
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
