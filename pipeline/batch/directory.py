"""The files of a batch while it lives: its manifest, and where the others are.

Owns the directory, mode 0700, one per output path. It exists from submission until the output is in place, so
its presence is what makes the same command go on instead of starting over, even where the server lost
everything. Knows nothing about the formats of the other files.

    manifest.json      whose this is
    input              a copy, where the requests came from a pipe
    input.index        where each request is                  (input_index.py)
    finished.lines     results, in the order in which they came  (journal.py)
    finished.index     whose each of them is
    lock               held by whoever writes the above
"""

import fcntl
import os
import secrets
import shutil
import string
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.batch.errors import BatchFilesDamaged, BatchLocked
from pipeline.batch.options import BatchOptions
from pipeline.batch.record import BATCH_ID_PREFIX

ID_CHARS = 20  # 103 bits


class Manifest(BaseModel):
    """Which batch a directory belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_id: str
    options: BatchOptions
    input_sha256: str

    @property
    def identity(self) -> dict[str, str]:
        """What must agree for a command to go on with this batch."""
        return self.options.identity(self.input_sha256)


class BatchDirectory:
    """One batch's directory; nothing is opened or created by making the object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.input_copy = path / "input"
        self.input_index = path / "input.index"
        self.finished_lines = path / "finished.lines"
        self.finished_index = path / "finished.index"
        self._manifest = path / "manifest.json"

    def manifest(self) -> Manifest | None:
        """Return the manifest; None where there is no batch.

        Raises:
            BatchFilesDamaged: it cannot be read.
        """
        try:
            return Manifest.model_validate_json(self._manifest.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise BatchFilesDamaged(self._manifest, f"{error.error_count()} fields are wrong") from None

    def create(self, manifest: Manifest) -> None:
        """Make the directory this batch's, with nothing but its manifest and the copy of its input."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in (self.input_index, self.finished_lines, self.finished_index):
            leftover.unlink(missing_ok=True)
        self.replace_manifest(manifest)  # last: from now on the batch exists

    def replace_manifest(self, manifest: Manifest) -> None:
        """Put another manifest of the same batch in place, whole or not at all."""
        temporary = self._manifest.with_suffix(".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(manifest.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._manifest)

    def remove(self) -> None:
        """Delete everything; the manifest first, so that half a removal is no batch."""
        self._manifest.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def locked(self) -> Generator[None]:
        """Be the only one who writes finished lines or the output; the lock ends with the process.

        Raises:
            BatchLocked: another process, or another step of this one, does.
        """
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise BatchLocked(self.path) from None
        finally:
            os.close(descriptor)


def new_batch_id() -> str:
    """Return an id that nobody has and nobody can guess."""
    alphabet = string.ascii_lowercase + string.digits
    return BATCH_ID_PREFIX + "".join(secrets.choice(alphabet) for _ in range(ID_CHARS))
