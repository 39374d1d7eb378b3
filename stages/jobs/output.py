"""The two files a batch ends in: results, and lines that failed; or both in one.

Owns the temporary files beside their places. They have the same name in every try, so that a killed one leaves
nothing behind, and are deleted where one fails: they might be what fills the disk. Knows nothing about what lines hold.
"""

import os
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from pipeline.batch.directory import temporary_output


class OutputFiles:
    """Write lines inside a `with`; then put_in_place."""

    def __init__(self, target: Path, errors: Path, batch_id: str) -> None:
        """Plan the files; the same path for both keeps all lines together, in their order."""
        self._target = target
        self._errors = errors
        self._new_target, self._new_errors = temporary_output(target, errors, batch_id)
        self._num_errors = 0
        self._exit = ExitStack()
        self._results_file: BinaryIO | None = None
        self._errors_file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._num_errors = 0
        self._exit = ExitStack()
        try:
            self._results_file = self._exit.enter_context(self._new_target.open("wb"))
            self._errors_file = self._results_file
            if self._errors != self._target:
                self._errors_file = self._exit.enter_context(self._new_errors.open("wb"))
        except OSError:
            self._give_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._give_up()
            return
        try:
            for file in (self._results_file, self._errors_file):
                assert file is not None
                file.flush()
                os.fsync(file.fileno())
            self._exit.close()
        except OSError:
            self._give_up()
            raise

    def write(self, line: bytes, *, failed: bool) -> None:
        """Append one line to the file it belongs to."""
        file = self._errors_file if failed else self._results_file
        assert file is not None, "write inside the with"
        file.write(line)
        self._num_errors += failed

    def put_in_place(self) -> None:
        """Rename the files, results last: where they are, everything is. A try that was killed between is repeated.

        Without errors there is no file of them.

        Raises:
            OSError: a directory or something else stands in the way.
        """
        try:
            if self._errors != self._target:
                if self._num_errors:
                    self._new_errors.replace(self._errors)
                else:
                    self._errors.unlink(missing_ok=True)  # of an earlier batch
            self._new_target.replace(self._target)
            for directory in {self._target.parent, self._errors.parent}:
                _sync_directory(directory)
        finally:
            self._delete()

    def _give_up(self) -> None:
        with suppress(OSError):  # a full disk does not take what is still in a buffer either
            self._exit.close()
        self._delete()

    def _delete(self) -> None:
        for path in (self._new_target, self._new_errors):
            path.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
