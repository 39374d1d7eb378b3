"""No rounding: fp32 codes and a scale of one, to measure what the other codecs cost and to debug them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_store.codecs.base import Codes, Rows, Scales


class Raw:
    """The identity."""

    name = "raw"
    codec_id = 0
    code_dtype = np.dtype(np.float32)
    packed_scale_dtype = np.dtype(np.float32)

    def derive_scales(self, rows: Rows) -> Scales:
        """Ones."""
        return np.ones(rows.shape[:-1], np.float32)

    def encode(self, rows: Rows, scales: Scales) -> Codes:  # noqa: ARG002  the seam's signature
        """The rows themselves."""
        return rows.astype(np.float32)

    def decode(self, codes: Codes, scales: Scales) -> Rows:  # noqa: ARG002  the seam's signature
        """The codes themselves."""
        return codes.astype(np.float32)

    def pack_scales(self, scales: Scales) -> NDArray[Any]:
        """As they are."""
        return scales

    def unpack_scales(self, packed: NDArray[Any]) -> Scales:
        """As they are."""
        return packed.astype(np.float32)
