"""The two files a batch ends in: results, and lines that failed; or both in one.

Owns the temporary files beside their places. They have the same name in every try, so that a killed one leaves
nothing behind. Knows nothing about what lines hold.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self


class OutputFiles:
    """Write lines inside a `with`; then put_in_place."""

    def __init__(self, target: Path, errors: Path, batch_id: str) -> None:
        """Plan the files; the same path for both keeps all lines together, in their order."""
        self._target = target
        self._errors = errors
        self._batch_id = batch_id
        self._num_errors = 0
        self._exit = ExitStack()
        self._results_file: BinaryIO | None = None
        self._errors_file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._num_errors = 0
        self._results_file = self._exit.enter_context(self._temporary(self._target).open("wb"))
        self._errors_file = self._results_file
        if self._errors != self._target:
            self._errors_file = self._exit.enter_context(self._temporary(self._errors).open("wb"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for file in (self._results_file, self._errors_file):
                    assert file is not None
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            self._exit.close()

    def write(self, line: bytes, *, failed: bool) -> None:
        """Append one line to the file it belongs to."""
        file = self._errors_file if failed else self._results_file
        assert file is not None, "write inside the with"
        file.write(line)
        self._num_errors += failed

    def put_in_place(self) -> None:
        """Rename the files; a try that was killed between them is repeated. Without errors there is no file of them."""
        self._temporary(self._target).replace(self._target)
        if self._errors != self._target:
            if self._num_errors:
                self._temporary(self._errors).replace(self._errors)
            else:
                self._temporary(self._errors).unlink()
                self._errors.unlink(missing_ok=True)  # of an earlier batch
        for directory in {self._target.parent, self._errors.parent}:
            _sync_directory(directory)

    def _temporary(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{self._batch_id}")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
