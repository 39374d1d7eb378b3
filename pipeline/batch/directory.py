"""The files of a batch while it lives: its manifest, and where the others are.

Owns the directory, mode 0700, one per output path. It exists from submission until the output is in place, so
its presence is what makes the same command go on instead of starting over, even where the server lost
everything. It appears and goes in one moment each, under the lock of all batches, and never changes hands: whoever
works on a batch sees by the manifest's id whether these are still its files. Knows nothing about the formats of the
other files.

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
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.batch.errors import BatchFilesDamaged, BatchFilesGone, BatchLocked
from pipeline.batch.options import BatchOptions
from pipeline.batch.record import BATCH_ID_PREFIX

ID_CHARS = 20  # 103 bits
_REMOVED = ".removed-"
_SPOOL = ".input-"


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
            raise BatchFilesDamaged(self._manifest, f"is no manifest: {error.error_count()} fields are wrong") from None

    def check(self, batch_id: str) -> None:
        """Return if these are the files of this batch.

        Raises:
            BatchFilesGone: they are not, or not any more.
            BatchFilesDamaged: nobody can tell.
        """
        manifest = self.manifest()
        if manifest is None or manifest.batch_id != batch_id:
            raise BatchFilesGone(self.path)

    def create(self, manifest: Manifest) -> None:
        """Make the directory this batch's, with nothing but its manifest; call it inside `alone`."""
        self.drop()  # what has no manifest is no batch
        self.path.mkdir(mode=0o700)
        self.replace_manifest(manifest)

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
        """Delete everything, as far as others see in one moment."""
        with alone(self.path.parent):
            self.drop()

    def drop(self) -> None:
        """Do the same inside `alone`."""
        removed = self.path.with_name(_REMOVED + secrets.token_hex(8))
        try:
            self.path.rename(removed)  # whoever still has files of it open writes to these, and not to its successor's
        except FileNotFoundError:
            return
        shutil.rmtree(removed, ignore_errors=True)

    @contextmanager
    def locked(self, batch_id: str) -> Generator[None]:
        """Be the only one who writes the files of this batch, or its output; the lock ends with the process.

        Raises:
            BatchLocked: another process, or another step of this one, does.
            BatchFilesGone: these are not the files of this batch.
        """
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise BatchFilesGone(self.path) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BatchLocked(self.path) from None
            self.check(batch_id)
            yield
        finally:
            os.close(descriptor)


@contextmanager
def alone(batches: Path) -> Generator[None]:
    """Let no other process make or remove a directory of a batch meanwhile, which takes milliseconds."""
    descriptor = os.open(batches / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def spool(batches: Path) -> Generator[tuple[Path, BinaryIO]]:
    """Yield a new file for the copy of a pipe, which is gone afterwards unless it was moved away."""
    with alone(batches):
        descriptor, name = tempfile.mkstemp(prefix=_SPOOL, dir=batches)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # as long as it is open; clear_up spares it
    path = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield path, file
    finally:
        path.unlink(missing_ok=True)


def clear_up(batches: Path) -> None:
    """Delete what killed processes left half removed or half copied; call it inside `alone`."""
    for path in batches.glob(_REMOVED + "*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in batches.glob(_SPOOL + "*"):
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def temporary_output(target: Path, errors: Path, batch_id: str) -> tuple[Path, Path]:
    """Return where a batch writes results and errors before they are in place: beside these, the same in every try."""
    return target.with_name(f".{batch_id}.results"), errors.with_name(f".{batch_id}.errors")


def new_batch_id() -> str:
    """Return an id that nobody has and nobody can guess."""
    alphabet = string.ascii_lowercase + string.digits
    return BATCH_ID_PREFIX + "".join(secrets.choice(alphabet) for _ in range(ID_CHARS))
