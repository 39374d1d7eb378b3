"""What a call of the client may be given: ids, positions, counts and times.

Owns the sentence that a wrong one gets, before anything is sent. Knows nothing about what is generated (asks.py).
"""

from collections.abc import Iterable

from pydantic import TypeAdapter, ValidationError

from pipeline.errors import InvalidRequest
from pipeline.messages import MAX_ID_CHARS, RequestId
from pipeline.params import shown

MAX_POSITION = 2**64 - 1  # a position is half of a stream entry's id
_REQUEST_ID = TypeAdapter[str](RequestId)


def check_id(request_id: object, field: str = "request_id") -> str:
    """Return an id, or raise InvalidRequest where nothing can have it."""
    try:
        return _REQUEST_ID.validate_python(request_id, strict=True)
    except ValidationError:
        allowed = f"1 to {MAX_ID_CHARS} letters, digits and characters of _.:-"
        raise InvalidRequest(field, f"must have {allowed}, got {shown(request_id)}") from None


def check_ids(request_ids: Iterable[object]) -> list[str]:
    """Return ids, each once, or raise InvalidRequest where nothing can have one of them."""
    return list(dict.fromkeys(check_id(request_id, "request_ids") for request_id in request_ids))


def check_position(after: object) -> None:
    """Raise InvalidRequest unless it is a number of tokens that a result may have."""
    if isinstance(after, bool) or not isinstance(after, int) or not 0 <= after <= MAX_POSITION:
        raise InvalidRequest("after", f"must be a number of tokens from 0 on, below 2^64, got {shown(after)}")


def check_num_at_a_time(num: object) -> None:
    """Raise InvalidRequest unless so many things can be under way."""
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise InvalidRequest("num_at_a_time", f"must be a whole number from 1 on, got {shown(num)}")


def check_timeout(timeout_s: object) -> None:
    """Raise InvalidRequest unless one can wait so long; infinity is allowed."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:  # NaN is not
        raise InvalidRequest("timeout_s", f"must be a number of seconds from 0 on, got {shown(timeout_s)}")
