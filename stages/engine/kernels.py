"""Row kernels between the linear layers: norms, rotary embedding and cache writes, the gated unit, residuals.

Every kernel treats each row alone and in a fixed order. Linear layers want rows whose largest magnitude is 1, so
kernels that feed one divide by the row's maximum and hand the factor on as `scale`; kernels that consume a linear
layer's output multiply by it first. What enters a linear layer is also rotated (rotation.py): a Hadamard transform
inside blocks, left unscaled because the weights hold the factor, then a small matrix across blocks.

Letters: R rows, H query heads, KV kv heads, D head_dim, F intermediate size.
"""

import numpy as np
from numba import prange

from stages.engine.arithmetic import (
    compiled,
    compiled_parallel,
    exp_in_place,
    hadamard_in_place,
    inlined,
    largest_magnitude,
    sum_of_squares,
)
from stages.engine.row_rounding import row_code, row_scale

_ONE = np.float32(1)
_SMALLEST_MAXIMUM = np.float32(1e-30)  # a row of zeros divides by this and stays zero
# Below this many rows one thread is quicker than waking the others.
PARALLEL_ROWS = 8


@inlined
def _to_unit_maximum(x, n, out):
    """out = x / max|x|; returns max|x|."""
    maximum = max(largest_magnitude(x, n), _SMALLEST_MAXIMUM)
    factor = _ONE / maximum
    for i in range(n):
        out[i] = x[i] * factor
    return maximum


@inlined
def _add_row(residual, update, scale, n):
    for i in range(n):
        residual[i] += update[i] * scale


@inlined
def _mix(x, matrix, block, out):
    """out[i] = sum of matrix[i, j] * x[j], j ascending, i and j blocks. Shapes: [n * block], [n, n], [n * block]."""
    for i in range(len(matrix)):
        first = i * block
        for t in range(block):
            out[first + t] = np.float32(0)
        for j in range(len(matrix)):
            factor = matrix[i, j]
            other = j * block
            for t in range(block):
                out[first + t] += factor * x[other + t]


@inlined
def _transform_to_unit(x, matrix, mixed, out):
    """Hadamard-transform the blocks of x in place, mix them, bring the result to maximum 1; returns that maximum."""
    size = len(x)
    block = size // len(matrix)
    for start in range(0, size, block):
        hadamard_in_place(x[start : start + block], block)
    _mix(x, matrix, block, mixed)
    return _to_unit_maximum(mixed, size, out)


@inlined
def _norm_row(x, weight, eps, matrix, weighted, mixed, out):
    """RMS norm, transformed and brought to maximum 1; returns the factor taken out."""
    size = len(x)
    root = np.sqrt(sum_of_squares(x, size) / np.float32(size) + eps)
    for i in range(size):
        weighted[i] = x[i] * weight[i]
    return _transform_to_unit(weighted, matrix, mixed, out) / root


def _norm(residual, weight, eps, matrix, out, scale):
    """out, scale = unit rows of the transformed rms_norm(residual).

    Shapes: residual [R, hidden], weight [hidden], matrix [m, m] for m blocks, out [R, hidden], scale [R].
    """
    size = residual.shape[1]
    for r in prange(len(residual)):
        weighted = np.empty(size, np.float32)
        mixed = np.empty(size, np.float32)
        scale[r] = _norm_row(residual[r], weight, eps, matrix, weighted, mixed, out[r])


def _add_norm(residual, update, update_scale, weight, eps, matrix, out, scale):
    """residual += update * update_scale, then as _norm."""
    size = residual.shape[1]
    for r in prange(len(residual)):
        weighted = np.empty(size, np.float32)
        mixed = np.empty(size, np.float32)
        _add_row(residual[r], update[r], update_scale[r], size)
        scale[r] = _norm_row(residual[r], weight, eps, matrix, weighted, mixed, out[r])


def _mixed_unit(x, matrix, out, scale):
    """out, scale = unit rows of x with its blocks mixed. Shapes: [R, n], [m, m], [R, n], [R]."""
    size = x.shape[1]
    for r in prange(len(x)):
        mixed = np.empty(size, np.float32)
        _mix(x[r], matrix, size // len(matrix), mixed)
        scale[r] = _to_unit_maximum(mixed, size, out[r])


def _gated_unit(gate_up, in_scale, matrix, out, scale):
    """out, scale = unit rows of the transformed silu(gate) * up.

    Shapes: gate_up [R, 2F], in_scale [R], matrix [m, m] for m blocks, out [R, F], scale [R].
    """
    size = out.shape[1]
    for r in prange(len(gate_up)):
        hidden = np.empty(size, np.float32)
        mixed = np.empty(size, np.float32)
        bits = np.empty(size, np.int32)
        row = gate_up[r]
        s = in_scale[r]
        for i in range(size):
            hidden[i] = -(row[i] * s)
        exp_in_place(hidden, size, bits)
        for i in range(size):
            hidden[i] = (row[i] * s) / (_ONE + hidden[i]) * (row[size + i] * s)
        scale[r] = _transform_to_unit(hidden, matrix, mixed, out[r])


@inlined
def _rotate(x, cosine, sine, half):
    """Rotary embedding of one head in place, halves apart."""
    for i in range(half):
        a = x[i]
        b = x[i + half]
        x[i] = a * cosine[i] - b * sine[i]
        x[i + half] = b * cosine[i] + a * sine[i]


@inlined
def _store_key(x, n, codes, scales, slot):
    """Round one key into its page, transposed: codes [D, 64], scales [64]."""
    scale = row_scale(codes, largest_magnitude(x, n))
    scales[slot] = scale
    for d in range(n):
        codes[d, slot] = row_code(codes, x[d], scale)


@inlined
def _store_value(x, n, codes, scales, slot):
    """Round one value into its page: codes [64, D], scales [64]."""
    scale = row_scale(codes, largest_magnitude(x, n))
    scales[slot] = scale
    for d in range(n):
        codes[slot, d] = row_code(codes, x[d], scale)


def _split_heads(
    qkv,
    in_scale,
    cosines,
    sines,
    positions,
    pages,
    layer,
    query_factor,
    query,
    keys,
    key_scales,
    values,
    value_scales,
):
    """Rotate q and k, write k and v to the cache in their canonical rounding, leave q for attention.

    Q and K are Hadamard-rotated inside each head after the rotary embedding: scores do not change, and the rounding of
    K loses its outliers. V is rotated too, by its weights. `query_factor` holds the softmax scale and the transform's.
    Shapes: qkv [R, (H + 2 KV) * D]; cosines, sines [positions, D / 2]; pages [R]; query [R, H, D];
    keys [P, L, KV, D, 64]; values [P, L, KV, 64, D]; scales [P, L, KV, 64].
    """
    num_heads, size = query.shape[1], query.shape[2]
    num_kv = keys.shape[2]
    half = size // 2
    key_factor = _ONE / np.sqrt(np.float32(size))
    for r in prange(len(qkv)):
        s = in_scale[r]
        position = positions[r]
        page = pages[r]
        slot = position % 64
        row = np.empty(size, np.float32)
        for h in range(num_heads):
            for d in range(size):
                row[d] = qkv[r, h * size + d] * s
            _rotate(row, cosines[position], sines[position], half)
            hadamard_in_place(row, size)
            for d in range(size):
                query[r, h, d] = row[d] * query_factor
        for h in range(num_kv):
            for d in range(size):
                row[d] = qkv[r, (num_heads + h) * size + d] * s
            _rotate(row, cosines[position], sines[position], half)
            hadamard_in_place(row, size)
            for d in range(size):
                row[d] *= key_factor
            _store_key(row, size, keys[page, layer, h], key_scales[page, layer, h], slot)
            for d in range(size):
                row[d] = qkv[r, (num_heads + num_kv + h) * size + d] * s
            _store_value(row, size, values[page, layer, h], value_scales[page, layer, h], slot)


class RowKernel:
    """One kernel compiled twice: for few rows on this thread, for many rows over all threads; same bits."""

    def __init__(self, function) -> None:
        self._few = compiled(function)
        self._many = compiled_parallel(function)

    def __call__(self, rows, *arguments) -> None:
        """Run over `rows` (its length chooses the variant)."""
        (self._many if len(rows) >= PARALLEL_ROWS else self._few)(rows, *arguments)


norm = RowKernel(_norm)
add_norm = RowKernel(_add_norm)
mixed_unit = RowKernel(_mixed_unit)
gated_unit = RowKernel(_gated_unit)
split_heads = RowKernel(_split_heads)
