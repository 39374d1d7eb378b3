"""The two things the engine benchmark times, behind one seam: our engine's steps, and plain torch's.

Owns how a batch with a context comes into being: one prompt is computed and its KV copied to the others, because
a step's time depends on lengths alone. Knows nothing about clocks.
"""

from collections.abc import Sequence as Tokens
from typing import Protocol

import torch

from kv_store.codecs.base import Codec
from ops.bench.naive import NaiveCache, NaiveModel
from stages.engine import stepping
from stages.engine.kv_cache import PagedKvCache, pages_for
from stages.engine.model import Model
from stages.engine.sampling import SampledToken, SamplingSpec, sample
from stages.engine.sequence import EndReason, Sequence

GREEDY = SamplingSpec(seed=0, temperature=0.0)


class Runner(Protocol):
    """A way to run the model."""

    name: str

    def prefill(self, token_ids: Tokens[int]) -> None:
        """Compute a prompt and choose its first output token."""
        ...

    def begin(self, token_ids: Tokens[int], batch: int, num_steps: int) -> None:
        """Prepare so many sequences that have this context, for so many steps."""
        ...

    def step(self) -> list[int]:
        """Compute one more token of each sequence, and return them."""
        ...


class EngineRunner:
    """Our engine, as decode runs it: plan, run, sample, commit; without drafts."""

    name = "engine"

    def __init__(self, model: Model, codec: Codec, max_batch: int, max_tokens: int) -> None:
        """Reserve pages for the largest batch."""
        num_pages = max_batch * pages_for(max_tokens)
        self._model = model
        self._cache = PagedKvCache(model.config.kv_layout, codec, num_pages)
        self._sequences: list[Sequence] = []

    def prefill(self, token_ids: Tokens[int]) -> None:
        """Compute a prompt in one chunk."""
        self._end()
        self._sequences = [self._prefilled(token_ids, 1)]

    def begin(self, token_ids: Tokens[int], batch: int, num_steps: int) -> None:
        """Prepare a batch."""
        self._end()
        first = self._prefilled(token_ids, num_steps + 1)
        self._sequences = [first, *(self._copy(first) for _ in range(batch - 1))]

    def step(self) -> list[int]:
        """Advance every sequence by one token."""
        planned = stepping.plan(self._sequences, 0)
        logits = stepping.run(planned, self._model, self._cache)
        for index, rows in enumerate(planned):
            stepping.commit(rows, logits[index : index + 1], _accept)
        return [sequence.output_token_ids[-1] for sequence in self._sequences]

    def _prefilled(self, token_ids: Tokens[int], max_tokens: int) -> Sequence:
        pages = self._cache.allocate(len(token_ids) + max_tokens)
        sequence = Sequence(token_ids, GREEDY, max_tokens, frozenset(), pages)
        logits = stepping.prefill_chunk(self._model, self._cache, sequence, len(token_ids))
        sequence.append(sample(logits[0], GREEDY, 0, sequence.history))
        return sequence

    def _copy(self, first: Sequence) -> Sequence:
        cache = self._cache
        pages = cache.allocate(len(first.prompt_token_ids) + first.max_tokens)
        for array in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
            array[pages] = array[first.block_table]
        return Sequence(
            first.prompt_token_ids,
            GREEDY,
            first.max_tokens,
            frozenset(),
            pages,
            num_computed_tokens=first.num_computed_tokens,
            output_token_ids=list(first.output_token_ids),
        )

    def _end(self) -> None:
        for sequence in self._sequences:
            self._cache.free(sequence.block_table)
        self._sequences = []


def _accept(_: Sequence, __: SampledToken, reason: EndReason | None) -> EndReason | None:
    return reason


class NaiveRunner:
    """Plain torch."""

    name = "torch fp32 eager"

    def __init__(self, model: NaiveModel) -> None:
        self._model = model
        self._cache: NaiveCache | None = None
        self._newest = torch.empty((0, 1), dtype=torch.long)  # [B, 1]

    def prefill(self, token_ids: Tokens[int]) -> None:
        """Compute a prompt in one call."""
        self._cache = self._model.cache(1, len(token_ids))
        self._advance(torch.tensor([token_ids]))

    def begin(self, token_ids: Tokens[int], batch: int, num_steps: int) -> None:
        """Prepare a batch."""
        self._cache = self._model.cache(1, len(token_ids) + num_steps)
        self._advance(torch.tensor([token_ids]))
        self._cache = self._cache.repeated(batch)
        self._newest = self._newest.repeat(batch, 1)

    def step(self) -> list[int]:
        """Advance every sequence by one token."""
        self._advance(self._newest)
        return self._newest[:, 0].tolist()

    def _advance(self, token_ids: torch.Tensor) -> None:
        assert self._cache is not None, "begin comes first"
        self._newest = self._model.step(token_ids, self._cache).argmax(-1, keepdim=True)
