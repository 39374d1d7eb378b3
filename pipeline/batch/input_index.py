"""Where each request of a batch's input is: made in one pass, then any line is one read away.

Owns the file input.index, an array of fixed records. With it a batch of any size needs no memory for its input,
and goes on at a line instead of at the start. Knows nothing about what lines mean beyond their custom_id.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from pipeline.batch.errors import BatchFilesDamaged, InputChanged
from pipeline.batch.lines import MAX_LINE_BYTES, BatchLine, BatchLineError, custom_id_of, parse_line, without_bom

# little-endian, packed: 40 bytes
ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("size", "<u4"),  # of the line with its end; 0 for one that is too long
        ("line_number", "<u4"),  # from 1, blank lines counted
        ("crc32", "<u4"),
        ("first", "<u4"),  # line number of the first line with the same custom_id; 0 where this is it
        ("id_high", "<u8"),  # digest of the custom_id in two halves; zero where there is none
        ("id_low", "<u8"),
    ]
)
_PAGE = 4096  # entries written at a time


@dataclass(frozen=True, slots=True)
class InputSummary:
    """What one pass over the input found."""

    num_lines: int
    """Lines that are not blank."""
    sha256: str


def summarise(source: Path, tick: Callable[[], None] = lambda: None) -> InputSummary:
    """Read the input once and return its size and hash; `tick` is called now and then and may raise."""
    digest, num_lines = hashlib.sha256(), 0
    with source.open("rb") as file:
        for line_number, (_, _, is_blank) in enumerate(_lines(file, digest.update), start=1):
            num_lines += not is_blank
            if line_number % _PAGE == 0:
                tick()
    return InputSummary(num_lines, digest.hexdigest())


def build_index(source: Path, index: Path, tick: Callable[[], None] = lambda: None) -> InputSummary:
    """Write the index of the input, whole or not at all; `tick` is called now and then and may raise.

    Raises:
        OSError: the input cannot be read or the index not be written.
    """
    temporary = index.with_suffix(".new")
    try:
        summary = _write_index(source, temporary, tick)
        _mark_duplicates(temporary, summary.num_lines)
        temporary.replace(index)
    finally:
        temporary.unlink(missing_ok=True)
    return summary


class InputLines:
    """An open input with its index."""

    def __init__(self, source: Path, index: Path) -> None:
        """Open both.

        Raises:
            BatchFilesDamaged: the index is not one.
            OSError: one of them is gone.
        """
        self._source = source
        size = index.stat().st_size
        if size % ENTRY.itemsize:
            raise BatchFilesDamaged(index, f"has {size} bytes, which is not a multiple of {ENTRY.itemsize}")
        self._entries = np.memmap(index, ENTRY, "r") if size else np.zeros(0, ENTRY)
        self._file = source.open("rb")

    def __len__(self) -> int:
        return len(self._entries)

    def line_number(self, index: int) -> int:
        """Return the number of a line in its file, from 1."""
        return int(self._entries[index]["line_number"])

    def read(self, index: int, model: str) -> BatchLine | BatchLineError:
        """Return one request, or what is wrong with it.

        Raises:
            InputChanged: the line is not the one that was indexed.
        """
        entry = self._entries[index]
        line_number, size = int(entry["line_number"]), int(entry["size"])
        raw: bytes | None = None
        if size:
            self._file.seek(int(entry["offset"]))
            raw = self._file.read(size)
            if len(raw) != size or zlib.crc32(raw) != int(entry["crc32"]):
                raise InputChanged(self._source, f" (line {line_number})")
            raw = without_bom(line_number, raw)
        return parse_line(line_number, raw, model, int(entry["first"]) or None)

    def close(self) -> None:
        """Close the input."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write_index(source: Path, index: Path, tick: Callable[[], None]) -> InputSummary:
    digest, num_lines = hashlib.sha256(), 0
    descriptor = os.open(index, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with source.open("rb") as file, os.fdopen(descriptor, "wb") as out:
        page = np.zeros(_PAGE, ENTRY)
        filled, offset = 0, 0
        for line_number, (size, raw, is_blank) in enumerate(_lines(file, digest.update), start=1):
            if not is_blank:
                page[filled] = _entry(offset, size, line_number, raw)
                filled, num_lines = filled + 1, num_lines + 1
            offset += size
            if filled == _PAGE:
                out.write(page.tobytes())
                filled = 0
                tick()
        out.write(page[:filled].tobytes())
        tick()
    return InputSummary(num_lines, digest.hexdigest())


def _lines(file: BinaryIO, saw: Callable[[bytes], None]) -> Iterator[tuple[int, bytes | None, bool]]:
    """Yield each line's size in bytes, its bytes (None for one that is too long), and whether it is blank."""
    line_number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        saw(raw)
        line_number += 1
        size, too_long = len(raw), len(raw) > MAX_LINE_BYTES
        while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            raw = file.readline(MAX_LINE_BYTES + 1)
            saw(raw)
            size += len(raw)
        yield size, None if too_long else raw, not too_long and not without_bom(line_number, raw).strip()


def _entry(offset: int, size: int, line_number: int, raw: bytes | None) -> tuple[object, ...]:
    if raw is None:
        return offset, 0, line_number, 0, 0, 0, 0
    return offset, size, line_number, zlib.crc32(raw), 0, *_custom_id_digest(without_bom(line_number, raw))


def _custom_id_digest(raw: bytes) -> tuple[int, int]:
    """Return a digest of the line's custom_id; zeros where it has none."""
    custom_id = custom_id_of(raw)
    if custom_id is None:
        return 0, 0
    digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _mark_duplicates(path: Path, num_lines: int) -> None:
    """Fill in `first` for every line whose custom_id an earlier one has."""
    if num_lines < 2:
        return
    entries = np.memmap(path, ENTRY, "r+")
    high, low = entries["id_high"], entries["id_low"]
    order = np.lexsort((low, high))  # stable: of equal ids the first line comes first
    high, low = high[order], low[order]
    repeats = (high[1:] == high[:-1]) & (low[1:] == low[:-1]) & ((high[1:] | low[1:]) != 0)
    group = np.concatenate(([0], np.cumsum(~repeats)))
    first_of_group = order[np.concatenate(([0], np.flatnonzero(~repeats) + 1))]
    doubles = np.flatnonzero(repeats) + 1
    entries["first"][order[doubles]] = entries["line_number"][first_of_group[group[doubles]]]
    entries.flush()
