"""What a batch is while it lives: its states, and its record as the server keeps it.

Owns the state machine and the fields of the record. Knows nothing about files or how steps are scheduled.

                    +--> failed                       (the input cannot be read, the output cannot be written)
                    |
    validating --> in_progress ------------------> finalizing --> completed
         |          |      |                        ^    |
         |          |      +--> expiring -----------+    +------> expired
         |          |                               |    |
         +----------+--------> cancelling ----------+    +------> cancelled

Each state has steps that drive it on (STEPS). A step is short, may be killed anywhere and may run twice; it
begins and ends with a compare-and-set on the record (store.py).
"""

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pipeline.batch.options import BatchOptions

BatchState = Literal[
    "validating",
    "in_progress",
    "cancelling",
    "expiring",
    "finalizing",
    "completed",
    "failed",
    "cancelled",
    "expired",
]
BATCH_STATES: tuple[BatchState, ...] = get_args(BatchState)
OVER: frozenset[BatchState] = frozenset({"completed", "failed", "cancelled", "expired"})

StepName = Literal["validate", "feed", "collect", "cancel", "expire", "finalise"]
STEPS: Mapping[BatchState, tuple[StepName, ...]] = {
    "validating": ("validate",),
    "in_progress": ("feed", "collect"),
    "cancelling": ("cancel", "collect"),
    "expiring": ("expire", "collect"),
    "finalizing": ("finalise",),
}
"""The steps of each state that has not ended; those of one state run side by side."""

BATCH_ID_PREFIX = "batch_"


def is_batch_id(text: str) -> bool:
    """Return whether an id is that of a batch; those of its lines begin like it, and go on with a hyphen."""
    return text.startswith(BATCH_ID_PREFIX) and "-" not in text


def states_of(step: StepName) -> tuple[BatchState, ...]:
    """Return the states in which a step has work."""
    return tuple(state for state, steps in STEPS.items() if step in steps)


def _options(value: object) -> object:
    return BatchOptions.model_validate_json(value) if isinstance(value, str) else value


class BatchRecord(BaseModel):
    """A batch at one moment. Times are epoch milliseconds of the server's clock; 0 is not yet."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # the hash also holds what only scripts use

    id: str
    state: BatchState
    options: Annotated[BatchOptions, BeforeValidator(_options)]
    directory: str
    """Where its files are: the same path for whoever submits it and for the jobs process."""
    input_sha256: str
    created_ms: int = 0
    started_ms: int = 0
    ended_ms: int = 0
    deadline_ms: int = 0
    """When it expires: options.timeout_s after it was submitted the last time; 0 is never."""
    total: int = 0
    """Lines with a request; 0 until it was validated."""
    cursor: int = 0
    """The next line to feed, as an index of such lines."""
    admitted: int = 0
    """Lines fed since the record was made: more than were collected by those in flight."""
    collected: int = 0
    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cancel_requested: bool = False
    """It was cancelled before its input was validated."""
    seen: bool = False
    """Somebody who waited for it knows that it is over."""
    recovered: bool = False
    """Made again from the batch's files, because the server had lost it."""
    ending: BatchState | Literal[""] = ""
    """What it becomes after finalizing."""
    error: str = ""
    """Why it failed, as a sentence."""
    summary: str = Field(default="", repr=False)
    """All figures of an ended batch, as a JSON object."""

    @property
    def num_finished(self) -> int:
        """Lines that have a result, whichever it is."""
        return self.succeeded + self.failed

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in OVER
