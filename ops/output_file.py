"""An output file that appears whole or not at all.

Owns the temporary file beside it. What was finished when a run broke off stays as `<name>.partial`. Knows
nothing about what is written.
"""

import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self


class OutputFile:
    """Write lines inside a `with`; leaving it without an exception puts the file in place."""

    def __init__(self, path: Path) -> None:
        """Create the temporary file, and the directory where there is none.

        Raises:
            OSError: nothing can be written there; better now than after an hour's work.
        """
        path = path.resolve()  # a link stays a link, and its target gets the lines
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OSError(f"{path} is neither a file nor free: it would be replaced by one")
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.num_lines = 0
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        self._temporary = Path(name)
        self._file = os.fdopen(descriptor, "wb")
        os.fchmod(descriptor, 0o666 & ~_umask())  # mkstemp's 0600 is for secrets

    def write(self, line: bytes) -> None:
        """Append one line."""
        self._file.write(line)
        self._file.flush()  # requests take longer than this, and people look at files while they grow
        self.num_lines += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
            if kind is None:
                self._temporary.replace(self.path)
            elif self.num_lines:
                self._temporary.replace(self.partial)
        finally:
            self._temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
