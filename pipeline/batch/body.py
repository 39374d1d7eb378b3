"""The body of an OpenAI chat or completions request, read strictly: every field is used or refused.

Owns the field names of the two endpoints and how they map to our parameters. Knows nothing about batch
files or HTTP. Every refusal is an InvalidRequest that names the field as its author wrote it. A null is the
same as an absent field, as OpenAI's own schema has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from pipeline.errors import InvalidRequest
from pipeline.messages import ChatMessage
from pipeline.params import SamplingParams, is_unicode, parse_params, shown, unknown_name
from pipeline.time_limit import check_time_limit

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)

_ROLES = ("system", "user", "assistant")
_PASSED_ON = frozenset(SamplingParams.model_fields) - {"max_tokens", "logprobs"}
_COMMON = _PASSED_ON | {"model", "max_tokens", "logprobs", "n", "stream", "user", "speculate", "timeout_s"}
_FIELDS: Mapping[Endpoint, frozenset[str]] = {
    "/v1/chat/completions": _COMMON | {"messages", "max_completion_tokens", "top_logprobs"},
    "/v1/completions": _COMMON | {"prompt"},
}


class WrongModel(InvalidRequest):
    """The request is for a model that this stack does not serve."""

    code = "wrong_model"


@dataclass(frozen=True, slots=True)
class RequestBody:
    """What a body asks for; exactly one of prompt and messages is set."""

    prompt: str | None
    messages: tuple[ChatMessage, ...] | None
    params: SamplingParams
    speculate: bool
    timeout_s: float | None = None
    """The time from its admission until it is given up; None is no limit."""


def parse_body(endpoint: Endpoint, body: Mapping[str, object], model: str) -> RequestBody:
    """Return what the body asks of a stack that serves `model`, or raise InvalidRequest."""
    _refuse_unknown(endpoint, body)
    fields = {name: value for name, value in body.items() if value is not None}
    _check_model(fields, model)
    _check_fixed(fields)
    chat = endpoint == "/v1/chat/completions"
    return RequestBody(
        prompt=None if chat else _prompt(fields),
        messages=_messages(fields) if chat else None,
        params=_chat_params(fields) if chat else parse_params(_sampling(fields)),
        speculate=_flag(fields, "speculate", default=True),
        timeout_s=check_time_limit("timeout_s", fields["timeout_s"]) if "timeout_s" in fields else None,
    )


def _refuse_unknown(endpoint: Endpoint, body: Mapping[str, object]) -> None:
    known = _FIELDS[endpoint]
    for name in body:
        if name in known:
            continue
        for other in ENDPOINTS:
            if name in _FIELDS[other]:
                raise InvalidRequest(name, f"belongs to {other}, not to {endpoint}")
        raise InvalidRequest(name, unknown_name(name, known))


def _check_model(fields: Mapping[str, object], model: str) -> None:
    named = fields.get("model")
    if named is None:
        raise InvalidRequest("model", f"is missing; this stack serves {model}")
    if named != model:
        raise WrongModel("model", f"this stack serves {model}, got {shown(named)}")


def _check_fixed(fields: Mapping[str, object]) -> None:
    choices = fields.get("n", 1)
    if isinstance(choices, bool) or choices != 1:
        raise InvalidRequest("n", f"must be 1, got {shown(choices)}; ask several times with other seeds")
    if fields.get("stream", False) is not False:
        raise InvalidRequest("stream", f"must be false or absent, got {shown(fields['stream'])}")
    if not isinstance(fields.get("user", ""), str):
        raise InvalidRequest("user", f"must be a string, got {shown(fields['user'])}")


def _prompt(fields: Mapping[str, object]) -> str:
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        raise InvalidRequest("prompt", "must be one string, got a list; send one request for each prompt")
    text = _text("prompt", prompt)
    if not text:
        raise InvalidRequest("prompt", "is empty")
    return text


def _messages(fields: Mapping[str, object]) -> tuple[ChatMessage, ...]:
    value = fields.get("messages")
    if value is None:
        raise InvalidRequest("messages", "is missing")
    if not isinstance(value, list):
        raise InvalidRequest("messages", f"must be a list of messages, got {shown(value)}")
    entries = cast("list[object]", value)
    messages = tuple(_message(f"messages[{index}]", entry) for index, entry in enumerate(entries))
    if not any(message.content for message in messages):
        raise InvalidRequest("messages", "is empty" if not messages else "has no text in any message")
    return messages


def _message(where: str, value: object) -> ChatMessage:
    if not isinstance(value, dict):
        raise InvalidRequest(where, f"must be an object with role and content, got {shown(value)}")
    message = cast("dict[str, object]", value)
    for name in message:
        if name not in ("role", "content"):
            raise InvalidRequest(f"{where}.{name}", "is not known; a message has role and content")
    role = message.get("role")
    for known in _ROLES:
        if role == known:
            return ChatMessage(role=known, content=_text(f"{where}.content", message.get("content")))
    raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {shown(role)}")


def _text(where: str, value: object) -> str:
    if value is None:
        raise InvalidRequest(where, "is missing")
    if not isinstance(value, str):
        raise InvalidRequest(where, f"must be a string, got {shown(value)}")
    if not is_unicode(value):
        raise InvalidRequest(where, "holds half a surrogate pair, which is not Unicode text")
    return value


def _chat_params(fields: Mapping[str, object]) -> SamplingParams:
    """Map chat's own names to ours, and the names in refusals back."""
    values, written = _sampling(fields), dict[str, str]()
    if "max_completion_tokens" in fields:
        if fields.get("max_tokens", fields["max_completion_tokens"]) != fields["max_completion_tokens"]:
            raise InvalidRequest("max_completion_tokens", "differs from max_tokens; give one of them")
        values["max_tokens"] = fields["max_completion_tokens"]
        written["max_tokens"] = "max_completion_tokens"
    wanted = _flag(fields, "logprobs", default=False)
    if "top_logprobs" in fields and not wanted:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    values["logprobs"] = fields.get("top_logprobs", 0) if wanted else None
    written["logprobs"] = "top_logprobs"
    try:
        return parse_params(values)
    except InvalidRequest as error:
        raise InvalidRequest(written.get(error.field, error.field), error.message) from None


def _sampling(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name in SamplingParams.model_fields}


def _flag(fields: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"must be true or false, got {shown(value)}")
    return value
