"""Sampling parameters: what a request may ask of the sampler, and the sentence a wrong value gets.

Owns the names, ranges and defaults; every boundary (batch lines, command line, client) goes through
`parse_params`. Knows nothing about models, vocabularies or how the sampler uses the values.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError
from pydantic_core import PydanticCustomError

from pipeline.errors import InvalidRequest

MAX_STOP_STRINGS = 4  # as OpenAI
MAX_STOP_CHARS = 256  # bounds the text that decode holds back while a match may still grow
MAX_LOGIT_BIASES = 300  # as OpenAI; they are applied one by one in every step
MAX_LOGPROBS = 20  # as OpenAI
MAX_INT = 2**31 - 1  # token ids and token counts are int32 everywhere else
MAX_SEED = 2**63 - 1  # fits a signed 64-bit integer, which every client can write

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_SHOWN_CHARS = 40  # a wrong value is repeated to its author, but not a page of it


def shown(value: object) -> str:
    """Return the value as an error message repeats it: one short line, in JSON's words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[: _SHOWN_CHARS + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def _refused(reason: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{reason}", {"reason": reason})


def _number(low: float, high: float, *, above_low: bool = False) -> Callable[[object], float]:
    allowed = f"greater than {low} and at most {high}" if above_low else f"between {low} and {high}"

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refused(f"must be a number, got {shown(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise _refused(f"must be a finite number, got {value}")
        if not low <= value <= high or (above_low and value == low):
            raise _refused(f"must be {allowed}, got {shown(value)}")
        return float(value) + 0.0  # -0.0 becomes 0.0

    return check


def _integer(low: int, high: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refused(f"must be an integer, got {shown(value)}")
        if not low <= value <= high:
            raise _refused(f"must be between {low} and {high}, got {shown(value)}")
        return value

    return check


def _optional(check: Callable[[object], int]) -> Callable[[object], int | None]:
    return lambda value: None if value is None else check(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _refused(f"must be true or false, got {shown(value)}")
    return value


def _top_k(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(f"must be an integer, got {shown(value)}")
    if not -1 <= value <= MAX_INT:
        raise _refused(f"must be 0 or -1 (off), or between 1 and {MAX_INT}, got {shown(value)}")
    return max(value, 0)


def _stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise _refused(f"must be a string or a list of strings, got {shown(value)}")
    strings = tuple(cast("list[object] | tuple[object, ...]", value))
    if len(strings) > MAX_STOP_STRINGS:
        raise _refused(f"must hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    return tuple(_stop_string(string) for string in strings)


def _stop_string(value: object) -> str:
    if not isinstance(value, str):
        raise _refused(f"must hold strings only, got {shown(value)}")
    if not 1 <= len(value) <= MAX_STOP_CHARS:
        raise _refused(f"each string must have 1 to {MAX_STOP_CHARS} characters, got {len(value)}")
    if not is_unicode(value):
        raise _refused("holds half a surrogate pair, which is not Unicode text")
    return value


def is_unicode(text: str) -> bool:
    """Return whether the text can be written as UTF-8; JSON escapes can smuggle half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refused(f"must be an object of token id to bias, got {shown(value)}")
    biases = cast("Mapping[object, object]", value)
    if len(biases) > MAX_LOGIT_BIASES:
        raise _refused(f"must hold at most {MAX_LOGIT_BIASES} entries, got {len(biases)}")
    checked = {_token_id(key): _bias(key, bias) for key, bias in biases.items()}
    if len(checked) < len(biases):
        raise _refused("names a token id twice, as a number and as a string")
    return dict(sorted(checked.items()))


def _token_id(key: object) -> int:
    if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key <= MAX_INT:
        raise _refused(f"each key must be a token id, got {shown(key)}")
    return key


_check_bias = _number(-100, 100)


def _bias(key: object, value: object) -> float:
    try:
        return _check_bias(value)
    except PydanticCustomError as error:
        raise _refused(f"the bias of token {key} {error.message()}") from None


def _string_keys(biases: dict[int, float]) -> dict[str, float]:
    return {str(token_id): bias for token_id, bias in biases.items()}


_WITH_STRING_KEYS = PlainSerializer(_string_keys, return_type=dict[str, float])


class SamplingParams(BaseModel):
    """How the tokens of one request are chosen, and when the request ends.

    Bools are not numbers and strings are not numbers. Values are normalised (`top_k` -1 becomes 0, a single
    stop string a tuple, biases sorted by token id), so equal requests are equal objects. A dump has string
    keys in `logit_bias`, because neither JSON nor the wire has integer keys; both are read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, BeforeValidator(_number(0, 2))] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, BeforeValidator(_number(0, 1, above_low=True))] = 1.0
    top_k: Annotated[int, BeforeValidator(_top_k)] = 0
    """0 is off."""
    min_p: Annotated[float, BeforeValidator(_number(0, 1))] = 0.0
    repetition_penalty: Annotated[float, BeforeValidator(_number(0.01, 2))] = 1.0
    presence_penalty: Annotated[float, BeforeValidator(_number(-2, 2))] = 0.0
    frequency_penalty: Annotated[float, BeforeValidator(_number(-2, 2))] = 0.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias), _WITH_STRING_KEYS] = {}
    seed: Annotated[int | None, BeforeValidator(_optional(_integer(0, MAX_SEED)))] = None
    """None until admission, which draws one."""
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop)] = ()
    max_tokens: Annotated[int | None, BeforeValidator(_optional(_integer(1, MAX_INT)))] = None
    """None is the stack's default."""
    ignore_eos: Annotated[bool, BeforeValidator(_flag)] = False
    logprobs: Annotated[int | None, BeforeValidator(_optional(_integer(0, MAX_LOGPROBS)))] = None
    """None is off; n is the chosen token's and n alternatives."""


def parse_params(values: Mapping[str, object]) -> SamplingParams:
    """Return the parameters, or raise InvalidRequest that names the first wrong field and what it allows."""
    try:
        return SamplingParams.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    field = str(first["loc"][0]) if first["loc"] else "params"
    if first["type"] == "extra_forbidden":
        raise InvalidRequest(field, unknown_name(field, SamplingParams.model_fields))
    raise InvalidRequest(field, first["msg"])


def unknown_name(name: str, known: Mapping[str, object] | frozenset[str]) -> str:
    """Return the sentence for a parameter that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name[:100], sorted(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
    return f"is not a known parameter{hint}"
