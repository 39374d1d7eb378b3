"""From the sampling parameters a user writes to the values the engine samples with."""

from pipeline.params import SamplingParams
from stages.engine.sampling import SamplingSpec


def sampling_spec(params: SamplingParams) -> SamplingSpec:
    """Values for the engine; the seed was resolved at admission."""
    assert params.seed is not None, "admission resolves the seed"
    return SamplingSpec(
        seed=params.seed,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        logprobs=params.logprobs,
    )


def end_token_ids(params: SamplingParams, end_of_generation_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end this request's text."""
    return frozenset() if params.ignore_eos else end_of_generation_ids
