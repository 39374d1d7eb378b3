"""The header of a GGUF file: which tensors it has and where, without reading one.

Knows the byte layout of version 3 and nothing about which models can be served. Every length is checked
against the file's size before it is used, so a damaged file costs a message and never the memory it claims.

    magic "GGUF" | version u32 | num_tensors u64 | num_pairs u64
    pairs:   key string | type u32 | value                  string = length u64 | bytes
    tensors: name string | num_dims u32 | dims u64... | type u32 | offset u64
    padding to general.alignment (32) | tensor data; offsets count from here

Source: docs/gguf.md of ggml.
"""

import math
from dataclasses import dataclass
from typing import BinaryIO

MAGIC = b"GGUF"
VERSION = 3
MAX_DIMS = 4  # of ggml
MAX_STRING_BYTES = 1 << 24  # the longest we know of, a chat template, is 100 kB
MAX_ARRAY_DEPTH = 4  # arrays may nest; nobody does
MAX_ALIGNMENT = 1 << 20

_U32, _STRING, _ARRAY = 4, 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

_FIRST_TYPES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K "
    "IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"
)
_TYPE_NAMES = dict(enumerate(_FIRST_TYPES.split())) | {
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
_BLOCKS = {"F32": (1, 4), "Q4_1": (32, 20), "Q8_0": (32, 34)}  # elements and bytes of one block


class HeaderError(ValueError):
    """The bytes are not a whole GGUF header of version 3; the text says what is wrong, as in 'is ...'."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header describes it; `offset` counts from `GgufHeader.data_offset`."""

    name: str
    type_id: int
    dims: tuple[int, ...]
    """Innermost first."""
    offset: int

    @property
    def type_name(self) -> str:
        """As llama.cpp spells it, for people."""
        return _TYPE_NAMES.get(self.type_id, f"type {self.type_id}")

    def num_bytes(self) -> int:
        """Return the size of the data; the type must be one that can be served (KeyError otherwise)."""
        block_elements, block_bytes = _BLOCKS[self.type_name]
        if self.dims[0] % block_elements:
            raise HeaderError(f"is damaged: tensor {self.name} has rows of {self.dims[0]} elements, not whole blocks")
        return math.prod(self.dims) // block_elements * block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The parts of a header that decide whether a file can be served."""

    architecture: str | None
    tensors: tuple[TensorInfo, ...]
    data_offset: int


def read_header(file: BinaryIO, file_bytes: int) -> GgufHeader:
    """Return the header of a file opened at its start, or raise HeaderError."""
    reader = _Reader(file, file_bytes)
    _check_magic(reader)
    num_tensors, num_pairs = reader.u64(), reader.u64()
    architecture, alignment = None, 32
    for _ in range(num_pairs):
        key, value_type = reader.string(), reader.u32()
        if key == "general.architecture" and value_type == _STRING:
            architecture = reader.string()
        elif key == "general.alignment" and value_type == _U32:
            alignment = reader.u32()
        else:
            _skip_value(reader, value_type, depth=0)
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise HeaderError(f"is damaged: general.alignment is {alignment}, not a power of two")
    tensors: list[TensorInfo] = []
    for _ in range(num_tensors):  # not a comprehension over a claimed count: each turn must find its bytes
        tensors.append(_tensor(reader))  # noqa: PERF401
    return GgufHeader(architecture, tuple(tensors), -(-reader.position // alignment) * alignment)


def _check_magic(reader: "_Reader") -> None:
    magic = reader.take(4)
    if magic != MAGIC:
        raise HeaderError(f"is not a GGUF file: it starts with {magic!r}")
    version = reader.u32()
    if version == VERSION << 24:
        raise HeaderError("is a big-endian GGUF file; only little-endian ones can be read")
    if version != VERSION:
        raise HeaderError(f"is GGUF version {version}; only version {VERSION} can be read")


def _tensor(reader: "_Reader") -> TensorInfo:
    name, num_dims = reader.string(), reader.u32()
    if not 1 <= num_dims <= MAX_DIMS:
        raise HeaderError(f"is damaged: tensor {name!r:.80} has {num_dims} dimensions")
    dims = tuple(reader.u64() for _ in range(num_dims))
    if not all(dims):
        raise HeaderError(f"is damaged: tensor {name!r:.80} has a dimension of 0")
    return TensorInfo(name=name, dims=dims, type_id=reader.u32(), offset=reader.u64())


def _skip_value(reader: "_Reader", value_type: int, depth: int) -> None:
    if value_type in _SCALAR_BYTES:
        reader.skip(_SCALAR_BYTES[value_type])
    elif value_type == _STRING:
        reader.skip(reader.u64())
    elif value_type == _ARRAY and depth < MAX_ARRAY_DEPTH:
        element_type, length = reader.u32(), reader.u64()
        if element_type in _SCALAR_BYTES:
            reader.skip(length * _SCALAR_BYTES[element_type])
        else:
            for _ in range(length):
                _skip_value(reader, element_type, depth + 1)
    else:
        raise HeaderError(f"is damaged: a metadata value has type {value_type} at byte {reader.position}")


class _Reader:
    """A cursor that cannot leave the file."""

    def __init__(self, file: BinaryIO, file_bytes: int) -> None:
        self._file = file
        self._file_bytes = file_bytes
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        self._claim(num_bytes)
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise HeaderError(f"became shorter while it was read, at byte {self.position}")
        return data

    def skip(self, num_bytes: int) -> None:
        self._claim(num_bytes)
        self._file.seek(self.position)

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        length = self.u64()
        if length > MAX_STRING_BYTES:
            raise HeaderError(f"is damaged: it claims a name of {length} bytes at byte {self.position}")
        return self.take(length).decode("utf-8", errors="replace")

    def _claim(self, num_bytes: int) -> None:
        if num_bytes > self._file_bytes - self.position:
            raise HeaderError(
                f"is cut short: it has {self._file_bytes} bytes, its header needs "
                f"{num_bytes} more at byte {self.position}"
            )
        self.position += num_bytes
