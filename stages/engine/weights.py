"""Turns a model's tensors into what the int8 engine multiplies with: inputs rotated (rotation.py), rows rounded.

Per layer (T rotates a linear layer's inputs, H each value head, M mixes the heads):
    q, k, v: W T, with H on v's outputs     o: W H M     gate, up: W T     down: W T     head: W T
T and M are applied to activations at run time, in kernels.py; H costs nothing, because o takes it back.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from stages.engine.config import ModelConfig
from stages.engine.gguf_weights import GgufWeights, Matrix
from stages.engine.linear import Int8Weight
from stages.engine.rotation import mix_blocks, mixing, rotate_blocks, rotate_inputs

Arrays = dict[str, NDArray[np.generic]]
NORMS = ("attention_norm", "feed_forward_norm")
LINEARS = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer block."""

    attention_norm: Matrix  # [hidden]
    feed_forward_norm: Matrix  # [hidden]
    qkv: Int8Weight  # hidden -> (H + 2 KV) * D
    output: Int8Weight  # H * D -> hidden
    gate_up: Int8Weight  # hidden -> 2 F
    down: Int8Weight  # F -> hidden


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything the engine needs of a model file, besides its configuration."""

    embedding: Matrix  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Matrix  # [hidden]
    head: Int8Weight  # hidden -> vocab

    @classmethod
    def fold(cls, source: GgufWeights, config: ModelConfig) -> Self:
        """Rotate and round; takes seconds."""
        return cls(
            embedding=source.matrix("token_embd"),
            layers=tuple(_layer(source, config, index) for index in range(config.num_layers)),
            final_norm=source.matrix("output_norm"),
            head=Int8Weight.round(rotate_inputs(source.head())),
        )

    def arrays(self) -> Arrays:
        """Everything as flat named arrays."""
        named: Arrays = {"embedding": self.embedding, "final_norm": self.final_norm}
        named |= {"head.codes": self.head.codes, "head.scales": self.head.scales}
        for index, layer in enumerate(self.layers):
            named |= {f"{index}.{name}": getattr(layer, name) for name in NORMS}
            for name in LINEARS:
                weight: Int8Weight = getattr(layer, name)
                named |= {f"{index}.{name}.codes": weight.codes, f"{index}.{name}.scales": weight.scales}
        return named

    @classmethod
    def from_arrays(cls, named: Arrays, num_layers: int) -> Self:
        """Inverse of arrays()."""

        def floats(name: str) -> Matrix:
            return named[name].view(np.float32)

        def weight(name: str) -> Int8Weight:
            return Int8Weight(named[f"{name}.codes"].view(np.int8), floats(f"{name}.scales"))

        def layer(index: int) -> LayerWeights:
            return LayerWeights(
                attention_norm=floats(f"{index}.attention_norm"),
                feed_forward_norm=floats(f"{index}.feed_forward_norm"),
                qkv=weight(f"{index}.qkv"),
                output=weight(f"{index}.output"),
                gate_up=weight(f"{index}.gate_up"),
                down=weight(f"{index}.down"),
            )

        layers = tuple(layer(index) for index in range(num_layers))
        return cls(floats("embedding"), layers, floats("final_norm"), weight("head"))


def _layer(source: GgufWeights, config: ModelConfig, index: int) -> LayerWeights:
    block, head_dim = f"blk.{index}", config.head_dim
    query, key, value = source.query_key_value(index)
    # The transform acts on a value head's outputs, that is on columns of the transposed weight.
    value = rotate_blocks(value.T, head_dim).T
    output = mix_blocks(rotate_blocks(source.matrix(f"{block}.attn_output"), head_dim), mixing(config.num_heads))
    gate_up = np.concatenate([source.matrix(f"{block}.ffn_gate"), source.matrix(f"{block}.ffn_up")])
    return LayerWeights(
        attention_norm=source.matrix(f"{block}.attn_norm"),
        feed_forward_norm=source.matrix(f"{block}.ffn_norm"),
        qkv=Int8Weight.round(rotate_inputs(np.concatenate([query, key, value]))),
        output=Int8Weight.round(output),
        gate_up=Int8Weight.round(rotate_inputs(gate_up)),
        down=Int8Weight.round(rotate_inputs(source.matrix(f"{block}.ffn_down"))),
    )
