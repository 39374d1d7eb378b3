"""The time that a request may take: from its admission until it is given up, whatever its state is then.

Owns the bounds, and the sentence that a wrong value gets. Knows nothing about who gives a request up.
"""

from pipeline.errors import InvalidRequest
from pipeline.params import shown

MAX_REQUEST_TIMEOUT_S = 24 * 3600  # far above any queue that is worth waiting for


def check_time_limit(field: str, value: object) -> float:
    """Return the seconds, or raise InvalidRequest where no request can have so many."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_REQUEST_TIMEOUT_S:
        return float(value)
    allowed = f"a number of seconds above 0, at most {MAX_REQUEST_TIMEOUT_S}"
    raise InvalidRequest(field, f"must be {allowed}, got {shown(value)}")


def time_limit_ms(timeout_s: float | None) -> int:
    """Return a time limit as the scripts take it: in ms, at least one; 0 is none."""
    return 0 if timeout_s is None else max(1, round(1000 * timeout_s))
