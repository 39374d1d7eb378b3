"""What is known about one slot of a stack, as the supervisor says it to others.

Owns the words for a slot's state. Knows nothing about how it is found out.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

SlotState = Literal["starting", "ready", "backing_off", "stopping"]


class SlotStatus(BaseModel):
    """One place for a process, whichever fills it at the moment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """The stage's name for its first process, stage-2, stage-3, ... for the others."""
    stage: str
    pid: int | None
    """None while no process runs."""
    state: SlotState
    num_restarts: int
    uptime_s: float | None
    """Age of the process."""

    @property
    def ready(self) -> bool:
        """Whether it works."""
        return self.state == "ready"
