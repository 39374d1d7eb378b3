"""What can go wrong with a batch as a whole; single lines have errors of their own (lines.py).

SluiceError
└── BatchError
    ├── BatchMismatch        the output path belongs to an unfinished batch that differs
    ├── BatchFilesDamaged    a file of the batch cannot be what it should be
    ├── BatchFilesGone       its files are not there, or those of another batch are
    ├── InputChanged         the input is not the one that was submitted
    ├── BatchLocked          somebody else writes its files                      (retryable)
    ├── BatchFailed          it has failed, and says why                         (retryable)
    └── UnknownBatch         no record, no files
"""

from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import SluiceError


class BatchError(SluiceError):
    """A batch cannot go on as it is."""

    code = "batch_error"


class BatchMismatch(BatchError):  # noqa: N818 - reads as the fact it states
    """Another batch that has not ended writes the same output; says what differs."""

    code = "batch_mismatch"

    def __init__(self, batch_id: str, target: Path, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
        self.batch_id = batch_id
        self.fields = tuple(name for name in ours if ours[name] != theirs.get(name))
        shown = [
            f"another {name}" if name == "input" else f"{name} {theirs.get(name)!r} instead of {ours[name]!r}"
            for name in self.fields
        ]
        super().__init__(
            f"{target} is being written by the unfinished batch {batch_id}, which has {', '.join(shown)}. Repeat its "
            f"command to go on with it, choose another output, or give it up with --restart"
        )


class BatchFilesDamaged(BatchError):  # noqa: N818
    """A file of the batch is not what it should be."""

    code = "batch_files_damaged"

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} {problem}; start over with --restart")
        self.path = path


class BatchFilesGone(BatchError):  # noqa: N818
    """The batch's files are not there any more: it was given up, or its output is in place."""

    code = "batch_files_gone"

    def __init__(self, path: Path) -> None:
        super().__init__(f"its files are not in {path}: somebody gave it up, or this process cannot see them")
        self.path = path


class InputChanged(BatchError):  # noqa: N818
    """The input was changed after it was submitted."""

    code = "input_changed"

    def __init__(self, path: Path, where: str = "") -> None:
        super().__init__(f"{path} was changed after the batch was submitted{where}")
        self.path = path


class BatchLocked(BatchError):  # noqa: N818
    """Another process writes the batch's files at the moment."""

    code = "batch_locked"
    retryable = True

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is in use by another process")
        self.path = path


class BatchFailed(BatchError):  # noqa: N818
    """The batch has failed; once the reason is mended, submitting it again goes on where it was."""

    code = "batch_failed"
    retryable = True

    def __init__(self, batch_id: str, reason: str) -> None:
        super().__init__(f"batch {batch_id} has failed: {reason}")
        self.batch_id = batch_id


class UnknownBatch(BatchError):  # noqa: N818
    """No such batch: never submitted, or it ended more than a day ago."""

    code = "unknown_batch"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"batch {batch_id} is not known: never submitted, or it ended more than a day ago")
        self.batch_id = batch_id
