"""One sampler for every path: token n of a request is a function of its logits, its tokens so far and (seed, n).

Order of processing (docs/arithmetic.md): logit bias; repetition penalty over prompt and output; frequency and presence
penalties over output; temperature; top-k; min-p; top-p; then the inverse of the cumulative distribution in order of
token id, at the uniform number keyed by (seed, n). Below temperature 1e-5 the largest processed logit wins. Ties go to
the lower id everywhere. Logprobs are those of the unprocessed logits. No state but the tokens themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stages.engine import sampling_kernels as kernels

Logits = NDArray[np.float32]
_TWO_TO_53 = 9007199254740992.0
# Below it the largest logit wins by so much that dividing would only overflow.
SMALLEST_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How to choose tokens; the meaning and range of each field is that of `pipeline.params.SamplingParams`."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters acts before the choice."""
        penalised = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )
        return penalised or bool(self.logit_bias)


@dataclass(slots=True)
class TokenHistory:
    """Tokens that penalties look at: distinct prompt ids, and how often each output id occurred."""

    prompt_ids: frozenset[int]
    output_counts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int] = ()) -> "TokenHistory":
        """History of a request that has emitted those tokens."""
        history = cls(frozenset(prompt_token_ids))
        for token_id in output_token_ids:
            history.append(token_id)
        return history

    def append(self, token_id: int) -> None:
        """Count one more output token."""
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token and, if asked for, its logprob and the best alternatives as (id, logprob)."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: Logits, spec: SamplingSpec, position: int, history: TokenHistory) -> SampledToken:
    """Choose output token number `position` (from 0). Shapes: logits [vocab], unprocessed, left unchanged."""
    processed = _process(logits, spec, history) if spec.changes_logits else logits
    if spec.temperature < SMALLEST_TEMPERATURE:
        token_id = int(kernels.first_largest(processed))
    else:
        token_id = _draw(processed, spec, uniform(spec.seed, position))
    if spec.logprobs is None:
        return SampledToken(token_id)
    return _with_logprobs(logits, token_id, spec.logprobs)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) keyed by (seed, position): Philox 4x64-10 (Salmon et al., SC 2011), first 53 bits."""
    return float(np.random.Philox(key=seed, counter=position).random_raw() >> 11) / _TWO_TO_53


def _process(logits: Logits, spec: SamplingSpec, history: TokenHistory) -> Logits:
    out = logits.copy()
    for token_id, bias in spec.logit_bias:
        out[token_id] += np.float32(bias)
    if spec.repetition_penalty != 1.0:
        seen = np.array(sorted(history.prompt_ids | history.output_counts.keys()), np.int64)
        factor = np.float32(spec.repetition_penalty)
        out[seen] = np.where(out[seen] > 0, out[seen] / factor, out[seen] * factor)
    if history.output_counts and (spec.frequency_penalty or spec.presence_penalty):
        ids = np.array(sorted(history.output_counts), np.int64)
        counts = np.array([history.output_counts[i] for i in ids.tolist()], np.float32)
        out[ids] -= counts * np.float32(spec.frequency_penalty) + np.float32(spec.presence_penalty)
    return out


def _draw(logits: Logits, spec: SamplingSpec, u: float) -> int:
    weights = np.empty_like(logits)
    kernels.softmax_weights(logits, np.float32(1.0 / spec.temperature), weights, np.empty(len(logits), np.int32))
    if 0 < spec.top_k < len(logits):
        threshold = np.partition(logits, len(logits) - spec.top_k)[len(logits) - spec.top_k]
        kernels.keep_top_k(logits, weights, threshold, spec.top_k)
    if spec.min_p > 0.0:
        weights[weights < np.float32(spec.min_p)] = 0  # the largest weight is 1
    if spec.top_p < 1.0:
        _keep_nucleus(weights, spec.top_p)
    return int(kernels.invert_cumulative(weights, u))


def _keep_nucleus(weights: NDArray[np.float32], top_p: float) -> None:
    """Zero all but the smallest set of largest weights whose sum reaches top_p of the total."""
    target = kernels.sequential_sum(weights) * top_p
    # Only a few tokens matter, so sort the best 256 and take more only if they do not reach the target.
    count = 256
    while True:
        count = min(count, len(weights))
        threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
        candidates = np.flatnonzero(weights >= max(threshold, np.finfo(np.float32).tiny))
        order = candidates[np.argsort(-weights[candidates], kind="stable")]  # ties: lower id first
        reached = kernels.length_to_reach(weights[order], target)
        if reached or count == len(weights):
            break
        count *= 8
    kept = order[:reached] if reached else order
    values = weights[kept].copy()
    weights[:] = 0
    weights[kept] = values


def _with_logprobs(logits: Logits, token_id: int, num_top: int) -> SampledToken:
    normaliser = kernels.log_normaliser(logits, np.empty_like(logits), np.empty(len(logits), np.int32))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        threshold = np.partition(logits, len(logits) - num_top)[len(logits) - num_top]
        candidates = np.flatnonzero(logits >= threshold)
        best = candidates[np.argsort(-logits[candidates], kind="stable")][:num_top]
        top = tuple((int(i), float(logits[i]) - normaliser) for i in best)
    return SampledToken(token_id, float(logits[token_id]) - normaliser, top)
