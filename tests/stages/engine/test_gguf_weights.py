"""Tensors as fp32: to the bit what gguf's own, slower reader and its reference dequantisation give."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from stages.engine.config import ModelConfig
from stages.engine.gguf_weights import GgufWeights
from stages.gguf.errors import UnsupportedModelError

# One of each format the model has: Q8_0, F32, and Q4_1 of two widths.
NAMES = ("token_embd", "output_norm", "blk.0.attn_q", "blk.29.ffn_down")


def test_tensors_are_those_of_the_reference_reader_to_the_bit(
    model_path: Path, source: tuple[GgufWeights, ModelConfig]
) -> None:
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(model_path).tensors}
    for name in NAMES:
        tensor = expected[f"{name}.weight"]
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weight = source[0].matrix(name)
        assert weight.dtype == np.float32
        assert weight.shape == tuple(reversed(tensor.shape.tolist()))
        assert weight.tobytes() == wanted.tobytes()


def test_a_tensor_that_is_not_there_is_named(source: tuple[GgufWeights, ModelConfig]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"\.gguf: tensor blk\.30\.attn_q\.weight is missing"):
        source[0].matrix("blk.30.attn_q")
