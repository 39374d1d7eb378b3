"""The seam every KV codec fills: how a row of K or V becomes codes and one scale.

A row is the key or the value of one token in one kv head: `head_dim` numbers. Its scale and its codes are derived
once, from the unrounded row, when it enters the cache; both travel from then on and nobody derives them again.
The functions here are the specification: the engine's compiled kernels must agree with them bit for bit.
Knows nothing about pages, blobs or models.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8] | NDArray[np.int8] | NDArray[np.float32]
Scales = NDArray[np.float32]
Rows = NDArray[np.float32]


class Codec(Protocol):
    """One way to round rows."""

    @property
    def name(self) -> str:
        """How settings, headers and quality records call it."""
        ...

    @property
    def codec_id(self) -> int:
        """Its number in blob headers; never reused."""
        ...

    @property
    def code_dtype(self) -> np.dtype[Any]:
        """Element type of the codes."""
        ...

    @property
    def packed_scale_dtype(self) -> np.dtype[Any]:
        """Element type a scale is stored in; packing it is lossless."""
        ...

    def derive_scales(self, rows: Rows) -> Scales:
        """Scale of each row. Shapes: rows [..., D] -> [...]."""
        ...

    def encode(self, rows: Rows, scales: Scales) -> Codes:
        """Round rows with the scales they carry. Shapes: [..., D], [...] -> [..., D]."""
        ...

    def decode(self, codes: Codes, scales: Scales) -> Rows:
        """The rounded rows. Shapes: [..., D], [...] -> [..., D]."""
        ...

    def pack_scales(self, scales: Scales) -> NDArray[Any]:
        """Scales in their stored type, same shape."""
        ...

    def unpack_scales(self, packed: NDArray[Any]) -> Scales:
        """Inverse of pack_scales, exact."""
        ...


def row_maximum(rows: Rows) -> Scales:
    """Largest magnitude of each row. Shapes: [..., D] -> [...]."""
    return np.abs(rows).max(axis=-1).astype(np.float32)
