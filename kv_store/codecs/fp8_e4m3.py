"""FP8 e4m3 with a power-of-two scale per row: 8.125 bits an element at head_dim 64.

A code is sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN and never produced; the largest
finite value is 448 (OCP 8-bit floating point specification, revision 1.0). The scale is the smallest power of two
that brings the row to at most 448, so dividing by it is exact and the stored scale is one exponent byte.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_store.codecs.base import Codes, Rows, Scales, row_maximum

LARGEST = np.float32(448.0)
# Rows below 448 * 2^-100 share one scale: their products with anything vanish, and 2^-100 keeps the arithmetic normal.
SMALLEST_EXPONENT = -100
LARGEST_EXPONENT = 119  # 448 * 2^119 is the largest binade fp32 still holds
EXPONENT_BIAS = 127


class Fp8E4m3:
    """The default codec."""

    name = "fp8_e4m3"
    codec_id = 1
    code_dtype = np.dtype(np.uint8)
    packed_scale_dtype = np.dtype(np.uint8)

    def derive_scales(self, rows: Rows) -> Scales:
        """Smallest power of two s with max|row| / s <= 448; 1 for a row of zeros."""
        maximum = row_maximum(rows)
        mantissa, exponent = np.frexp(maximum)  # maximum = mantissa * 2^exponent, mantissa in [0.5, 1)
        # 448 = 0.875 * 2^9: maximum / 2^k <= 448 from k = exponent - 9 on if mantissa <= 0.875, else from one later.
        exponent = exponent - 9 + (mantissa > np.float32(0.875))
        exponent = np.clip(exponent, SMALLEST_EXPONENT, LARGEST_EXPONENT)
        return np.where(maximum == 0, np.float32(1), np.ldexp(np.float32(1), exponent)).astype(np.float32)

    def encode(self, rows: Rows, scales: Scales) -> Codes:
        """Round to nearest, ties to even."""
        scaled = (rows / scales[..., None]).astype(np.float32)
        bits = scaled.view(np.int32)
        magnitude = bits & 0x7FFFFFFF
        # Normal codes: keep 3 of fp32's 23 mantissa bits, rounding to even, and move the exponent bias from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 codes are multiples of 2^-9; 8 of them are the first normal code, so the carry is right too.
        subnormal = np.rint(np.abs(scaled) * np.float32(512)).astype(np.int32)
        code = np.where(np.abs(scaled) < np.float32(2.0**-6), subnormal, normal)
        return (code | ((bits >> 24) & 0x80)).astype(np.uint8)

    def decode(self, codes: Codes, scales: Scales) -> Rows:
        """Exact: a code has four significant bits and the scale is a power of two."""
        return VALUE_OF_CODE[codes.astype(np.uint8)] * scales[..., None]

    def pack_scales(self, scales: Scales) -> NDArray[Any]:
        """The biased exponent, as in OCP e8m0."""
        return (scales.view(np.int32) >> 23).astype(np.uint8)

    def unpack_scales(self, packed: NDArray[Any]) -> Scales:
        """Inverse of pack_scales."""
        return (packed.astype(np.int32) << 23).view(np.float32)


def _value_of_code() -> NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    return np.where(code & 0x80, -value, value).astype(np.float32)


VALUE_OF_CODE = _value_of_code()
"""What each of the 256 codes stands for at scale 1, in fp32; NaN where there is none."""
