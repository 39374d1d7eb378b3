"""An open GGUF file (llama.cpp's model format): its metadata, its tensors, and their bytes through a memory map.

Owns the map, and the checks that make the rest safe to read: opening a file proves that its header and all of its
tensor data are there. Strings are decoded when asked for: a vocabulary has a hundred thousand of them, and most
readers want a handful of numbers. Knows nothing about what keys mean or which models can be served.

    magic "GGUF" | version u32 | num_tensors u64 | num_pairs u64
    pairs:   key string | value
    tensors: name, dimensions, type, offset
    padding to general.alignment (32) | tensor data; offsets count from here

Source: docs/gguf.md of ggml.
"""

import mmap
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from stages.gguf.cursor import Cursor, Value
from stages.gguf.errors import GgufError, GgufUnreadable, UnsupportedModelError
from stages.gguf.tensors import TENSOR_TYPES, TensorInfo, read_tensor

MAGIC: Final = b"GGUF"
VERSION: Final = 3  # since August 2023; converters have written nothing else from then on
DEFAULT_ALIGNMENT: Final = 32
MAX_ALIGNMENT: Final = 1 << 20


class GgufFile:
    """Use as a context manager; views of tensor data keep their bytes mapped beyond it.

    Attributes:
        path: Where the file lies.
        tensors: What the header says of each tensor, by name, in the order of the file.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file and check it; reads no tensor.

        Raises:
            GgufUnreadable: It is not there, foreign, cut short or damaged.
            UnsupportedModelError: A tensor has a format whose size we do not know.
        """
        data = _map(path)
        try:
            return cls(path, data)
        except GgufError:
            data.close()
            raise

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        """Take over a map; `open` is what callers use."""
        cursor = Cursor(path, data)
        _check_version(cursor)
        num_tensors, num_pairs = cursor.u64(), cursor.u64()
        self.path = path
        self._data = data
        self._positions = _read_positions(cursor, num_pairs)
        self.tensors = MappingProxyType(_read_tensors(cursor, num_tensors))
        alignment = self._alignment()
        self._data_start = -(-cursor.position // alignment) * alignment
        for tensor in self.tensors.values():
            self._check_extent(tensor)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key of the metadata, in the order of the file."""
        return tuple(self._positions)

    def value(self, key: str) -> Value | None:
        """Return the value of a key, an array as a tuple; None where the file does not have it.

        Raises:
            GgufUnreadable: A string in it is not UTF-8.
        """
        position = self._positions.get(key)
        return None if position is None else Cursor(self.path, self._data, position).value(key)

    def tensor_data(self, tensor: TensorInfo) -> memoryview:
        """Return the bytes of one of `tensors`, as they are stored, without copying them."""
        start = self._data_start + tensor.offset
        return memoryview(self._data)[start : start + tensor.num_bytes]

    def close(self) -> None:
        """Unmap the file, or leave that to the last view of its tensors."""
        with suppress(BufferError):
            self._data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _alignment(self) -> int:
        alignment = self.value("general.alignment")
        if alignment is None:
            return DEFAULT_ALIGNMENT
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise GgufUnreadable(self.path, f"is damaged: general.alignment is {alignment!r:.80}, not a power of two")
        return alignment

    def _check_extent(self, tensor: TensorInfo) -> None:
        if tensor.type_id not in TENSOR_TYPES:
            raise UnsupportedModelError(self.path, f"tensor {tensor.name} is of a format not known, {tensor.type_name}")
        end = self._data_start + tensor.offset + tensor.num_bytes
        if end > len(self._data):
            raise GgufUnreadable(
                self.path, f"is cut short: it has {len(self._data)} bytes, tensor {tensor.name} ends at byte {end}"
            )


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes, without opening it.

    Raises:
        GgufUnreadable: Nothing is there, or something that is not a file.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise _cannot_be_read(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise GgufUnreadable(path, "is not a file")
    return status.st_size


def _map(path: Path) -> mmap.mmap:
    if regular_size(path) == 0:
        raise GgufUnreadable(path, "is cut short: it has 0 bytes")
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: emptied since
        raise _cannot_be_read(path, error) from error


def _cannot_be_read(path: Path, error: OSError | ValueError) -> GgufUnreadable:
    return GgufUnreadable(path, f"cannot be read: {getattr(error, 'strerror', None) or error}")


def _check_version(cursor: Cursor) -> None:
    magic = cursor.take(len(MAGIC))
    if magic != MAGIC:
        raise cursor.unreadable(f"is not a GGUF file: it starts with {magic!r}")
    version = cursor.u32()
    if version == VERSION << 24:
        raise cursor.unreadable("is a big-endian GGUF file; only little-endian ones can be read")
    if version != VERSION:
        raise cursor.unreadable(f"is GGUF version {version}; only version {VERSION} can be read")


def _read_positions(cursor: Cursor, num_pairs: int) -> dict[str, int]:
    """Where the value of each key starts."""
    positions: dict[str, int] = {}
    for _ in range(num_pairs):
        key = cursor.string("a key")
        if key in positions:
            raise cursor.unreadable(f"is damaged: it has the key {key!r:.80} twice")
        positions[key] = cursor.position
        cursor.skip_value(key)
    return positions


def _read_tensors(cursor: Cursor, num_tensors: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):  # not over a claimed count in one go: each turn must find its bytes
        tensor = read_tensor(cursor)
        if tensor.name in tensors:
            raise cursor.unreadable(f"is damaged: it has the tensor {tensor.name!r:.80} twice")
        tensors[tensor.name] = tensor
    return tensors
