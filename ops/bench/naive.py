"""The baseline of the engine benchmark: the same model in plain fp32 torch, eager, padded, with a list of KV.

What one writes first: whole batches of equal length, one K and one V tensor a layer, torch's own operators.
Shares nothing with the engine but the file reader. Letters: B sequences, S new tokens, H query heads, D head_dim.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from stages.engine.config import ModelConfig
from stages.engine.gguf_weights import GgufWeights


@dataclass(slots=True)
class NaiveCache:
    """K and V of every layer, [B, KV, max length, D], and how many positions are filled."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    num_tokens: int = 0

    def repeated(self, batch: int) -> "NaiveCache":
        """Return a cache of so many sequences like the only one of this."""
        return NaiveCache(
            [keys.repeat(batch, 1, 1, 1) for keys in self.keys],
            [values.repeat(batch, 1, 1, 1) for values in self.values],
            self.num_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor  # [(H + 2 KV) * D, hidden]
    output: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 F, hidden]
    down: torch.Tensor


class NaiveModel:
    """Logits of a batch's newest position."""

    def __init__(self, source: GgufWeights, config: ModelConfig) -> None:
        """Load every weight as fp32."""
        self.config = config
        self._embedding = torch.from_numpy(source.matrix("token_embd"))
        self._head = self._embedding if config.tied_embedding else torch.from_numpy(source.head())
        self._norm = torch.from_numpy(source.matrix("output_norm"))
        self._layers = [_load_layer(source, index) for index in range(config.num_layers)]
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        angles = torch.outer(torch.arange(config.max_model_len).double(), frequencies)
        self._cosines, self._sines = angles.cos().float(), angles.sin().float()  # [positions, D / 2]

    def cache(self, batch: int, max_tokens: int) -> NaiveCache:
        """Return an empty cache."""
        config = self.config
        shape = (batch, config.num_kv_heads, max_tokens, config.head_dim)
        return NaiveCache([torch.zeros(shape) for _ in self._layers], [torch.zeros(shape) for _ in self._layers])

    @torch.inference_mode()
    def step(self, token_ids: torch.Tensor, cache: NaiveCache) -> torch.Tensor:
        """Compute new tokens of all sequences. Shapes: [B, S] -> [B, vocab]."""
        x = self._embedding[token_ids]  # [B, S, hidden]
        for index, layer in enumerate(self._layers):
            x = x + self._attention(index, layer, self._rms(x, layer.attention_norm), cache)
            gate, up = functional.linear(self._rms(x, layer.feed_forward_norm), layer.gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        cache.num_tokens += token_ids.shape[1]
        return functional.linear(self._rms(x[:, -1], self._norm), self._head)

    def _attention(self, index: int, layer: _Layer, x: torch.Tensor, cache: NaiveCache) -> torch.Tensor:
        config, (batch, num_new, _) = self.config, x.shape
        heads = functional.linear(x, layer.qkv).view(batch, num_new, -1, config.head_dim).transpose(1, 2)
        query, key, value = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
        end = cache.num_tokens + num_new
        cache.keys[index][:, :, cache.num_tokens : end] = self._rope(key, cache.num_tokens)
        cache.values[index][:, :, cache.num_tokens : end] = value
        attended = functional.scaled_dot_product_attention(
            self._rope(query, cache.num_tokens),
            cache.keys[index][:, :, :end],
            cache.values[index][:, :, :end],
            is_causal=num_new > 1,  # several new tokens are a prompt from its beginning
            enable_gqa=True,
        )
        return functional.linear(attended.transpose(1, 2).reshape(batch, num_new, -1), layer.output)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _rope(self, x: torch.Tensor, start: int) -> torch.Tensor:
        first, second = x.chunk(2, -1)  # [B, heads, S, D / 2] each
        end = start + x.shape[2]
        cosines, sines = self._cosines[start:end], self._sines[start:end]
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


def _load_layer(source: GgufWeights, index: int) -> _Layer:
    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(source.matrix(f"blk.{index}.{name}"))

    return _Layer(
        attention_norm=tensor("attn_norm"),
        qkv=torch.cat([torch.from_numpy(part) for part in source.query_key_value(index)]),
        output=tensor("attn_output"),
        feed_forward_norm=tensor("ffn_norm"),
        gate_up=torch.cat([tensor("ffn_gate"), tensor("ffn_up")]),
        down=tensor("ffn_down"),
    )
