"""A stack's share in its pool of blobs: while any stack holds one, nobody sweeps.

Owns the lock file `.stacks` in the pool's directory, and the sweep by whoever leaves last. Knows nothing
about what refers to the blobs; the caller says whether anything still does.
"""

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from kv_store.errors import PoolBusy
from kv_store.pool import FilePool

LOCK_FILE = ".stacks"
LOCK_TIMEOUT_S = 5.0  # a sweep takes milliseconds
LOCK_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Swept:
    """What the last stack found in the pool."""

    num_blobs: int
    num_temporaries: int


class PoolShare:
    """Holds the pool open, and says to other stacks that it is in use."""

    def __init__(self, directory: Path, quota_bytes: int) -> None:
        self._pool = FilePool.open(directory, quota_bytes)
        self.pool_id = self._pool.pool_id
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(directory / LOCK_FILE, flags, 0o600)
        try:
            self._take_share(directory)
        except BaseException:
            self.close()
            raise

    def is_last(self) -> bool:
        """Give the share up; True where nobody else has one, and then nobody gets one before `close`."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def sweep(self) -> Swept:
        """Remove everything from the pool; only the last one may."""
        num_temporaries = self._pool.sweep_temporaries(older_than_s=0)
        return Swept(sum(self._pool.release(name) for name in self._pool.names()), num_temporaries)

    def close(self) -> None:
        """Close the pool and drop the lock."""
        os.close(self._lock)
        self._pool.close()

    def _take_share(self, directory: Path) -> None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PoolBusy(str(directory), LOCK_TIMEOUT_S) from None
                time.sleep(LOCK_POLL_S)
            else:
                return
