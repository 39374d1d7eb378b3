"""A position in the header of a GGUF file, and the types a header is made of.

Owns the encoding below. Every length is checked against the bytes that are there before it is used, so a damaged
file costs a sentence and never the memory it claims. Knows nothing about what keys and tensors mean.

    string = u64 num_bytes | UTF-8
    value  = u32 type | number, bool (one byte), string or array
    array  = u32 element type | u64 length | elements; arrays do not nest

All little endian. Source: docs/gguf.md of ggml; llama.cpp refuses nested arrays as well.
"""

import mmap
import struct
from pathlib import Path
from typing import Final

from stages.gguf.errors import GgufUnreadable

Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...]

MAX_STRING_BYTES: Final = 1 << 24  # the longest we know of, a chat template, is 100 kB
_STRING: Final = 8
_ARRAY: Final = 9
# Type number -> the letter of the struct module.
_LETTERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


class Cursor:
    """Reads forward and cannot leave the file; what would reach past its end becomes GgufUnreadable."""

    def __init__(self, path: Path, data: mmap.mmap, position: int = 0) -> None:
        self._path = path
        self._data = data
        self.position = position

    def unreadable(self, problem: str) -> GgufUnreadable:
        """Return the error for this file."""
        return GgufUnreadable(self._path, problem)

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes."""
        start = self.position
        self.skip(num_bytes)
        return self._data[start : self.position]

    def skip(self, num_bytes: int) -> None:
        """Step over bytes that must be there."""
        if num_bytes > len(self._data) - self.position:
            raise self._cut_short(num_bytes)
        self.position += num_bytes

    def u32(self) -> int:
        """Return a 32-bit length or type."""
        return _U32.unpack(self.take(_U32.size))[0]

    def u64(self) -> int:
        """Return a 64-bit length, dimension or offset."""
        return _U64.unpack(self.take(_U64.size))[0]

    def string(self, what: str) -> str:
        """Return a string; `what` names it in an error."""
        start = self.position
        length = self.u64()
        if length > MAX_STRING_BYTES:
            raise self.unreadable(f"is damaged: {what} claims to be a string of {length} bytes at byte {start}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.unreadable(f"is damaged: {what} at byte {start} is not UTF-8") from error

    def value(self, key: str) -> Value:
        """Return the value of a key, an array as a tuple."""
        type_id = self.u32()
        if type_id != _ARRAY:
            return self._elements(key, type_id, 1)[0]
        element_type, length = self.u32(), self.u64()
        return self._elements(key, element_type, length)

    def skip_value(self, key: str) -> None:
        """Step over the value of a key, as strictly as `value`, but for the text of its strings."""
        type_id, length = self.u32(), 1
        if type_id == _ARRAY:
            type_id, length = self.u32(), self.u64()
        if type_id == _STRING:
            self._skip_strings(length)
        else:
            self.skip(length * struct.calcsize(self._letter(key, type_id)))

    def _elements(self, key: str, type_id: int, length: int) -> tuple[Scalar, ...]:
        if type_id == _STRING:
            # Grown one by one: a damaged length must run into the end of the file, not into the memory limit.
            strings: list[str] = []
            for _ in range(length):
                strings.append(self.string(key))  # noqa: PERF401
            return tuple(strings)
        letter = self._letter(key, type_id)
        return struct.unpack(f"<{length}{letter}", self.take(length * struct.calcsize(letter)))

    def _skip_strings(self, length: int) -> None:
        # The bulk of a header is the strings of its vocabulary, so this loop makes no call per string but one.
        data, position = self._data, self.position
        last = len(data) - _U64.size
        for _ in range(length):
            if position > last:
                break
            position += _U64.size + _U64.unpack_from(data, position)[0]
        else:
            self.skip(position - self.position)
            return
        raise self._cut_short(position + _U64.size - self.position)

    def _letter(self, key: str, type_id: int) -> str:
        letter = _LETTERS.get(type_id)
        if letter is None:
            raise self.unreadable(f"is damaged: {key!r:.80} has a value of type {type_id} at byte {self.position}")
        return letter

    def _cut_short(self, num_bytes: int) -> GgufUnreadable:
        return self.unreadable(
            f"is cut short: it has {len(self._data)} bytes, its header needs {num_bytes} more at byte {self.position}"
        )
