"""Sampling parameters: what is accepted, what it becomes, and what a refusal says."""

import math
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.errors import InvalidRequest
from pipeline.params import MAX_SEED, SamplingParams, parse_params, shown

REFUSALS = [
    ({"temperature": 3.5}, "temperature: must be between 0 and 2, got 3.5"),
    ({"temperature": -0.1}, "temperature: must be between 0 and 2, got -0.1"),
    ({"temperature": True}, "temperature: must be a number, got true"),
    ({"temperature": "1"}, "temperature: must be a number, got '1'"),
    ({"temperature": None}, "temperature: must be a number, got null"),
    ({"temperature": math.nan}, "temperature: must be a finite number, got nan"),
    ({"temperature": math.inf}, "temperature: must be a finite number, got inf"),
    ({"temperature": 10**400}, "temperature: must be between 0 and 2, got an integer of 1329 bits"),
    ({"temperature": [1]}, "temperature: must be a number, got a list"),
    ({"top_p": 0}, "top_p: must be greater than 0 and at most 1, got 0"),
    ({"top_p": 1.01}, "top_p: must be greater than 0 and at most 1, got 1.01"),
    ({"top_k": -2}, "top_k: must be 0 or -1 (off), or between 1 and 2147483647, got -2"),
    ({"top_k": 1.0}, "top_k: must be an integer, got 1.0"),
    ({"min_p": 2}, "min_p: must be between 0 and 1, got 2"),
    ({"repetition_penalty": 0}, "repetition_penalty: must be between 0.01 and 2, got 0"),
    ({"presence_penalty": 2.5}, "presence_penalty: must be between -2 and 2, got 2.5"),
    ({"frequency_penalty": -2.5}, "frequency_penalty: must be between -2 and 2, got -2.5"),
    ({"seed": -1}, "seed: must be between 0 and 9223372036854775807, got -1"),
    ({"seed": MAX_SEED + 1}, "seed: must be between 0 and 9223372036854775807, got 9223372036854775808"),
    ({"seed": False}, "seed: must be an integer, got false"),
    ({"max_tokens": 0}, "max_tokens: must be between 1 and 2147483647, got 0"),
    ({"logprobs": 21}, "logprobs: must be between 0 and 20, got 21"),
    ({"logprobs": True}, "logprobs: must be an integer, got true"),
    ({"ignore_eos": 1}, "ignore_eos: must be true or false, got 1"),
    ({"stop": ""}, "stop: each string must have 1 to 256 characters, got 0"),
    ({"stop": ["x" * 257]}, "stop: each string must have 1 to 256 characters, got 257"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop: must hold at most 4 strings, got 5"),
    ({"stop": ["a", 5]}, "stop: must hold strings only, got 5"),
    ({"stop": 5}, "stop: must be a string or a list of strings, got 5"),
    ({"stop": "\ud800"}, "stop: holds half a surrogate pair, which is not Unicode text"),
    ({"logit_bias": []}, "logit_bias: must be an object of token id to bias, got a list"),
    ({"logit_bias": {"5": 101}}, "logit_bias: the bias of token 5 must be between -100 and 100, got 101"),
    ({"logit_bias": {5: math.nan}}, "logit_bias: the bias of token 5 must be a finite number, got nan"),
    ({"logit_bias": {"x": 1}}, "logit_bias: each key must be a token id, got 'x'"),
    ({"logit_bias": {"05": 1}}, "logit_bias: each key must be a token id, got '05'"),
    ({"logit_bias": {"٥": 1}}, "logit_bias: each key must be a token id, got '٥'"),
    ({"logit_bias": {-1: 1}}, "logit_bias: each key must be a token id, got -1"),
    ({"logit_bias": {"5": 1, 5: 1}}, "logit_bias: names a token id twice, as a number and as a string"),
    ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias: must hold at most 300 entries, got 301"),
    ({"temprature": 1}, "temprature: is not a known parameter; did you mean temperature?"),
    ({"min_tokens": 1}, "min_tokens: is not a known parameter; did you mean max_tokens?"),
]


@pytest.mark.parametrize(("values", "message"), REFUSALS, ids=[message[:50] for _, message in REFUSALS])
def test_refusal_names_the_field_what_is_allowed_and_what_was_given(values: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_params(values)
    assert str(refusal.value) == message
    assert refusal.value.field == next(iter(values))


def test_unknown_parameter_with_no_near_name_lists_all() -> None:
    with pytest.raises(InvalidRequest, match=r"beam_width: is not a known parameter; known: frequency_penalty, "):
        parse_params({"beam_width": 4})


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": -0.0}, "temperature", 0.0),
        ({"top_k": -1}, "top_k", 0),
        ({"stop": "\n\n"}, "stop", ("\n\n",)),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop": []}, "stop", ()),
        ({"logit_bias": {"9": 1, "5": -100}}, "logit_bias", {5: -100.0, 9: 1.0}),
        ({"seed": MAX_SEED}, "seed", MAX_SEED),
        ({"logprobs": 0}, "logprobs", 0),
        ({"max_tokens": None}, "max_tokens", None),
    ],
)
def test_accepted_values_are_normalised(values: dict[str, object], field: str, expected: object) -> None:
    value = getattr(parse_params(values), field)
    assert value == expected
    assert repr(value) == repr(expected)


def test_defaults_change_nothing() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.logit_bias, params.stop, params.ignore_eos) == ({}, (), False)
    assert (params.seed, params.max_tokens, params.logprobs) == (None, None, None)


def test_parameters_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        SamplingParams().temperature = 2.0  # pyright: ignore[reportAttributeAccessIssue]


parameters = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 100_000),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=5),
    seed=st.none() | st.integers(0, MAX_SEED),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=4),
    max_tokens=st.none() | st.integers(1, 10_000),
    logprobs=st.none() | st.integers(0, 20),
)


@settings(derandomize=True, deadline=None)
@given(parameters)
def test_a_dump_reads_back_as_the_same_parameters(params: SamplingParams) -> None:
    assert SamplingParams.model_validate(params.model_dump()) == params
    assert SamplingParams.model_validate_json(params.model_dump_json()) == params


def test_a_dump_has_string_keys_only() -> None:
    assert SamplingParams(logit_bias={7: 1}).model_dump()["logit_bias"] == {"7": 1.0}


@settings(derandomize=True, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(SamplingParams.model_fields)), st.from_type(type).flatmap(st.from_type)))
def test_whatever_is_given_comes_out_as_parameters_or_as_a_refusal(values: dict[str, object]) -> None:
    with suppress(InvalidRequest):  # and nothing else
        assert isinstance(parse_params(values), SamplingParams)


def test_a_long_value_is_not_repeated_in_full() -> None:
    assert len(shown("x" * 10_000)) < 60
    assert len(shown(list(range(10_000)))) < 60
