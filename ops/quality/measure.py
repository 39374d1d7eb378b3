"""Runs the reference and the engine over the same windows of tokens, with the KV of every codec.

The engine computes a window in blocks, so that all but the first attend to rows that the codec has rounded and
the cache has kept: what a request gets is what is measured. Knows nothing about files or tables.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kv_store.codecs.base import Codec
from ops.quality.divergence import Divergence, Logits
from stages.engine.batch import RowBatch, Run
from stages.engine.kv_cache import PagedKvCache, pages_for
from stages.engine.model import Model
from stages.engine.reference import ReferenceModel

BLOCK_TOKENS = 128  # a block's logits in double precision, twice, take 100 MB with 49,152 tokens


def measure(
    reference: ReferenceModel,
    model: Model,
    codecs: Sequence[Codec],
    windows: Sequence[Sequence[int]],
    on_window: Callable[[], None] = lambda: None,
) -> dict[str, list[Divergence]]:
    """Return the divergence of each window, by codec name; `on_window` is called after each window."""
    found: dict[str, list[Divergence]] = {codec.name: [] for codec in codecs}
    caches = [
        PagedKvCache(model.config.kv_layout, codec, max(pages_for(len(window)) for window in windows))
        for codec in codecs
    ]
    for window in windows:
        expected = reference.logits(np.array(window, np.int64))  # [T, vocab]
        for cache in caches:
            found[cache.codec.name].append(_window(model, cache, window, expected))
        on_window()
    return found


def _window(model: Model, cache: PagedKvCache, window: Sequence[int], expected: Logits) -> Divergence:
    pages = cache.allocate(len(window))
    blocks: list[Divergence] = []
    for start in range(0, len(window), BLOCK_TOKENS):
        block = window[start : start + BLOCK_TOKENS]
        logits = model.logits(RowBatch.from_runs([Run(block, start, pages, len(block))]), cache)
        blocks.append(Divergence.between(expected[start : start + len(block)], logits))
    cache.free(pages)
    return Divergence.joined(blocks)
