"""Reads the metadata of a GGUF file (llama.cpp's model format), versions 2 and 3, little endian.

It owns the byte layout below and checks every length against the bytes that are there. It knows nothing
about what the keys mean, and never reads the tensors. The gguf package's own reader makes a numpy view of
every string of the vocabulary, which takes seconds; a worker should start faster than that.

    "GGUF" | u32 version | u64 num_tensors | u64 num_pairs | pairs... | tensor infos and data (not read)
    pair   = string key | u32 type | value
    string = u64 num_bytes | UTF-8
    array  = u32 element type | u64 length | elements

Source: docs/gguf.md of ggml.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stages.text.errors import VocabularyDamaged

Scalar = int | float | str
Value = Scalar | tuple[Scalar, ...]

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)  # version 1 had 32-bit lengths and lived for weeks
_STRING: Final = 8
_ARRAY: Final = 9
# Type number -> the letter of the struct module; a bool is one byte.
_LETTERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


def read_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, Value]:
    """Return the metadata whose key is wanted; the others are stepped over.

    Raises:
        VocabularyDamaged: The file cannot be opened, is not such a GGUF file, or ends within its metadata.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_pairs(_Cursor(path, data), wanted)
    except OSError as error:
        raise VocabularyDamaged(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # mmap's word for an empty file
        raise VocabularyDamaged(path, "is empty") from error


def _read_pairs(cursor: "_Cursor", wanted: Callable[[str], bool]) -> dict[str, Value]:
    if cursor.take(4) != MAGIC:
        raise cursor.damaged("is not a GGUF file: it does not start with the bytes 'GGUF'")
    if (version := cursor.unpack(_U32)) not in VERSIONS:
        raise cursor.damaged(f"is GGUF version {version}, expected 2 or 3 in little-endian order")
    cursor.unpack(_U64)  # how many tensors
    values: dict[str, Value] = {}
    for _ in range(cursor.unpack(_U64)):
        key = cursor.string("a key")
        number = cursor.unpack(_U32)
        value = cursor.value(key, number)
        if wanted(key):
            values[key] = value
    return values


class _Cursor:
    """A position in the file; whatever would reach past the end becomes an error that names the place."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = 0

    def damaged(self, problem: str) -> VocabularyDamaged:
        return VocabularyDamaged(self._path, problem)

    def take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > len(self._data):
            left = len(self._data) - self._position
            raise self.damaged(
                f"is cut short or damaged: {num_bytes} bytes wanted at byte {self._position}, {left} left"
            )
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def unpack(self, layout: struct.Struct) -> int:
        return layout.unpack(self.take(layout.size))[0]

    def string(self, what: str) -> str:
        start = self._position
        try:
            return self.take(self.unpack(_U64)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} at byte {start} is not UTF-8") from error

    def value(self, key: str, number: int) -> Value:
        if number == _ARRAY:
            return self._array(key)
        if number == _STRING:
            return self.string(key)
        return self._numbers(key, number, 1)[0]

    def _array(self, key: str) -> tuple[Scalar, ...]:
        number = self.unpack(_U32)
        length = self.unpack(_U64)
        if number == _STRING:
            return self._strings(key, length)
        return self._numbers(key, number, length)

    def _strings(self, key: str, length: int) -> tuple[str, ...]:
        # Grown one by one: a damaged length must run into the end of the file, not into the memory limit.
        strings: list[str] = []
        for _ in range(length):
            strings.append(self.string(key))  # noqa: PERF401
        return tuple(strings)

    def _numbers(self, key: str, number: int, length: int) -> tuple[Scalar, ...]:
        letter = _LETTERS.get(number)
        if letter is None:
            raise self.damaged(f"{key} has type {number}, which is none that a GGUF file may have here")
        data = self.take(length * struct.calcsize(f"<{letter}"))
        return struct.unpack(f"<{length}{letter}", data)
