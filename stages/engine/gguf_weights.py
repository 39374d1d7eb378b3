"""Reads the tensors of a Llama-family GGUF as fp32, in the layout the engine computes with.

Owns the block formats it accepts and the converter's row permutation of Q and K. Knows nothing about int8 or rotation.
"""

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from stages.engine.config import ModelConfig, UnsupportedModelError

Matrix = NDArray[np.float32]
ACCEPTED = (GGMLQuantizationType.F32, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0)


class GgufWeights:
    """Tensors by GGUF name, dequantised when asked for and not kept."""

    def __init__(self, reader: GGUFReader, config: ModelConfig) -> None:
        """Index the tensors of an open file."""
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._config = config

    def matrix(self, name: str) -> Matrix:
        """Weight `name` as [out, in] (or [n] for a vector) in fp32.

        Raises:
            UnsupportedModelError: The tensor is missing or in a format this engine does not read.
        """
        tensor = self._tensors.get(f"{name}.weight")
        if tensor is None:
            raise UnsupportedModelError(f"tensor {name}.weight is missing")
        if tensor.tensor_type not in ACCEPTED:
            accepted = ", ".join(kind.name for kind in ACCEPTED)
            raise UnsupportedModelError(f"{tensor.name} is {tensor.tensor_type.name}; accepted are {accepted}")
        return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32, order="C")

    def query_key_value(self, layer: int) -> tuple[Matrix, Matrix, Matrix]:
        """Projections of one layer: q [H * D, hidden], k and v [KV * D, hidden], with rotary halves side by side."""
        block, config = f"blk.{layer}", self._config
        query = rotate_half_order(self.matrix(f"{block}.attn_q"), config.num_heads)
        key = rotate_half_order(self.matrix(f"{block}.attn_k"), config.num_kv_heads)
        return query, key, self.matrix(f"{block}.attn_v")

    def head(self) -> Matrix:
        """Output projection [vocab, hidden]."""
        return self.matrix("token_embd" if self._config.tied_embedding else "output")


def rotate_half_order(weight: Matrix, num_heads: int) -> Matrix:
    """Undo the converter's interleaving: rows (0, D/2, 1, D/2 + 1, ...) of a head back to (0, 1, ..., D - 1).

    GGUF stores Q and K of llama models so that rotary pairs are neighbours; with the halves apart a rotation is
    element-wise over contiguous numbers.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
