"""Which stacks have processes at a pool: what no request of ours owns may be another stack's.

Owns the file `.marks` in the pool's directory. A pool belongs to a home, and stacks of one home may differ in server or
namespace: then none of them can tell from its own credits which blobs are garbage. Each process holds a shared lock on
one byte of the file, whose place stands for its stack; so a lock on any other byte is another stack's. The kernel drops
the locks with their processes.
"""

import fcntl
import hashlib
import os
import struct
from pathlib import Path
from typing import Final, Self

import structlog

from kv_store.errors import PoolUnavailable

MARKS_FILE: Final = ".marks"

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_LOCK: Final = "hhqqi0q"  # struct flock: type, whence, start, length (0 is to the end), pid
_PLACE_BYTES: Final = 7  # a place has to be below 2**63

log = structlog.get_logger("pool_mark")


class PoolMark:
    """One process's mark; close it, or use it in a `with`."""

    def __init__(self, directory: Path, stack: str) -> None:
        """Set the mark of a stack; `stack` is the same text in all of its processes, and in no other's.

        Raises:
            PoolUnavailable: The file cannot be opened.
        """
        digest = hashlib.sha256(stack.encode()).digest()
        self._place = 1 + int.from_bytes(digest[:_PLACE_BYTES], "big")
        try:
            self._file = os.open(directory / MARKS_FILE, _FLAGS, 0o600)
        except OSError as error:
            raise PoolUnavailable(f"open {MARKS_FILE}", error) from error
        self._is_set = self._set()

    def _set(self) -> bool:
        # Of the open file and not of the process, or two pools of one process would share their marks.
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK, self._place, 1))
        except OSError as error:  # a kernel without such locks: then what may be another's stays
            log.warning("pool_not_marked", problem=str(error))
            return False
        return True

    def is_alone(self) -> bool:
        """Return whether no process of another stack has its mark here now."""
        return self._is_set and self._is_free(0, self._place) and self._is_free(self._place + 1, 0)

    def _is_free(self, start: int, length: int) -> bool:
        answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, start, length))
        return struct.unpack(_LOCK, answer)[0] == fcntl.F_UNLCK

    def close(self) -> None:
        """Take the mark back."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock(kind: int, start: int, length: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, start, length, 0)
