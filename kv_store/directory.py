"""One private directory of immutable files, shared by threads and processes of one user.

It owns every system call on the directory: opening it safely, its lock, temporary files and their renaming.
It knows nothing about blobs, references or quotas (pool.py).

Everything happens relative to a descriptor of the directory and never follows a symbolic link, so that nobody
who can write next to the directory can make us read or write elsewhere. The life of a file:

    .tmp-<random>   created under the lock at its full size, which reserves its bytes; flocked by its writer
          | filled without the directory's lock
          v
    <name>          renamed under the lock, if the name is free; never written again
          | unlinked by whoever releases it; a reader that has it mapped keeps its bytes
          v
    gone

The lock is a flock on the directory itself, since a lock file could be deleted under its holders. All that
adds a file or a name happens under it, so a listing under the lock misses nothing.
"""

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kv_store.errors import PoolBusy, PoolRefused, PoolUnavailable

TEMPORARY_PREFIX: Final = ".tmp-"

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a fifo somebody put there must not hang. It means nothing for regular files.
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TYPE_NAMES: Final = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a fifo",
}
_LOCK_POLL_S: Final = 0.001  # a holder needs about a millisecond to list a thousand files
_MAX_VIEWS_PER_CALL: Final = 1024  # IOV_MAX on Linux


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a file or directory is not safely ours."""

    field: str
    actual: str
    expected: str


class Temporary:
    """A file that has its size but no name yet; it belongs to the one writer that made it."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self._fd = fd

    def fill(self, views: Sequence[memoryview]) -> None:
        """Allocate the whole file, then write the byte views end to end.

        Allocating first makes a full file system an error here instead of a SIGBUS in whoever maps the file.

        Raises:
            OSError: among others ENOSPC and EDQUOT.
        """
        os.posix_fallocate(self._fd, 0, sum(view.nbytes for view in views))
        pending, offset = list(views), 0
        while pending:
            written = os.pwritev(self._fd, pending[:_MAX_VIEWS_PER_CALL], offset)
            offset += written
            pending = _after(pending, written)


class PrivateDirectory:
    """A directory of mode 0700 that we own, held open."""

    def __init__(self, path: Path, fd: int, lock_timeout_s: float) -> None:
        self.path = path
        self._fd = fd
        self._lock_timeout_s = lock_timeout_s

    @classmethod
    def open(cls, path: Path, lock_timeout_s: float) -> Self:
        """Open the directory, and create it (with missing parents) if there is none.

        Raises:
            PoolRefused: it is a symbolic link or no directory, another user's, or open to group or others.
        """
        with _system_errors(f"create {path}"), suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(path, _DIRECTORY_FLAGS)
        except OSError as error:
            if error.errno in {errno.ENOTDIR, errno.ELOOP}:
                raise PoolRefused(str(path), "type", "a link or a file", "a directory") from error
            raise PoolUnavailable(f"open {path}", error) from error
        fault = find_fault(os.fstat(fd), stat.S_IFDIR)
        if fault is not None:
            os.close(fd)
            raise PoolRefused(str(path), fault.field, fault.actual, fault.expected)
        return cls(path, fd, lock_timeout_s)

    def close(self) -> None:
        """Close the descriptor; calling it again does nothing, any other call fails from then on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @contextmanager
    def locked(self) -> Generator[None]:
        """Exclude every other thread and process that would add a file.

        Raises:
            PoolBusy: the lock was not free in time; a stopped process may hold it.
        """
        # A flock belongs to an open file description: with its own, each thread excludes the others too.
        fd = self._open_again()
        try:
            self._acquire(fd)
            try:
                yield
            finally:
                # Closing alone is not enough while a child that another thread forked has the descriptor.
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    @contextmanager
    def temporary(self, size_bytes: int) -> Generator[Temporary]:
        """Create a file of `size_bytes` under a name of its own; enter it while holding the lock.

        On leaving, a file that was not sealed is deleted.
        """
        name = TEMPORARY_PREFIX + secrets.token_hex(16)
        with _system_errors("create a file"):
            fd = os.open(name, _CREATE_FLAGS, 0o600, dir_fd=self._fd)
        try:
            with _system_errors("reserve a file's size"):
                # Says "my writer lives": the kernel drops it with the process.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, size_bytes)
            yield Temporary(name, fd)
        finally:
            try:
                self.unlink(name)
            finally:
                os.close(fd)

    def seal(self, temporary: Temporary, name: str) -> None:
        """Give a temporary file its name; the caller holds the lock and has seen that the name is free."""
        with _system_errors("rename a file"):
            os.rename(temporary.name, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def unlink(self, name: str) -> bool:
        """Delete a file; False if there was none."""
        with _system_errors("delete a file"):
            try:
                os.unlink(name, dir_fd=self._fd)
            except FileNotFoundError:
                return False
        return True

    def unlink_abandoned(self, temporary_name: str) -> bool:
        """Delete a temporary file unless its writer lives; the caller holds the lock."""
        with _system_errors("inspect a temporary file"):
            try:
                fd = self.open_file(temporary_name)
            except FileNotFoundError:
                return False
            try:
                return _try_lock(fd) and self.unlink(temporary_name)
            finally:
                os.close(fd)

    def exists(self, name: str) -> bool:
        """Whether anything has this name, of whatever type."""
        with _system_errors("look a file up"):
            try:
                os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
        return True

    def open_file(self, name: str) -> int:
        """Open a file to read; the descriptor is the caller's to close.

        Raises:
            OSError: as the operating system says; ELOOP for a symbolic link.
        """
        return os.open(name, _READ_FLAGS, dir_fd=self._fd)

    def files(self) -> list[tuple[str, os.stat_result]]:
        """All regular files, in no order; without the lock, one that is being renamed may be missed."""
        with _system_errors("list the directory"):
            # Not a copy of our descriptor: copies share their reading position, and threads would skip files.
            fd = self._open_again()
            try:
                with os.scandir(fd) as listing:
                    found = [(entry.name, _status(entry)) for entry in listing]
            finally:
                os.close(fd)
        return [(name, status) for name, status in found if status is not None and stat.S_ISREG(status.st_mode)]

    def free_bytes(self) -> int | None:
        """What the file system has left for us, None if it has no limit."""
        with _system_errors("ask for free space"):
            status = os.fstatvfs(self._fd)
        # A tmpfs mounted without a limit reports zero blocks in all.
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    def _open_again(self) -> int:
        with _system_errors("open the directory"):
            return os.open(".", _DIRECTORY_FLAGS, dir_fd=self._fd)

    def _acquire(self, fd: int) -> None:
        deadline_s = time.monotonic() + self._lock_timeout_s
        while not _try_lock(fd):
            if time.monotonic() >= deadline_s:
                raise PoolBusy(str(self.path), self._lock_timeout_s)
            time.sleep(_LOCK_POLL_S)


def find_fault(status: os.stat_result, file_type: int) -> Fault | None:
    """What makes a file unsafe to trust: its type, its owner, or access for group or others."""
    if stat.S_IFMT(status.st_mode) != file_type:
        return Fault("type", _type_name(status.st_mode), _type_name(file_type))
    if status.st_uid != os.geteuid():
        return Fault("owner", f"uid {status.st_uid}", f"uid {os.geteuid()}")
    if status.st_mode & 0o077:
        return Fault("mode", f"{stat.S_IMODE(status.st_mode):04o}", "no access for group and others")
    return None


def _type_name(mode: int) -> str:
    return _TYPE_NAMES.get(stat.S_IFMT(mode), "a socket or a device")


@contextmanager
def _system_errors(operation: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise PoolUnavailable(operation, error) from error


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None  # released since it was listed


def _after(views: list[memoryview], written: int) -> list[memoryview]:
    """What is left to write once `written` bytes are."""
    for index, view in enumerate(views):
        if written < view.nbytes:
            return [view[written:], *views[index + 1 :]]
        written -= view.nbytes
    return []
