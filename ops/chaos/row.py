"""One row of the matrix: a fault, what is expected, and how to find out.

Owns the shape of a row and of its result. Knows nothing about any one row.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from ops.chaos.lab import Lab

Verdict = Literal["passed", "FAILED", "not run"]
LIMIT_S = 240.0  # a few starts of processes on a busy machine
LONG_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Row:
    """A fault and its proof; `run` leaves what it found with the lab, and what it raises is a problem too."""

    id: str
    fault: str
    expected: str
    run: Callable[[Lab], Awaitable[None]]
    real: bool = False
    """Whether it says little on a model that is not real."""
    limit_s: float = LIMIT_S


@dataclass(frozen=True, slots=True)
class RowResult:
    """What became of a row."""

    id: str
    fault: str
    expected: str
    verdict: Verdict
    happened: str
    """Numbers, in words."""
    problems: tuple[str, ...]
    wall_s: float
