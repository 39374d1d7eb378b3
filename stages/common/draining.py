"""How long a stage that was told to stop goes on with what it has in hand."""

import asyncio

from pipeline.clock import Monotonic, monotonic_s


class Drain:
    """The time between a stop and the hand-over of what is not finished."""

    def __init__(self, stopping: asyncio.Event, drain_s: float, monotonic: Monotonic = monotonic_s) -> None:
        """Begin when `stopping` is seen set, and last drain_s seconds from then."""
        self._stopping = stopping
        self._drain_s = drain_s
        self._monotonic = monotonic
        self._until: float | None = None

    def is_over(self) -> bool:
        """Whether what is in hand should be handed over now; ask often."""
        if not self._stopping.is_set():
            return False
        if self._until is None:
            self._until = self._monotonic() + self._drain_s
        return self._monotonic() >= self._until
