"""Attention over paged, rounded KV in which each query row stands alone.

Keys are taken in pages of 64 absolute positions. K is stored transposed inside a page ([D, 64]) and V as rows
([64, D]), so scores and outputs are element-wise updates that fill vector registers without reordering any sum.
Softmax is the online form (Milakov and Gimelshein, arXiv 1805.02867), page after page in order of position. Slots
after a row's own position are masked by position and never enter a sum, whatever they hold. Work is cut by row tile
and kv head only, so neither tiles nor threads change a bit. Letters: R rows, H query heads, G = H / KV, D head_dim.
"""

import numpy as np
from numba import prange

from kv_store.layout import PAGE_TOKENS
from stages.engine.arithmetic import compiled_parallel, exp_in_place, inlined
from stages.engine.row_rounding import load_codes

TILE_ROWS = 16  # rows that share one unpacked page; a page of K and V in fp32 and a tile's state fit in L1 + L2

_PAGE = PAGE_TOKENS
_LOWEST = np.float32(-1e30)
_ZERO = np.float32(0)
_ONE = np.float32(1)


@inlined
def _scores(query, keys, size, out):
    """out[t] = sum over d of query[d] * keys[d, t], d ascending. Shapes: [D], [D, 64], [64]."""
    for t in range(_PAGE):
        out[t] = _ZERO
    # Eight terms per pass over `out`: the same sum in the same order, with an eighth of its loads and stores.
    for d in range(0, size, 8):
        q0, q1, q2, q3 = query[d], query[d + 1], query[d + 2], query[d + 3]
        q4, q5, q6, q7 = query[d + 4], query[d + 5], query[d + 6], query[d + 7]
        k0, k1, k2, k3 = keys[d], keys[d + 1], keys[d + 2], keys[d + 3]
        k4, k5, k6, k7 = keys[d + 4], keys[d + 5], keys[d + 6], keys[d + 7]
        for t in range(_PAGE):
            s = out[t] + q0 * k0[t]
            s = s + q1 * k1[t]
            s = s + q2 * k2[t]
            s = s + q3 * k3[t]
            s = s + q4 * k4[t]
            s = s + q5 * k5[t]
            s = s + q6 * k6[t]
            out[t] = s + q7 * k7[t]


@inlined
def _accumulate(weights, values, n, size, out):
    """out[d] += sum over t < n of weights[t] * values[t, d], t ascending. Shapes: [64], [64, D], [D]."""
    whole = n - n % 4
    for t in range(0, whole, 4):  # as in _scores
        w0, w1, w2, w3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        v0, v1, v2, v3 = values[t], values[t + 1], values[t + 2], values[t + 3]
        for d in range(size):
            s = out[d] + w0 * v0[d]
            s = s + w1 * v1[d]
            s = s + w2 * v2[d]
            out[d] = s + w3 * v3[d]
    for t in range(whole, n):
        w = weights[t]
        row = values[t]
        for d in range(size):
            out[d] += w * row[d]


@inlined
def _attend_page(query, keys, key_scales, values, value_scales, n, size, state, out, scores, bits, one):
    """Fold the first n positions of a page into a query's running softmax. state: [maximum, sum]."""
    _scores(query, keys, size, scores)
    maximum = state[0]
    for t in range(n):
        scores[t] *= key_scales[t]
        maximum = max(maximum, scores[t])
    for t in range(n):
        scores[t] -= maximum
    exp_in_place(scores, n, bits)
    if maximum != state[0]:
        one[0] = state[0] - maximum
        exp_in_place(one, 1, bits)
        shrink = one[0]
        state[1] *= shrink
        for d in range(size):
            out[d] *= shrink
        state[0] = maximum
    total = state[1]
    for t in range(n):
        total += scores[t]
    state[1] = total
    for t in range(n):
        scores[t] *= value_scales[t]
    _accumulate(scores, values, n, size, out)


@inlined
def _unpack_page(keys, values, size, key_rows, value_rows):
    count = size * _PAGE
    load_codes(keys.reshape(count), count, key_rows.reshape(count))
    load_codes(values.reshape(count), count, value_rows.reshape(count))


@compiled_parallel
def attend(query, keys, key_scales, values, value_scales, layer, positions, sequences, block_tables, tiles, out):
    """Causal attention of every query row over its sequence's pages of one layer.

    Shapes: query, out [R, H, D]; keys [P, L, KV, D, 64]; values [P, L, KV, 64, D]; scales [P, L, KV, 64];
    positions, sequences [R]; block_tables [S, pages]; tiles [T + 1]: row bounds, each tile within one sequence.
    """
    size = query.shape[2]
    num_kv = keys.shape[2]
    group = query.shape[1] // num_kv
    for work in prange((len(tiles) - 1) * num_kv):
        head = work % num_kv
        first, last = tiles[work // num_kv], tiles[work // num_kv + 1]
        table = block_tables[sequences[first]]
        key_rows = np.empty((size, _PAGE), np.float32)
        value_rows = np.empty((_PAGE, size), np.float32)
        scores = np.empty(_PAGE, np.float32)
        bits = np.empty(_PAGE, np.int32)
        one = np.empty(1, np.float32)
        state = np.empty((last - first, group, 2), np.float32)
        furthest = 0
        for r in range(first, last):
            furthest = max(furthest, positions[r])
            for g in range(group):
                state[r - first, g, 0] = _LOWEST
                state[r - first, g, 1] = _ZERO
                for d in range(size):
                    out[r, head * group + g, d] = _ZERO
        for block in range(furthest // _PAGE + 1):
            page = table[block]
            _unpack_page(keys[page, layer, head], values[page, layer, head], size, key_rows, value_rows)
            for r in range(first, last):
                n = min(_PAGE, positions[r] - block * _PAGE + 1)
                if n > 0:
                    for g in range(group):
                        h = head * group + g
                        _attend_page(
                            query[r, h], key_rows, key_scales[page, layer, head], value_rows,
                            value_scales[page, layer, head], n, size, state[r - first, g], out[r, h], scores, bits, one,
                        )  # fmt: skip
        for r in range(first, last):
            for g in range(group):
                inverse = _ONE / state[r - first, g, 1]
                for d in range(size):
                    out[r, head * group + g, d] *= inverse


def row_tiles(sequences: np.ndarray) -> np.ndarray:
    """Bounds of runs of at most TILE_ROWS rows of one sequence. Shapes: [R] ascending runs -> [T + 1] int32."""
    bounds = [0]
    for row in range(1, len(sequences)):
        if sequences[row] != sequences[bounds[-1]] or row - bounds[-1] == TILE_ROWS:
            bounds.append(row)
    bounds.append(len(sequences))
    return np.array(bounds, np.int32)
