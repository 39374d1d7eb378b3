"""One tensor as the header of a GGUF file describes it, and the sizes of ggml's block formats.

Knows which formats exist, not which can be served, and nothing about what is inside a block.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from stages.gguf.cursor import Cursor

MAX_DIMS: Final = 4  # of ggml


class TensorType(NamedTuple):
    """A block format of ggml."""

    name: str
    block_elements: int
    block_bytes: int


# Source: ggml.h and ggml-common.h; the gaps are formats that ggml has given up.
TENSOR_TYPES: Final = MappingProxyType({
    0: TensorType("F32", 1, 4), 1: TensorType("F16", 1, 2), 2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20), 6: TensorType("Q5_0", 32, 22), 7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34), 9: TensorType("Q8_1", 32, 40), 10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110), 12: TensorType("Q4_K", 256, 144), 13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210), 15: TensorType("Q8_K", 256, 292), 16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74), 18: TensorType("IQ3_XXS", 256, 98), 19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18), 21: TensorType("IQ3_S", 256, 110), 22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136), 24: TensorType("I8", 1, 1), 25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4), 27: TensorType("I64", 1, 8), 28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56), 30: TensorType("BF16", 1, 2), 34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66), 39: TensorType("MXFP4", 32, 17), 40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and how it is stored.

    Attributes:
        name: As in the file, with its suffix `.weight`.
        type_id: ggml's number of the block format.
        dims: Elements per dimension, the innermost first.
        offset: Bytes from the start of the tensor data.
    """

    name: str
    type_id: int
    dims: tuple[int, ...]
    offset: int

    @property
    def type_name(self) -> str:
        """The format as llama.cpp spells it, for people."""
        known = TENSOR_TYPES.get(self.type_id)
        return known.name if known else f"type {self.type_id}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension, the outermost first, as arrays have it."""
        return self.dims[::-1]

    @property
    def row_bytes(self) -> int:
        """Size of one row, which is a whole number of blocks; KeyError for a format that is not known."""
        known = TENSOR_TYPES[self.type_id]
        return self.dims[0] // known.block_elements * known.block_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the data; KeyError for a format that is not known."""
        return math.prod(self.dims[1:]) * self.row_bytes


def read_tensor(cursor: Cursor) -> TensorInfo:
    """Return the next tensor of a header.

        name string | num_dims u32 | dims u64... | type u32 | offset u64

    Raises:
        GgufUnreadable: The header ends within it, or it describes what cannot be.
    """
    name, num_dims = cursor.string("the name of a tensor"), cursor.u32()
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.unreadable(f"is damaged: tensor {name!r:.80} has {num_dims} dimensions")
    dims = tuple(cursor.u64() for _ in range(num_dims))
    if not all(dims):
        raise cursor.unreadable(f"is damaged: tensor {name!r:.80} has a dimension of 0")
    info = TensorInfo(name=name, dims=dims, type_id=cursor.u32(), offset=cursor.u64())
    known = TENSOR_TYPES.get(info.type_id)
    if known and dims[0] % known.block_elements:
        raise cursor.unreadable(f"is damaged: tensor {name!r:.80} has rows of {dims[0]} elements, not whole blocks")
    return info
