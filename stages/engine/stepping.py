"""The engine step in four verbs: plan the rows, run the model, sample each position, commit what was accepted.

Speculation is sample-and-compare: the rows of a sequence are its last token and its drafts; position after position
the sampler chooses a token as it would without drafts, and goes on as long as the next draft equals it. So the text
does not depend on whether, or how well, anybody drafts. Knows nothing about queues, text or stop strings: `accept`
tells the caller's verdict on each token.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stages.engine.batch import RowBatch, Run
from stages.engine.kv_cache import PagedKvCache
from stages.engine.model import Model
from stages.engine.sampling import SampledToken, TokenHistory, sample
from stages.engine.sequence import EndReason, Sequence

# Called with a sequence and a token just appended to it, and the engine's reason to end or None; returns the reason
# that holds (a stop string may end what the engine would go on with).
Accept = Callable[[Sequence, SampledToken, EndReason | None], EndReason | None]


@dataclass(frozen=True, slots=True)
class Planned:
    """Rows of one sequence in a step: its newest token, then drafts."""

    sequence: Sequence
    token_ids: list[int]

    @property
    def draft_token_ids(self) -> list[int]:
        """The guesses among the rows."""
        return self.token_ids[1:]


def plan(sequences: Sequences[Sequence], num_speculative_tokens: int) -> list[Planned]:
    """Rows of the next step; never more than a sequence may still emit."""
    planned: list[Planned] = []
    for sequence in sequences:
        room = sequence.max_tokens - len(sequence.output_token_ids) - 1
        limit = min(num_speculative_tokens, room)
        drafts = sequence.drafter.draft(limit) if sequence.drafter is not None and limit > 0 else []
        planned.append(Planned(sequence, [sequence.output_token_ids[-1], *drafts]))
    return planned


def run(planned: Sequences[Planned], model: Model, cache: PagedKvCache) -> NDArray[np.float32]:
    """Logits of every planned row, in order. Shapes: -> [rows, vocab]."""
    runs = [Run(p.token_ids, p.sequence.num_computed_tokens, p.sequence.block_table, len(p.token_ids)) for p in planned]
    return model.logits(RowBatch.from_runs(runs), cache)


def commit(planned: Planned, logits: NDArray[np.float32], accept: Accept) -> EndReason | None:
    """Sample the rows of one sequence and append what holds; returns why it ended, or None.

    Shapes: logits [rows, vocab]. Rows after the first refused draft are dropped; their KV slots lie after the last
    computed position and are written again before anything reads them.
    """
    sequence = planned.sequence
    sequence.num_draft_tokens += len(planned.draft_token_ids)
    for row, following in _rows_with_draft(planned, logits):
        sampled = sample(row, sequence.spec, len(sequence.output_token_ids), sequence.history)
        sequence.num_computed_tokens += 1
        reason = accept(sequence, sampled, sequence.append(sampled))
        if reason is not None:
            return reason
        if sampled.token_id != following:
            return None
        sequence.num_accepted_tokens += 1
    return None


def _rows_with_draft(planned: Planned, logits: NDArray[np.float32]) -> Iterator[tuple[NDArray[np.float32], int | None]]:
    """Each row with the draft that claims to follow it; the last row has none."""
    yield from zip(logits, [*planned.draft_token_ids, None], strict=True)


def prefill_chunk(model: Model, cache: PagedKvCache, sequence: Sequence, num_tokens: int) -> NDArray[np.float32]:
    """Compute the next num_tokens of a prompt; logits of the prompt's last token when the chunk reaches it.

    Shapes: -> [0 or 1, vocab].
    """
    start = sequence.num_computed_tokens
    token_ids = sequence.prompt_token_ids[start : start + num_tokens]
    last = start + len(token_ids) == len(sequence.prompt_token_ids)
    logits = model.logits(RowBatch.from_runs([Run(token_ids, start, sequence.block_table, int(last))]), cache)
    sequence.num_computed_tokens += len(token_ids)
    return logits


def replay(model: Model, cache: PagedKvCache, sequence: Sequence, num_tokens: int) -> int:
    """Compute the KV of the next num_tokens known tokens, but not of the newest one, which the next step computes.

    Where a token of the output follows, it is chosen again and compared; returns how many came out different. Each one
    means that this process computes other bits than the one before, which must not happen.
    """
    start, num_prompt = sequence.num_computed_tokens, len(sequence.prompt_token_ids)
    end = min(start + num_tokens, sequence.num_tokens - 1)
    first = max(start + 1 - num_prompt, 0)  # of the output: position p chooses output token p + 1 - num_prompt
    chosen = sequence.output_token_ids[first : max(end + 1 - num_prompt, first)]
    run = Run(sequence.token_ids(start, end), start, sequence.block_table, len(chosen))
    logits = model.logits(RowBatch.from_runs([run]), cache)
    sequence.num_computed_tokens = end
    sequence.num_recomputed_tokens += end - start
    history = TokenHistory.of(sequence.prompt_token_ids, sequence.output_token_ids[:first])
    spec = replace(sequence.spec, logprobs=None)
    num_different = 0
    for number, (row, token_id) in enumerate(zip(logits, chosen, strict=True), first):
        num_different += sample(row, spec, number, history).token_id != token_id
        history.append(token_id)
    return num_different
