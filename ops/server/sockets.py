"""Where a process of one home listens, so that others of the same home find it.

Owns the rule for paths that are too long for a socket, and the check that a place is ours alone. Knows nothing
about who listens or what is said.
"""

import hashlib
import os
import stat
from pathlib import Path
from typing import ClassVar

from pipeline.errors import SluiceError

MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 107


class UnsafePlace(SluiceError):  # noqa: N818 - reads as the fact it states
    """A directory or socket is not this user's alone, so whatever answers there could be anybody."""

    code: ClassVar[str] = "unsafe_place"


def socket_directory(directory: Path, longest_name: str) -> Path:
    """Return the directory itself, or a short one, which its owner makes, where a path would be too long.

    Raises:
        UnsafePlace: the short one is somebody else's.
    """
    if len(os.fsencode(directory / longest_name)) <= MAX_SOCKET_PATH_BYTES:
        return directory
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]
    # Not TMPDIR: it differs between sessions of one user, and all of them must meet at one socket.
    short = Path(f"/tmp/sluice-{os.getuid()}-{digest}")  # noqa: S108 - owner and mode are checked
    if os.path.lexists(short):
        check_directory(short)
    return short


def private_directory(path: Path) -> None:
    """Create a directory of mode 0700, or take one of this user's and make it so.

    Raises:
        UnsafePlace: it is not a directory of this user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(path)
    path.chmod(0o700)


def check_directory(path: Path) -> None:
    """Raise UnsafePlace unless the path is a directory of this user."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UnsafePlace(f"{path} is not a directory of this user")


def check_socket(path: Path) -> None:
    """Raise UnsafePlace unless the path is a socket that only this user can open.

    Raises:
        FileNotFoundError: there is nothing.
    """
    status = path.lstat()
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.getuid():
        raise UnsafePlace(f"{path} is not a socket of this user")
    if status.st_mode & 0o077:
        raise UnsafePlace(f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, and must be closed to others (0600)")
