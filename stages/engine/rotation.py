"""Orthogonal rotations that spread outliers, so that eight bits a row are enough (QuaRot, arXiv 2404.00456).

What enters a linear layer is rotated: a Hadamard transform inside blocks of the largest power of two that divides the
width, then a cosine transform across the blocks. The weight gets the same rotation ahead of time, so the product does
not change, only how its input rounds. Built from the size alone, in double precision: every process builds the same.

The residual stream itself stays as it is, and RMS norm weights are applied before the rotation, not folded into the
linear layer as in the paper: folded, they widen the spread of its columns, and cost half as much quality again
(docs/quality.md).
"""

from typing import cast

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


def hadamard(size: int) -> Doubles:
    """Sylvester's Hadamard matrix of a power of two, orthonormal and symmetric: [size, size]."""
    matrix: Doubles = np.ones((1, 1), np.float64)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return cast("Doubles", matrix / np.sqrt(size))


def cosine_transform(size: int) -> Doubles:
    """Orthonormal DCT-II: orthogonal for any size, and dense. Shapes: -> [size, size]."""
    index = np.arange(size)
    matrix = np.cos(np.pi * (2 * index[None, :] + 1) * index[:, None] / (2 * size)) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    return matrix


def mixing(size: int) -> Doubles:
    """Dense orthogonal matrix of any size: [size, size]."""
    even = power_of_two_factor(size)
    return cast("Doubles", np.kron(cosine_transform(size // even), hadamard(even)))


def power_of_two_factor(size: int) -> int:
    """Largest power of two that divides size."""
    return size & -size


def block_mixing(width: int) -> Doubles:
    """What lets the Hadamard blocks of rows of that width reach each other: [m, m] for m blocks."""
    return cosine_transform(width // power_of_two_factor(width))


def rotate_inputs(weight: NDArray[np.floating]) -> Doubles:
    """The weight for inputs that `kernels.py` has transformed without scaling. Shapes: [out, in] -> same."""
    block = power_of_two_factor(weight.shape[1])
    return mix_blocks(rotate_blocks(weight, block), block_mixing(weight.shape[1])) / np.sqrt(block)


def rotate_blocks(rows: NDArray[np.floating], block: int) -> Doubles:
    """Hadamard-transform each run of `block` numbers of every row. Shapes: [..., n * block] -> same."""
    return (rows.reshape(-1, block) @ hadamard(block)).reshape(rows.shape)


def mix_blocks(rows: NDArray[np.floating], matrix: Doubles) -> Doubles:
    """Let the n blocks of every row become sums of each other by an [n, n] matrix. Shapes: [..., n * block] -> same."""
    blocks = rows.reshape(-1, len(matrix), rows.shape[-1] // len(matrix))
    return (matrix @ blocks).reshape(rows.shape)
