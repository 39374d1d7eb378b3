"""What can be wrong with a GGUF file. Knows nothing about requests, stages or queues: the engine raises these too.

    GgufError                     names the file and, in one sentence, its problem
    ├── GgufUnreadable            not there, foreign, cut short or damaged
    └── UnsupportedModelError     whole, but a model that this engine cannot run

None is retryable: another file is needed.
"""

from pathlib import Path
from typing import ClassVar


class GgufError(Exception):
    """A model file cannot be used; `problem` reads on from the file's name, as in 'is cut short'."""

    retryable: ClassVar[bool] = False
    code: ClassVar[str] = "model_file"

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class GgufUnreadable(GgufError):  # noqa: N818 - reads as the fact it states
    """The bytes are not there, or are not a whole GGUF file of version 3."""


class UnsupportedModelError(GgufError):
    """The file is a model, but not one this engine can run; the problem says what it would need."""

    code = "unsupported_model"
