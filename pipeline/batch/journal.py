"""The lines of a batch that are finished: appended as they come, put in order at the end.

Owns finished.lines (output lines, one after the other) and finished.index (fixed records: whose each is, and
its figures). A line counts from the moment its record is on the disk, and it gets there after its bytes. Records
follow one another without a gap: from the first one on that does not, or whose bytes are not there, all are what a
crash left, and are cut off. So no line is ever half there or there twice.
Whoever appends holds the directory's lock. Knows nothing about queues.
"""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

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
        self._size = int(records["offset"][-1] + records["size"][-1]) if len(records) else 0
        self._num_records = len(records)
        self._exit = ExitStack()
        self._lines = self._exit.enter_context(_open(directory.finished_lines))
        self._index = self._exit.enter_context(_open(directory.finished_index))
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
        size = self._size
        for record, line in zip(records, fresh.values(), strict=True):
            _fill(record, line, size)
            size += len(line.output)
        _write(self._lines, b"".join(line.output for line in fresh.values()), self._size)
        _write(self._index, records.tobytes(), self._num_records * RECORD.itemsize)
        self._size = size
        self._num_records += len(records)
        self._reasons[records["index"]] = records["reason"]

    def close(self) -> None:
        """Close both files."""
        self._exit.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(directory: BatchDirectory, num_lines: int | None = None) -> NDArray[np.void]:
    """Return the records of a journal, in the order in which lines finished; none where there is no journal.

    Raises:
        BatchFilesDamaged: they cannot be of a batch of num_lines (any number by default).
    """
    try:
        raw = directory.finished_index.read_bytes()
        num_bytes = directory.finished_lines.stat().st_size
    except FileNotFoundError:
        return np.zeros(0, RECORD)
    records = np.frombuffer(raw, RECORD, len(raw) // RECORD.itemsize)
    ends = np.cumsum(records["size"], dtype=np.uint64)
    whole = (records["offset"] + records["size"] == ends) & (records["size"] > 0) & (ends <= num_bytes)
    records = records[: len(records) if whole.all() else int(np.argmin(whole))]
    too_far = num_lines is not None and len(records) and int(records["index"].max()) >= num_lines
    if too_far or len(np.unique(records["index"])) != len(records) or (records["reason"] >= len(REASONS)).any():
        raise BatchFilesDamaged(directory.finished_index, f"does not belong to a batch of {num_lines} lines")
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


def _open(path: Path) -> io.FileIO:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return io.FileIO(descriptor, "r+")  # without a buffer, which a full disk would leave for close() to write


def _write(file: io.FileIO, data: bytes, offset: int) -> None:
    """Write all of it from an offset on, and wait for the disk."""
    file.seek(offset)
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
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
