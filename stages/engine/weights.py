"""Turns a model's tensors into what the int8 engine multiplies with: norms folded, rotations folded, rows quantised.

Folding, per layer (R rotates the residual stream, H transforms each value head, B the feed-forward blocks):
    q, k: W diag(norm) R            v: H W diag(norm) R          o: R^T W H
    gate, up: W diag(norm) R        down: R^T W B                embedding: E R, head: W diag(norm) R
RMS norm without its weight commutes with R, so the rotated model computes the same function.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.engine.config import ModelConfig
from stages.engine.gguf_weights import GgufWeights, Matrix
from stages.engine.linear import Int8Linear
from stages.engine.rotation import HiddenRotation, power_of_two_factor, rotate_blocks


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The four linear layers of one transformer block."""

    qkv: Int8Linear  # hidden -> (H + 2 KV) * D
    output: Int8Linear  # H * D -> hidden
    gate_up: Int8Linear  # hidden -> 2 F
    down: Int8Linear  # F -> hidden


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything `model.py` reads."""

    config: ModelConfig
    embedding: Matrix  # [vocab, hidden], rotated
    layers: tuple[LayerWeights, ...]
    head: Int8Linear  # hidden -> vocab


def down_block(config: ModelConfig) -> int:
    """Size of the Hadamard blocks before `down_proj`: the largest power of two that divides the width."""
    return power_of_two_factor(config.intermediate_size)


def load_weights(
    source: GgufWeights, config: ModelConfig, on_layer: Callable[[int, int], None] | None = None
) -> ModelWeights:
    """Fold, rotate and quantise.

    Args:
        source: The model file.
        config: Its shape.
        on_layer: Called with (layers done, layers in all) for progress.
    """
    rotation = HiddenRotation(config.hidden_size)
    layers: list[LayerWeights] = []
    for index in range(config.num_layers):
        layers.append(_layer(source, config, rotation, index))
        if on_layer:
            on_layer(index + 1, config.num_layers)
    final_norm = source.matrix("output_norm")
    return ModelWeights(
        config=config,
        embedding=rotation.apply(source.matrix("token_embd")).astype(np.float32),
        layers=tuple(layers),
        head=Int8Linear(rotation.apply(source.head() * final_norm)),
    )


def _layer(source: GgufWeights, config: ModelConfig, rotation: HiddenRotation, index: int) -> LayerWeights:
    block, head_dim = f"blk.{index}", config.head_dim
    attention_norm, feed_forward_norm = (
        source.matrix(f"{block}.attn_norm"),
        source.matrix(f"{block}.ffn_norm"),
    )
    query, key, value = source.query_key_value(index)
    # H V: the transform acts on a head's outputs, that is on columns of the transposed weight.
    value = rotate_blocks(value.T, head_dim).T
    output = rotate_blocks(source.matrix(f"{block}.attn_output"), head_dim)
    gate_up = np.concatenate([source.matrix(f"{block}.ffn_gate"), source.matrix(f"{block}.ffn_up")])
    down = rotate_blocks(source.matrix(f"{block}.ffn_down"), down_block(config))
    # gated_unit() leaves its transform unscaled; this is the missing factor.
    down /= np.sqrt(down_block(config))
    return LayerWeights(
        qkv=Int8Linear(rotation.apply(np.concatenate([query, key, value]) * attention_norm)),
        output=Int8Linear(_rotate_outputs(rotation, output)),
        gate_up=Int8Linear(rotation.apply(gate_up * feed_forward_norm)),
        down=Int8Linear(_rotate_outputs(rotation, down)),
    )


def _rotate_outputs(rotation: HiddenRotation, weight: NDArray[np.floating]) -> NDArray[np.float64]:
    """R^T W, for layers that write to the residual stream."""
    return rotation.apply(weight.T).T
