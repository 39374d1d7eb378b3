"""A request that was enqueued and followed by the same client: its end, and when its tokens arrived here.

Owns the arithmetic of TTFT and TPOT as a client sees them. Knows nothing about queues.
"""

from dataclasses import dataclass

from pipeline.batch.results import Completion
from pipeline.client.asks import Submitted
from pipeline.messages import Delta, Failure, Terminal


@dataclass(slots=True)
class Timing:
    """When the tokens of one request arrived, on the client's monotonic clock."""

    started_at: float
    first_at: float | None = None
    last_at: float | None = None
    num_tokens: int = 0

    def saw(self, delta: Delta, at: float) -> None:
        """Take note of a delta."""
        if self.first_at is None:
            self.first_at = at
        self.last_at = at
        self.num_tokens += len(delta.token_ids)

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token, waiting in queues included."""
        return None if self.first_at is None else 1000 * (self.first_at - self.started_at)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first."""
        if self.first_at is None or self.last_at is None or self.num_tokens < 2:
            return None
        return 1000 * (self.last_at - self.first_at) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that has ended, one way or the other."""

    submitted: Submitted
    outcome: Completion | Failure
    timing: Timing
    terminal: Terminal
    """As it was written; its text is what was held back until the end, after the last delta."""
    ended_at: float
    """On the client's monotonic clock."""
