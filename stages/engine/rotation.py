"""Orthogonal rotations that spread outliers, so that eight bits a row are enough (QuaRot, arXiv 2404.00456).

A rotation of the residual stream, one inside each value head, and one before `down_proj`: the first two are folded
into the weights and cost nothing at run time, the third is a Hadamard transform in `kernels.py`. All of them are
built from the size alone, in double precision, so that every process builds the same.
"""

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
_SIGN_SEED = 20_240_404  # any constant does: it only has to be the same in every process


def hadamard(size: int) -> Doubles:
    """Sylvester's Hadamard matrix of a power of two, orthonormal and symmetric: [size, size]."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def power_of_two_factor(size: int) -> int:
    """Largest power of two that divides size."""
    return size & -size


class HiddenRotation:
    """Rotation R of the residual stream: random signs, then (odd factor's DCT) x (Hadamard), applied in O(size * 73).

    For 576 = 9 * 64: every number of the row reaches every other.
    """

    def __init__(self, size: int) -> None:
        """Build R for rows of `size` numbers."""
        self._hadamard = hadamard(power_of_two_factor(size))
        self._mix = _cosine_transform(size // power_of_two_factor(size))
        bits = np.random.Philox(key=_SIGN_SEED).random_raw(size) & np.uint64(1)
        self._signs = np.where(bits == 1, 1.0, -1.0)

    def apply(self, rows: NDArray[np.floating]) -> Doubles:
        """Rows @ R. Shapes: [..., size] -> [..., size]."""
        shape = rows.shape
        blocks = (rows * self._signs).reshape(-1, len(self._mix), len(self._hadamard))
        return (self._mix @ (blocks @ self._hadamard)).reshape(shape)


def rotate_blocks(rows: NDArray[np.floating], block: int) -> Doubles:
    """Hadamard-transform each run of `block` numbers of every row. Shapes: [..., n * block] -> same."""
    return (rows.reshape(-1, block) @ hadamard(block)).reshape(rows.shape)


def _cosine_transform(size: int) -> Doubles:
    """Orthonormal DCT-II: orthogonal for any size, and dense."""
    index = np.arange(size)
    matrix = np.cos(np.pi * (2 * index[None, :] + 1) * index[:, None] / (2 * size)) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    return matrix
