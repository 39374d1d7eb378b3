"""What a client wants generated, and the request that is made of it.

Owns request ids, the seeds of requests that have none, and the sentence that a wrong argument gets. Knows nothing
about sending.
"""

import hashlib
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

from pydantic import ValidationError

from pipeline.batch.record import BATCH_ID_PREFIX
from pipeline.boundaries import SUBMITTED
from pipeline.client.arguments import check_id
from pipeline.clock import now_us
from pipeline.errors import InvalidRequest, WireError
from pipeline.keys import PRIORITIES, Priority
from pipeline.messages import ChatMessage, GenerateRequest, Stamp
from pipeline.params import MAX_SEED, SamplingParams, is_unicode, parse_params, shown
from pipeline.time_limit import check_time_limit
from pipeline.wire import pack

ID_CHARS = 26  # 134 bits: nobody guesses one, and no two are equal


class Ask(Protocol):
    """What a client wants generated; a batch line is one. Exactly one of prompt and messages is set."""

    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def prompt(self) -> str | None: ...  # noqa: D102
    @property
    def messages(self) -> tuple[ChatMessage, ...] | None: ...  # noqa: D102
    @property
    def params(self) -> SamplingParams: ...  # noqa: D102
    @property
    def speculate(self) -> bool: ...  # noqa: D102
    @property
    def timeout_s(self) -> float | None: ...  # noqa: D102


class Sampling(TypedDict, total=False):
    """The sampling parameters by name; params.py has their ranges and defaults."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float]
    seed: int | None
    stop: str | Sequence[str]
    max_tokens: int | None
    ignore_eos: bool
    logprobs: int | None


@dataclass(frozen=True, slots=True)
class NewRequest:
    """An Ask that is not a batch line; make_ask checks what it is made of."""

    model: str
    prompt: str | None
    messages: tuple[ChatMessage, ...] | None
    params: SamplingParams
    speculate: bool = True
    request_id: str | None = None
    """None draws one."""
    timeout_s: float | None = None
    """The time from its admission until it is given up; None is no limit."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request that the queue has."""

    request_id: str
    seed: int
    created_s: int
    """Epoch seconds."""
    started_at: float
    """On the client's monotonic clock, before the request was sent."""
    existed: bool = False
    """The server knew the id already: from an earlier call, or from a try of this one whose answer was lost."""


def make_ask(
    prompt: str | None = None,
    *,
    model: str,
    messages: Sequence[ChatMessage | Mapping[str, str]] | None = None,
    speculate: bool = True,
    request_id: str | None = None,
    time_limit_s: float | None = None,
    **sampling: Unpack[Sampling],
) -> NewRequest:
    """Return what to enqueue, checked as far as it can be without the model.

    Args:
        prompt: text to continue, as it is.
        model: what the stack was started with: a model's name, or the path of its file.
        messages: a chat instead of a prompt: role (system, user, assistant) and content of each turn.
        speculate: False turns drafts off; the text is the same.
        request_id: an id of your own, for calls that may be repeated; one is drawn by default.
        time_limit_s: how long the request may take from its admission on; then it fails with `deadline_exceeded`.
        sampling: temperature, top_p, max_tokens, seed, stop and so on.

    Raises:
        InvalidRequest: `field` is the argument, the message what it allows.
    """
    if not isinstance(model, str) or not model:  # pyright: ignore[reportUnnecessaryIsInstance] - users may not check
        raise InvalidRequest("model", f"must be the name of a model, got {shown(model)}")
    check_text("model", model)
    if (prompt is None) == (messages is None):
        raise InvalidRequest("prompt", "is missing" if prompt is None else "and messages exclude each other")
    if not isinstance(speculate, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest("speculate", f"must be true or false, got {shown(speculate)}")
    if request_id is not None:
        check_new_id(request_id)
    if prompt is not None:
        check_text("prompt", prompt)
    turns = None if messages is None else tuple(_turn(index, turn) for index, turn in enumerate(messages))
    if turns is not None and not any(turn.content for turn in turns):
        raise InvalidRequest("messages", "has no text in any message" if turns else "is empty")
    timeout_s = None if time_limit_s is None else check_time_limit("time_limit_s", time_limit_s)
    return NewRequest(model, prompt, turns, parse_params(sampling), speculate, request_id, timeout_s)


def check_text(field: str, text: object) -> None:
    """Raise InvalidRequest unless it is text that has a character and can be written as UTF-8."""
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be a string, got {shown(text)}")
    if not text:
        raise InvalidRequest(field, "is empty")
    if not is_unicode(text):
        raise InvalidRequest(field, "is not Unicode text: it holds half a surrogate pair")


def check_new_id(request_id: str) -> None:
    """Raise InvalidRequest unless a request may have this id."""
    check_id(request_id)
    if request_id.startswith(BATCH_ID_PREFIX):
        raise InvalidRequest("request_id", f"begins with {BATCH_ID_PREFIX}, as only ids of batches do")


def check_priority(priority: str) -> None:
    """Raise InvalidRequest unless there is such a priority."""
    if priority not in PRIORITIES:
        raise InvalidRequest("priority", f"must be {' or '.join(PRIORITIES)}, got {shown(priority)}")


def new_request(ask: Ask, priority: Priority, request_id: str) -> GenerateRequest:
    """Return the message for an ask.

    A seed that is missing is drawn from the id: random as the ids that are drawn here, and the same again where a call
    with an id of the caller's is repeated, whichever of them gets through. The attempt is the time: an id that comes
    again, after its results expired, has a larger one than whatever the stages still hold of the request before.
    """
    at_us = now_us()
    seed = _seed_of(request_id) if ask.params.seed is None else ask.params.seed
    return GenerateRequest(
        request_id=request_id,
        attempt=at_us // 1_000_000,
        priority=priority,
        model=ask.model,
        prompt=ask.prompt,
        messages=ask.messages,
        params=ask.params.model_copy(update={"seed": seed}),
        speculate=ask.speculate,
        stamps=(Stamp(boundary=SUBMITTED, at_us=at_us),),
    )


def packed(request: GenerateRequest) -> bytes:
    """Return the bytes of a request, or raise InvalidRequest where no stage would read so many."""
    try:
        return pack(request)
    except WireError as error:
        raise InvalidRequest("prompt" if request.messages is None else "messages", error.detail) from None


def new_request_id() -> str:
    """Return an id that nobody has and nobody can guess."""
    alphabet = string.ascii_lowercase + string.digits
    return "req_" + "".join(secrets.choice(alphabet) for _ in range(ID_CHARS))


def _turn(index: int, turn: ChatMessage | Mapping[str, str]) -> ChatMessage:
    where = f"messages[{index}]"
    try:
        message = turn if isinstance(turn, ChatMessage) else ChatMessage.model_validate(dict(turn))
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRequest(".".join([where, *map(str, wrong["loc"])]), wrong["msg"]) from None
    except (TypeError, ValueError):
        raise InvalidRequest(where, f"must have role and content, got {shown(turn)}") from None
    if message.content:
        check_text(f"{where}.content", message.content)
    return message


def _seed_of(request_id: str) -> int:
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") & MAX_SEED
