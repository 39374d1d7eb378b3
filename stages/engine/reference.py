"""The same model in plain fp32 torch: the yardstick for quality, not a way to serve.

Reads the weights as the file gives them: no folding, no rotation, no cache. Nothing here is shared with the int8
path but the file reader, so an error there cannot hide here.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from stages.engine.config import ModelConfig
from stages.engine.gguf_weights import GgufWeights


class ReferenceModel:
    """Logits of whole sequences."""

    def __init__(self, source: GgufWeights, config: ModelConfig) -> None:
        """Load every weight as fp32."""
        self._config = config
        self._embedding = torch.from_numpy(source.matrix("token_embd"))
        self._head = torch.from_numpy(source.head())
        self._norm = torch.from_numpy(source.matrix("output_norm"))
        self._layers = [self._load_layer(source, index) for index in range(config.num_layers)]
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        angles = torch.outer(torch.arange(config.max_model_len).double(), frequencies)
        self._cosines, self._sines = angles.cos().float(), angles.sin().float()  # [positions, D / 2]

    @torch.inference_mode()
    def logits(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Shapes: [T] -> [T, vocab]."""
        x = self._embedding[torch.from_numpy(token_ids)]  # [T, hidden]
        for layer in self._layers:
            x = x + self._attention(layer, self._rms(x, layer["attn_norm"]))
            h = self._rms(x, layer["ffn_norm"])
            gate, up = h @ layer["ffn_gate"].T, h @ layer["ffn_up"].T  # [T, F]
            x = x + (functional.silu(gate) * up) @ layer["ffn_down"].T
        return (self._rms(x, self._norm) @ self._head.T).numpy()

    def _load_layer(self, source: GgufWeights, index: int) -> dict[str, torch.Tensor]:
        query, key, value = source.query_key_value(index)
        names = ("attn_norm", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
        arrays = {name: source.matrix(f"blk.{index}.{name}") for name in names}
        arrays |= {"query": query, "key": key, "value": value}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _attention(self, layer: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        config = self._config
        query = self._rope(_heads(x @ layer["query"].T, config.num_heads))  # [H, T, D]
        key = self._rope(_heads(x @ layer["key"].T, config.num_kv_heads))  # [KV, T, D]
        value = _heads(x @ layer["value"].T, config.num_kv_heads)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(0, 1).reshape(len(x), -1) @ layer["attn_output"].T

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._config.rms_norm_eps)

    def _rope(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)  # [heads, T, D / 2] each
        cosines, sines = self._cosines[: x.shape[1]], self._sines[: x.shape[1]]
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


def _heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Shapes: [T, heads * D] -> [heads, T, D]."""
    return x.view(len(x), num_heads, -1).transpose(0, 1)
