"""What deaths of a process mean: when it is started again, and when it is given up, with which words.

Owns the arithmetic of back-off. Knows nothing about how processes are started or stopped.
"""

from dataclasses import dataclass
from typing import ClassVar

from ops.supervision.process import ProcessLog
from pipeline.errors import SluiceError

SHOWN_LINES = 12


class StageFailed(SluiceError):  # noqa: N818 - reads as the fact it states
    """A process cannot be kept running; carries the last lines it wrote."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "stage_failed"

    def __init__(self, name: str, problem: str, log: ProcessLog) -> None:
        self.name = name
        self.problem = problem
        self.last_lines = log.last_lines()
        shown = self.last_lines[-SHOWN_LINES:]
        said = "\n".join(f"  {line}" for line in shown) if shown else "  (it wrote nothing)"
        super().__init__(f"{name} {problem}. Its last lines, from {log.path}:\n{said}")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a process that died is started again, and when it is given up."""

    first_delay_s: float = 0.5
    max_delay_s: float = 10.0
    calm_s: float = 30.0
    """A process that was ready this long starts with a clean record."""
    max_unready: int = 3
    """Deaths in a row without becoming ready."""
    max_in_a_row: int = 20
    """Deaths in a row at all: above what a few poisonous requests cause before they are dead letters."""
    ready_timeout_s: float = 300.0
    """Time to load a model, and to compile kernels with an empty cache."""


@dataclass(slots=True)
class CrashRecord:
    """The deaths of one process in a row."""

    policy: RestartPolicy
    num_deaths: int = 0
    num_unready: int = 0

    def died(self, *, was_ready: bool, ready_s: float) -> float | None:
        """Count a death; return the seconds to wait before the restart, or None to give up."""
        if was_ready and ready_s >= self.policy.calm_s:
            self.num_deaths = 0
        self.num_deaths += 1
        self.num_unready = 0 if was_ready else self.num_unready + 1
        if self.num_unready >= self.policy.max_unready or self.num_deaths >= self.policy.max_in_a_row:
            return None
        return min(self.policy.first_delay_s * 2 ** (self.num_deaths - 1), self.policy.max_delay_s)
