"""The compiled scalar and vector primitives every kernel shares, and the flags they are compiled with.

Rules (docs/arithmetic.md): no fast-math, no fused multiply-add, sums in a written order. Loops whose iterations are
independent may use vector registers; sums run over `LANES` fixed partial sums. That makes a result the same bits for
any number of rows, threads and vector widths. Knows nothing about models.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

ARITHMETIC_VERSION = 1  # raise it whenever any kernel's bits change, with a new quality record

LANES = 16

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts, so that x - k ln 2 keeps its low bits (Cody and Waite).
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
# Minimax polynomial of e^f on |f| <= ln(2) / 2 (Cephes expf), about 1 unit in the last place.
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(5.0000001201e-1)
_ONE = np.float32(1)
# e^x stays a normal fp32 number between these two.
_EXP_LOW = np.float32(-87.0)
_EXP_HIGH = np.float32(88.0)
_EXPONENT_BIAS = np.int32(127)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile for one thread, cached on disk, without holding the interpreter lock."""
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


def compiled_parallel(function: Callable[..., Any]) -> Any:
    """Compile with `prange` over several threads; iterations must not share anything they write."""
    return numba.njit(cache=True, nogil=True, error_model="numpy", parallel=True)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile as a part of other kernels."""
    return numba.njit(cache=True, nogil=True, error_model="numpy", inline="never")(function)


@inlined
def exp_in_place(x, n, bits):
    """x[i] = e^x[i] for i < n, element by element. Shapes: x [>= n] fp32, bits [>= n] int32 scratch."""
    for i in range(n):
        v = min(max(x[i], _EXP_LOW), _EXP_HIGH)
        k = np.rint(v * _LOG2_E)
        f = v - k * _LN2_HIGH
        f = f - k * _LN2_LOW
        p = _C0 * f + _C1
        p = p * f + _C2
        p = p * f + _C3
        p = p * f + _C4
        p = p * f + _C5
        x[i] = (p * (f * f) + f) + _ONE
        bits[i] = np.int32((np.int32(k) + _EXPONENT_BIAS) << 23)
    powers = bits.view(np.float32)
    for i in range(n):
        x[i] *= powers[i]


@inlined
def largest_magnitude(x, n):
    """max |x[i]| for i < n; exact, so its order does not matter."""
    lanes = np.zeros(LANES, np.float32)
    whole = n - n % LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], abs(x[start + lane]))
    largest = np.float32(0)
    for lane in range(LANES):
        largest = max(largest, lanes[lane])
    for i in range(whole, n):
        largest = max(largest, abs(x[i]))
    return largest


@inlined
def sum_of_squares(x, n):
    """Sum of x[i]^2: lane i % 16 first, then lanes 0 to 15, then the rest."""
    lanes = np.zeros(LANES, np.float32)
    whole = n - n % LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            v = x[start + lane]
            lanes[lane] += v * v
    total = np.float32(0)
    for lane in range(LANES):
        total += lanes[lane]
    for i in range(whole, n):
        total += x[i] * x[i]
    return total


@inlined
def hadamard_in_place(x, size):
    """Unscaled fast Walsh-Hadamard transform of x[0:size], size a power of two; stages from stride 1 up."""
    stride = 1
    while stride < size:
        for start in range(0, size, 2 * stride):
            for i in range(start, start + stride):
                a = x[i]
                b = x[i + stride]
                x[i] = a + b
                x[i + stride] = a - b
        stride *= 2
