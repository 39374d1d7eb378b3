"""What the author of a batch chooses, and what makes two batches the same.

Owns the identity of a batch. Knows nothing about where its files are kept or who works on it.
"""

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_WINDOW = 4096  # lines in flight: well under the bound of a queue, so that other batches get in as well
DEFAULT_WINDOW = 128  # keeps a few decode processes of 16 busy, and what waits in front of them is short
MAX_TIMEOUT_S = 30 * 24 * 3600
MAX_ROLE_CHARS = 64


class BatchOptions(BaseModel):
    """One batch: what to read, what to write, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Path
    """Absolute path of the requests, one JSON line each."""
    target: Path
    """Absolute path of the results."""
    errors: Path
    """Absolute path of the lines that failed; the same as target keeps all lines together."""
    model: str
    """What lines call the model."""
    stack_model: str
    """What the stages call it: a name, or the path of a file."""
    speculate: bool = True
    """False turns drafts off for all lines."""
    response_role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE_CHARS)] = "assistant"
    """The role of the answers to chats."""
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] = DEFAULT_WINDOW
    """Most lines in flight at a time."""
    timeout_s: Annotated[int, Field(ge=0, le=MAX_TIMEOUT_S)] = 0
    """Seconds from its (last) submission after which unfinished lines are given up; 0 is never."""

    def identity(self, input_sha256: str) -> dict[str, str]:
        """Return all that decides what the output holds: two runs that agree in it are one batch.

        How many lines are in flight and for how long is not in it.
        """
        return {
            "input": input_sha256,
            "output": str(self.target),
            "errors": str(self.errors),
            "model": self.stack_model,
            "model name": self.model,
            "speculate": str(self.speculate).lower(),
            "response role": self.response_role,
        }


def served_name(model: str) -> str:
    """Return what requests call a stack's model: that of a file is its name without .gguf."""
    return Path(model).stem if "/" in model else model


def directory_name(target: Path) -> str:
    """Return the name of the directory of the batch that writes `target`; there is one at a time."""
    return hashlib.sha256(str(target).encode(errors="surrogateescape")).hexdigest()[:24]
