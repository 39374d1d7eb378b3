"""Wall time for stamps, and monotonic time for everything that waits.

Owns the two readings. Knows nothing about what is measured: durations never come from `now_us`, because
a wall clock may jump.
"""

import time
from collections.abc import Callable

Monotonic = Callable[[], float]
"""A monotonic clock in seconds; tests pass one they move by hand."""


def now_us() -> int:
    """Return the epoch time in microseconds."""
    return time.time_ns() // 1000


def monotonic_s() -> float:
    """Return seconds on a clock that never jumps; only differences mean something."""
    return time.monotonic()
