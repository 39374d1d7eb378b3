"""Rotations are orthogonal, and the compiled transform undoes what the weights were given."""

import numpy as np
import pytest

from stages.engine import kernels
from stages.engine.rotation import block_mixing, cosine_transform, hadamard, mixing, power_of_two_factor, rotate_inputs


@pytest.mark.parametrize("size", [1, 2, 3, 9, 12, 64, 576])
def test_matrices_are_orthogonal(size: int) -> None:
    for matrix in (cosine_transform(size), mixing(size)):
        assert matrix @ matrix.T == pytest.approx(np.eye(size), abs=1e-12)


def test_hadamard_is_symmetric_and_orthogonal() -> None:
    matrix = hadamard(64)
    assert np.array_equal(matrix, matrix.T)
    assert matrix @ matrix == pytest.approx(np.eye(64), abs=1e-12)


@pytest.mark.parametrize("width", [64, 576, 1536])
def test_a_rotated_weight_times_a_rotated_norm_is_the_plain_product(width: int) -> None:
    rng = np.random.default_rng(width)
    weight, x = rng.normal(size=(5, width)), rng.normal(size=(11, width)).astype(np.float32)
    norm = rng.normal(1, 0.3, width).astype(np.float32)
    unit, scale = np.empty_like(x), np.empty(len(x), np.float32)
    kernels.norm(x, norm, np.float32(1e-5), block_mixing(width).astype(np.float32), unit, scale)
    assert np.abs(unit).max(axis=1) == pytest.approx(np.ones(len(x)))
    plain = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * norm @ weight.T
    assert unit.astype(np.float64) * scale[:, None] @ rotate_inputs(weight).T == pytest.approx(plain, abs=2e-4)


def test_power_of_two_factor() -> None:
    assert [power_of_two_factor(n) for n in (1, 576, 1536, 4096)] == [1, 64, 512, 4096]
