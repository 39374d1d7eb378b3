"""The lines of a batch that are finished: appended as they come, put in order at the end.

Owns finished.lines (output lines, one after the other) and finished.index (fixed records: whose each is, and
its figures). A line counts from the moment its record is on the disk, and it gets there after its bytes. What a
crash leaves behind the last whole record is cut off, so that no line is ever half there or there twice.
Whoever appends holds the directory's lock. Knows nothing about queues.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

import numpy as np
from numpy.typing import NDArray

from pipeline.batch.directory import BatchDirectory
from pipeline.batch.errors import BatchFilesDamaged
from pipeline.batch.record import BatchRecord
from pipeline.timeline import PHASES

PHASE_NAMES = tuple(PHASES.values())
REASONS = ("stop", "length", "error")
"""How a line ended; the record holds its position."""
NOT_YET = 0xFFFFFFFF  # a time that a failed line has not
# little-endian, packed
RECORD = np.dtype(
    [
        ("index", "<u4"),  # of the line among those with a request
        ("reason", "<u1"),
        ("offset", "<u8"),
        ("size", "<u4"),
        ("prompt_tokens", "<u4"),
        ("output_tokens", "<u4"),
        ("draft_tokens", "<u4"),
        ("accepted_tokens", "<u4"),
        ("ttft_us", "<u4"),
        ("latency_us", "<u4"),
        ("phases_us", "<u4", (len(PHASE_NAMES),)),
    ]
)


@dataclass(frozen=True, slots=True)
class FinishedLine:
    """One line's result and figures."""

    index: int
    reason: str
    """One of REASONS."""
    output: bytes
    """The line as it stands in the output, with its end."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    ttft_us: int | None = None
    latency_us: int | None = None
    phases_us: Sequence[int] = (0,) * len(PHASE_NAMES)
    """In the order of PHASE_NAMES."""


class Journal:
    """The open journal of one batch, for whoever appends to it."""

    def __init__(self, directory: BatchDirectory, num_lines: int) -> None:
        """Open it, or begin one; what a crash left half written is cut off.

        Raises:
            BatchFilesDamaged: its records cannot be of this batch.
            OSError: it cannot be written.
        """
        records = read_records(directory, num_lines)
        self._lines = _open(directory.finished_lines)
        self._index = _open(directory.finished_index)
        self._size = int(records["offset"][-1] + records["size"][-1]) if len(records) else 0
        self._lines.truncate(self._size)
        self._index.truncate(len(records) * RECORD.itemsize)
        self._reasons: NDArray[np.uint8] = np.full(num_lines, 255, np.uint8)
        self._reasons[records["index"]] = records["reason"]

    def reason(self, index: int) -> str | None:
        """Return how a line ended; None while it has not."""
        position = int(self._reasons[index])
        return None if position == 255 else REASONS[position]

    def append(self, lines: Sequence[FinishedLine]) -> None:
        """Add finished lines, and return when they are on the disk; a line that is there already is left out."""
        fresh = {line.index: line for line in lines if self.reason(line.index) is None}
        if not fresh:
            return
        records = np.zeros(len(fresh), RECORD)
        self._lines.seek(self._size)
        self._index.seek(0, os.SEEK_END)
        size = self._size
        for record, line in zip(records, fresh.values(), strict=True):
            _fill(record, line, size)
            self._lines.write(line.output)
            size += len(line.output)
        _sync(self._lines)
        self._index.write(records.tobytes())
        _sync(self._index)
        self._size = size
        self._reasons[records["index"]] = records["reason"]

    def close(self) -> None:
        """Close both files."""
        self._lines.close()
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(directory: BatchDirectory, num_lines: int | None = None) -> NDArray[np.void]:
    """Return the whole records of a journal, in the order in which lines finished; none where there is no journal.

    Raises:
        BatchFilesDamaged: they cannot be of a batch of num_lines (any number by default), or their bytes are gone.
    """
    try:
        raw = directory.finished_index.read_bytes()
    except FileNotFoundError:
        return np.zeros(0, RECORD)
    records = np.frombuffer(raw, RECORD, len(raw) // RECORD.itemsize)
    if not len(records):
        return records
    too_far = num_lines is not None and int(records["index"].max()) >= num_lines
    if too_far or len(np.unique(records["index"])) != len(records):
        raise BatchFilesDamaged(directory.finished_index, f"does not belong to a batch of {num_lines} lines")
    end = int(records["offset"][-1] + records["size"][-1])
    if directory.finished_lines.stat().st_size < end:
        raise BatchFilesDamaged(directory.finished_lines, f"has fewer than the {end} bytes that are recorded")
    return records


def lines_in_flight(directory: BatchDirectory, record: BatchRecord) -> list[int]:
    """Return the lines that were fed and whose results are not on the disk."""
    finished = frozenset(read_records(directory, record.total)["index"].tolist())
    return [index for index in range(record.cursor) if index not in finished]


def finished_in_order(directory: BatchDirectory, num_lines: int) -> Iterator[tuple[int, str, bytes]]:
    """Yield index, reason and output of every finished line, by index; one line in memory at a time."""
    records = read_records(directory, num_lines)
    if not len(records):
        return
    with directory.finished_lines.open("rb") as lines:
        for position in np.argsort(records["index"], kind="stable"):
            record = records[position]
            lines.seek(int(record["offset"]))
            yield int(record["index"]), REASONS[int(record["reason"])], lines.read(int(record["size"]))


def _open(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return cast("BinaryIO", os.fdopen(descriptor, "r+b"))


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _fill(record: np.void, line: FinishedLine, offset: int) -> None:
    record["index"] = line.index
    record["reason"] = REASONS.index(line.reason)
    record["offset"] = offset
    record["size"] = len(line.output)
    record["prompt_tokens"] = line.prompt_tokens
    record["output_tokens"] = line.output_tokens
    record["draft_tokens"] = line.draft_tokens
    record["accepted_tokens"] = line.accepted_tokens
    record["ttft_us"] = _bounded(line.ttft_us)
    record["latency_us"] = _bounded(line.latency_us)
    record["phases_us"] = [_bounded(phase) for phase in line.phases_us]


def _bounded(time_us: int | None) -> int:
    """Return a time as the record can hold it: up to 71 minutes, or NOT_YET."""
    return NOT_YET if time_us is None else min(max(time_us, 0), NOT_YET - 1)
