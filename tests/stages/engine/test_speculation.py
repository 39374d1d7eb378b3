"""Sample and compare: drafts save steps and never change a token, whatever the drafter says."""

from collections.abc import Sequence as Tokens

import numpy as np
import pytest

from stages.engine import stepping
from stages.engine.kv_cache import PagedKvCache
from stages.engine.model import Model
from stages.engine.sampling import SampledToken, SamplingSpec, sample
from stages.engine.sequence import EndReason, Sequence
from stages.engine.speculation.drafter import Drafter
from stages.engine.speculation.prompt_lookup import PromptLookup

PROMPT = (np.arange(1, 41) * 6007 % 49152).tolist() * 2


class Oracle:
    """Drafts what it was told, wrong at every fourth token."""

    def __init__(self, truth: Tokens[int]) -> None:
        self._truth, self._seen = list(truth), 0

    def extend(self, token_ids: Tokens[int]) -> None:
        self._seen += len(token_ids)

    def draft(self, max_tokens: int) -> list[int]:
        span = range(self._seen, min(self._seen + max_tokens, len(self._truth)))
        return [self._truth[i] if i % 4 else 1 for i in span]


def generate(
    model: Model, cache: PagedKvCache, spec: SamplingSpec, drafter: Drafter | None, max_tokens: int = 40
) -> tuple[list[SampledToken], Sequence, int]:
    """All tokens of one request, the sequence, and how many steps it took."""
    pages = cache.allocate(len(PROMPT) + max_tokens)
    sequence = Sequence(PROMPT, spec, max_tokens, frozenset(), pages, drafter=drafter)
    tokens, steps = [], 0
    logits = stepping.prefill_chunk(model, cache, sequence, len(PROMPT))
    tokens.append(sample(logits[0], spec, 0, sequence.history))
    reason = sequence.append(tokens[0])

    def accept(_: Sequence, token: SampledToken, reason: EndReason | None) -> EndReason | None:
        tokens.append(token)
        return reason

    while reason is None:
        [planned] = stepping.plan([sequence], 4)
        reason = stepping.commit(planned, stepping.run([planned], model, cache), accept)
        steps += 1
    cache.free(pages)
    return tokens, sequence, steps


@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(seed=1, temperature=0.0, logprobs=2),
        SamplingSpec(seed=1, temperature=0.8, top_p=0.95, logprobs=2),
        SamplingSpec(seed=9, temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2),
    ],
    ids=["greedy", "sampled", "penalties"],
)
def test_tokens_and_logprobs_are_equal_with_and_without_drafts(model, cache, spec) -> None:
    plain, sequence, plain_steps = generate(model, cache, spec, None)
    oracle = Oracle([token.token_id for token in plain])
    drafted, drafted_sequence, drafted_steps = generate(model, cache, spec, oracle)
    looked_up, _, _ = generate(model, cache, spec, PromptLookup(PROMPT))
    assert plain == drafted == looked_up
    assert sequence.num_draft_tokens == 0
    assert drafted_steps < plain_steps / 2
    assert drafted_steps + drafted_sequence.num_accepted_tokens == plain_steps
    assert 0 < drafted_sequence.num_accepted_tokens < drafted_sequence.num_draft_tokens


def test_another_seed_gives_another_text(model, cache) -> None:
    """The control."""
    one, _, _ = generate(model, cache, SamplingSpec(seed=1, temperature=0.8), None)
    two, _, _ = generate(model, cache, SamplingSpec(seed=2, temperature=0.8), None)
    assert one != two


def test_drafts_never_go_beyond_what_may_still_be_emitted() -> None:
    sequence = Sequence(
        [1, 2, 1, 2, 1], SamplingSpec(seed=1), 3, frozenset(), [0], drafter=PromptLookup([1, 2, 1, 2, 1])
    )
    sequence.append(SampledToken(2))
    [planned] = stepping.plan([sequence], 8)
    assert len(planned.draft_token_ids) == 1  # two tokens are left, one of them is the step's own


def test_prompt_lookup_prefers_the_longest_and_latest_match() -> None:
    lookup = PromptLookup([1, 2, 3, 7, 2, 3, 8, 1, 2, 3])
    assert lookup.draft(2) == [7, 2]  # (1, 2, 3) beats the later (2, 3)
    assert PromptLookup([5, 6, 1, 5, 6, 2, 5, 6]).draft(1) == [2]


def test_prompt_lookup_without_a_match_drafts_nothing() -> None:
    assert PromptLookup([1, 2, 3, 4]).draft(4) == []
    assert PromptLookup([1]).draft(4) == []
