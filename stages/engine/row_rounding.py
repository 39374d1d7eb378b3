"""Rounding rows into the KV cache and reading them back, compiled, one pair of functions per codec.

The compiled twins of `kv_store.codecs`: a test holds them to the same bits on every kind of input. Which pair is used
follows from the element type of the code array: uint8 is FP8 e4m3, int8 is int8, float32 is unrounded.
"""

import numpy as np
from numba import types
from numba.extending import overload

from kv_store.codecs.fp8_e4m3 import VALUE_OF_CODE
from stages.engine.arithmetic import inlined

_FP8_LARGEST_MANTISSA = np.int32(0x600000)  # 448 = 1.75 * 2^8: the mantissa bits of 1.75
_FP8_TOP_EXPONENT = np.int32(8)
_FP8_SMALLEST = np.int32(-100)
_FP8_LARGEST = np.int32(119)
_INT8_LARGEST = np.float32(127)
_INT8_SMALLEST_SCALE = np.float32(2.0**-100)
_ONE = np.float32(1)
_ZERO = np.float32(0)


@inlined
def _fp8_scale(maximum):
    """Smallest power of two that brings `maximum` to at most 448."""
    if maximum == _ZERO:
        return _ONE
    bits = np.float32(maximum).view(np.int32)
    exponent = (bits >> 23) - 127 - _FP8_TOP_EXPONENT
    if (bits & 0x7FFFFF) > _FP8_LARGEST_MANTISSA:
        exponent += 1
    exponent = min(max(exponent, _FP8_SMALLEST), _FP8_LARGEST)
    return np.int32((exponent + 127) << 23).view(np.float32)


@inlined
def _int8_scale(maximum):
    """maximum / 127 rounded up to a mantissa of 3 bits."""
    if maximum == _ZERO:
        return _ONE
    exact = max(maximum / _INT8_LARGEST, _INT8_SMALLEST_SCALE)
    bits = np.float32(exact).view(np.int32)
    return np.int32(((bits + 0xFFFFF) >> 20) << 20).view(np.float32)


@inlined
def _fp8_code(scaled):
    """e4m3 code of a number of magnitude at most 448; nearest, ties to even."""
    bits = np.float32(scaled).view(np.int32)
    magnitude = bits & 0x7FFFFFFF
    if abs(scaled) < np.float32(2.0**-6):
        code = np.int32(np.rint(abs(scaled) * np.float32(512)))
    else:
        code = np.int32(((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960)
    return np.uint8(code | ((bits >> 24) & 0x80))


def row_scale(codes, maximum):
    """Scale of a row whose largest magnitude is `maximum`, by the codec that `codes` belongs to."""
    raise NotImplementedError("compiled only")


def row_code(codes, value, scale):
    """Code of one number of a row with that scale."""
    raise NotImplementedError("compiled only")


def load_codes(codes, n, out):
    """out[i] = value of codes[i] at scale 1, for i < n."""
    raise NotImplementedError("compiled only")


@overload(row_scale, inline="always")
def _row_scale(codes, maximum):
    if codes.dtype == types.uint8:
        return lambda codes, maximum: _fp8_scale(maximum)
    if codes.dtype == types.int8:
        return lambda codes, maximum: _int8_scale(maximum)
    return lambda codes, maximum: _ONE


@overload(row_code, inline="always")
def _row_code(codes, value, scale):
    if codes.dtype == types.uint8:
        return lambda codes, value, scale: _fp8_code(value / scale)
    if codes.dtype == types.int8:
        return lambda codes, value, scale: np.int8(min(max(np.rint(value / scale), -_INT8_LARGEST), _INT8_LARGEST))
    return lambda codes, value, scale: value


@overload(load_codes, inline="never")
def _load_codes(codes, n, out):
    if codes.dtype == types.uint8:
        return _load_fp8
    return _load_plain


def _load_fp8(codes, n, out):
    # A table of 256 numbers stays in the first-level cache and beats taking codes apart, with and without AVX-512.
    for i in range(n):
        out[i] = VALUE_OF_CODE[codes[i]]


def _load_plain(codes, n, out):
    for i in range(n):
        out[i] = np.float32(codes[i])
