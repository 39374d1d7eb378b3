"""Int8 linear layers whose rows do not depend on each other.

FBGEMM with a fixed activation scale: a row is divided by its own maximum before the call and multiplied by it after,
so one request's outlier never moves another request's rounding, and the integer sums are exact for any number of
rows and threads. Ranges: activations use all of -127..127; weights stop at 100, because AVX2's 16-bit partial sums
saturate beyond that (docs/arithmetic.md has the measurements). Knows nothing about what a layer means.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

ACTIVATION_LEVELS = 127
ACTIVATION_ZERO_POINT = 128  # FBGEMM activations are unsigned
WEIGHT_LEVELS = 100


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight rounded per output row. Shapes: codes [out, in] int8, scales [out] fp32."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]

    @classmethod
    def round(cls, weight: NDArray[np.floating]) -> "Int8Weight":
        """Round [out, in] to the nearest level, ties to even."""
        largest = np.abs(weight).max(axis=1, keepdims=True)
        scales = np.maximum(largest / WEIGHT_LEVELS, 1e-12).astype(np.float32)
        return cls(np.rint(weight / scales).astype(np.int8), scales[:, 0])


class Int8Linear:
    """y = x W^T for rows x with max|x| = 1, in int8."""

    def __init__(self, weight: Int8Weight) -> None:
        """Pack a rounded weight for FBGEMM."""
        codes, scales = torch.from_numpy(weight.codes), torch.from_numpy(weight.scales).double()
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():
            # torch plans to drop quantised tensor types; the pinned version has them, and FBGEMM packs no other.
            warnings.filterwarnings("ignore", message=".*quantized tensor creation.*", category=UserWarning)
            make = torch._make_per_channel_quantized_tensor  # noqa: SLF001 # pyright: ignore[reportPrivateImportUsage]
            quantised = make(codes, scales, zeros, 0)
        self._packed = torch.ops.quantized.linear_prepack(quantised, None)

    def __call__(self, rows: torch.Tensor) -> NDArray[np.float32]:
        """Shapes: [R, in], each row's largest magnitude 1 -> [R, out]; multiply by the row's maximum afterwards."""
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows, 1.0 / ACTIVATION_LEVELS, ACTIVATION_ZERO_POINT, self._packed
        )
        return product.numpy()


def use_fbgemm() -> None:
    """Select the kernels above for this process.

    Raises:
        RuntimeError: This build of torch has none (they exist on x86-64 only).
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise RuntimeError("this build of torch has no FBGEMM; the exact int8 engine needs an x86-64 CPU with AVX2")
    torch.backends.quantized.engine = "fbgemm"
