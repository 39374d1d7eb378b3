"""What is said over the control channel of `sluice up`: one JSON line there, one JSON line back, and the end.

Owns the two requests, the two answers, and the bounds of both. Knows nothing about sockets.

    {"op": "status"}                                            -> {"slots": [...]}
    {"op": "scale", "replicas": {"decode": 3}, "timeout_s": 60} -> {"slots": [...]} when it is done, or time is up
    anything else                                               -> {"error": "a sentence", "retryable": false}
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ops.supervision.slot_status import SlotStatus
from pipeline.errors import InvalidRequest

CONTROL_SOCKET = "control.sock"
MAX_REQUEST_BYTES = 4096  # a request names each stage once
MAX_ANSWER_BYTES = 1 << 20  # five stages of 64 processes take 50 KB
MAX_WAIT_S = 600.0  # longer than any process may take to get ready


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StatusRequest(_Message):
    """Asks which processes there are."""

    op: Literal["status"] = "status"


class ScaleRequest(_Message):
    """Asks for so many processes of some stages; the others stay as they are."""

    op: Literal["scale"] = "scale"
    replicas: dict[str, Annotated[int, Field(strict=True)]]
    timeout_s: Annotated[float, Field(gt=0, le=MAX_WAIT_S)]


class SlotsAnswer(_Message):
    """All processes of the stack, in the order of the Procfile."""

    slots: tuple[SlotStatus, ...]


class ErrorAnswer(_Message):
    """Why the request was not carried out; retryable says whether the same one may be, later."""

    error: str
    retryable: bool


Request = Annotated[StatusRequest | ScaleRequest, Field(discriminator="op")]
Answer = SlotsAnswer | ErrorAnswer

_REQUEST: TypeAdapter[StatusRequest | ScaleRequest] = TypeAdapter(Request)
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


def read_request(line: bytes) -> StatusRequest | ScaleRequest:
    """Return the request of a line.

    Raises:
        InvalidRequest: it is none; names the field.
    """
    try:
        return _REQUEST.validate_json(line)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in wrong["loc"]) or "request"
    raise InvalidRequest(field, wrong["msg"])


def read_answer(line: bytes) -> Answer:
    """Return the answer of a line.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        return _ANSWER.validate_json(line)
    except ValidationError:
        raise InvalidRequest("answer", "is not one of this version of `sluice up`") from None


def write_line(message: _Message) -> bytes:
    """Return a message as a line."""
    return message.model_dump_json().encode() + b"\n"
