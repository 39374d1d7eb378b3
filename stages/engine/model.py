"""The Llama forward pass in int8 over paged KV: `Model.logits(batch)` is all the rest of the engine calls.

A row's logits are a function of its own sequence's tokens alone (docs/arithmetic.md). Holds weights, tables and
scratch memory; the cache belongs to the caller. Not re-entrant: one engine thread per model.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kv_store.layout import PAGE_TOKENS
from stages.engine import kernels
from stages.engine.attention import attend, row_tiles
from stages.engine.batch import RowBatch
from stages.engine.config import ModelConfig
from stages.engine.kv_cache import PagedKvCache
from stages.engine.linear import Int8Linear, use_fbgemm
from stages.engine.rotation import block_mixing, mixing
from stages.engine.weights import LayerWeights, ModelWeights

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block, its linear layers packed."""

    attention_norm: Rows  # [hidden]
    feed_forward_norm: Rows  # [hidden]
    qkv: Int8Linear
    output: Int8Linear
    gate_up: Int8Linear
    down: Int8Linear

    @classmethod
    def pack(cls, weights: LayerWeights) -> "_Layer":
        return cls(
            attention_norm=weights.attention_norm,
            feed_forward_norm=weights.feed_forward_norm,
            qkv=Int8Linear(weights.qkv),
            output=Int8Linear(weights.output),
            gate_up=Int8Linear(weights.gate_up),
            down=Int8Linear(weights.down),
        )


class Model:
    """One model ready to compute."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        """Pack the weights, and build the rotary tables for every position the model knows."""
        use_fbgemm()
        self.config = config
        self._embedding = weights.embedding
        self._layers = [_Layer.pack(layer) for layer in weights.layers]
        self._head = Int8Linear(weights.head)
        self._final_norm = weights.final_norm
        self._hidden_mixing = block_mixing(config.hidden_size).astype(np.float32)
        self._gated_mixing = block_mixing(config.intermediate_size).astype(np.float32)
        self._head_mixing = mixing(config.num_heads).astype(np.float32)
        self._eps = np.float32(config.rms_norm_eps)
        # One factor head_dim^-1/2 is softmax's, the other completes the query's unscaled Hadamard transform.
        self._query_factor = np.float32(1.0 / config.head_dim)
        frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        angles = np.outer(np.arange(config.max_model_len), frequencies)
        self._cosines = np.cos(angles).astype(np.float32)  # [positions, D / 2]
        self._sines = np.sin(angles).astype(np.float32)

    def logits(self, batch: RowBatch, cache: PagedKvCache) -> Rows:
        """Compute the rows, write their KV, and return logits of `batch.logit_rows`. Shapes: -> [n, vocab]."""
        config = self.config
        num_rows = len(batch.token_ids)
        pages = batch.block_tables[batch.sequences, batch.positions // PAGE_TOKENS]
        tiles = row_tiles(batch.sequences)
        residual = self._embedding[batch.token_ids]  # [R, hidden]
        unit = np.empty_like(residual)  # [R, hidden], largest magnitude 1
        scale = np.empty(num_rows, np.float32)
        attended_scale = np.empty(num_rows, np.float32)
        heads = (num_rows, config.num_heads, config.head_dim)
        query, attended = np.empty(heads, np.float32), np.empty(heads, np.float32)
        flat = attended.reshape(num_rows, -1)
        attended_unit = np.empty_like(flat)  # [R, H * D]
        gated = np.empty((num_rows, config.intermediate_size), np.float32)
        gated_scale = np.empty(num_rows, np.float32)

        kernels.norm(residual, self._layers[0].attention_norm, self._eps, self._hidden_mixing, unit, scale)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(torch.from_numpy(unit))  # [R, (H + 2 KV) * D]
            kernels.split_heads(
                qkv, scale, self._cosines, self._sines, batch.positions, pages, index, self._query_factor,
                query, cache.keys, cache.key_scales, cache.values, cache.value_scales,
            )  # fmt: skip
            attend(
                query, cache.keys, cache.key_scales, cache.values, cache.value_scales, index,
                batch.positions, batch.sequences, batch.block_tables, tiles, attended,
            )  # fmt: skip
            kernels.mixed_unit(flat, self._head_mixing, attended_unit, attended_scale)
            update = layer.output(torch.from_numpy(attended_unit))  # [R, hidden]
            kernels.add_norm(
                residual, update, attended_scale, layer.feed_forward_norm, self._eps, self._hidden_mixing, unit, scale
            )
            gate_up = layer.gate_up(torch.from_numpy(unit))  # [R, 2 F]
            kernels.gated_unit(gate_up, scale, self._gated_mixing, gated, gated_scale)
            update = layer.down(torch.from_numpy(gated))  # [R, hidden]
            following = self._layers[index + 1].attention_norm if index + 1 < len(self._layers) else self._final_norm
            kernels.add_norm(residual, update, gated_scale, following, self._eps, self._hidden_mixing, unit, scale)
        wanted = batch.logit_rows
        if not len(wanted):
            return np.empty((0, config.vocab_size), np.float32)
        logits = self._head(torch.from_numpy(unit[wanted]))  # [n, vocab]
        logits *= scale[wanted, None]
        return logits
