"""Reads the tensors of a Llama-family GGUF as fp32, in the layout the engine computes with.

Owns the converter's row permutation of Q and K. Knows nothing about int8 or rotation.
"""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from stages.engine.config import ModelConfig
from stages.gguf.errors import UnsupportedModelError
from stages.gguf.file import GgufFile

Matrix = NDArray[np.float32]


class GgufWeights:
    """Tensors by GGUF name, dequantised when asked for and not kept."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        """Read from a file that stays open for as long as tensors are asked for."""
        self._file = file
        self._config = config

    def matrix(self, name: str) -> Matrix:
        """Weight `name` as [out, in] (or [n] for a vector) in fp32.

        Raises:
            UnsupportedModelError: The tensor is missing.
        """
        tensor = self._file.tensors.get(f"{name}.weight")
        if tensor is None:
            raise UnsupportedModelError(self._file.path, f"tensor {name}.weight is missing")
        # Blocks lie side by side within a row: [out, bytes of a row].
        blocks = np.frombuffer(self._file.tensor_data(tensor), np.uint8).reshape(*tensor.shape[:-1], tensor.row_bytes)
        return np.array(dequantize(blocks, GGMLQuantizationType(tensor.type_id)), dtype=np.float32, order="C")

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
