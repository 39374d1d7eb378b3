"""Sampling values: every parameter reaches the sampler, and none of them the end of the text by accident."""

from pipeline.params import SamplingParams, parse_params
from stages.common.sampling_spec import end_token_ids, sampling_spec

EVERYTHING = {
    "seed": 7,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.3,
    "logprobs": 4,
}


def test_every_parameter_reaches_the_sampler() -> None:
    spec = sampling_spec(parse_params(EVERYTHING | {"logit_bias": {5: 1.5, 2: -1}}))
    assert {name: getattr(spec, name) for name in EVERYTHING} == EVERYTHING
    assert spec.logit_bias == ((2, -1.0), (5, 1.5))


def test_parameters_that_do_not_choose_tokens_are_the_only_ones_left_out() -> None:
    spec = sampling_spec(SamplingParams(seed=1))
    others = {name for name in SamplingParams.model_fields if not hasattr(spec, name)}
    assert others == {"stop", "max_tokens", "ignore_eos"}


def test_defaults_change_no_logits() -> None:
    assert not sampling_spec(SamplingParams(seed=1)).changes_logits


def test_the_end_of_generation_can_be_ignored() -> None:
    assert end_token_ids(SamplingParams(seed=1), frozenset({3})) == {3}
    assert end_token_ids(SamplingParams(seed=1, ignore_eos=True), frozenset({3})) == frozenset()
