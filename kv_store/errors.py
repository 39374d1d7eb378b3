"""Every error of the KV store, in one tree. It knows nothing about stages or about who retries.

KvStoreError
├── InvalidValue          no   an argument outside its range; the caller has a bug
├── PoolError
│   ├── PoolRefused       no   the directory is not safely ours: other owner, loose mode, symbolic link
│   ├── PoolUnavailable   yes  the operating system refused an operation
│   ├── PoolBusy          yes  another process held the pool's lock for too long
│   ├── PoolFull          yes  the quota or the file system has no room left now
│   │   └── BlobTooLarge  no   one blob exceeds the whole quota: waiting cannot help
│   └── ForeignPool       no   the reference belongs to another pool: another host, or since re-created
└── BlobError
    ├── BlobExists        no   the name is taken; a blob never changes once it is there
    ├── BlobMissing       yes  the blob is gone: compute it again
    └── BlobDamaged       yes  the bytes are not those that were written: compute them again

The middle column is `retryable`: whether the same work, done again from its start, can succeed without a
person changing code or configuration. It does not promise that the same call with the same reference can.
"""

# ruff: noqa: N818 - each name says what happened; "Error" is for the branches

from typing import ClassVar


class KvStoreError(Exception):
    """The root: catching it catches everything this package raises on purpose."""

    retryable: ClassVar[bool] = False


class InvalidValue(KvStoreError):
    """An argument is outside its range."""

    def __init__(self, field: str, actual: object, expected: str) -> None:
        super().__init__(f"{field} is {actual!r}, expected {expected}")
        self.field = field
        self.actual = actual
        self.expected = expected


class PoolError(KvStoreError):
    """The pool as a whole cannot do what was asked."""


class PoolRefused(PoolError):
    """The directory, or a file the pool keeps in it, could be read or changed by somebody else."""

    def __init__(self, path: str, field: str, actual: object, expected: object) -> None:
        super().__init__(f"KV pool {path}: {field} is {actual}, expected {expected}")
        self.path = path
        self.field = field
        self.actual = actual
        self.expected = expected


class PoolUnavailable(PoolError):
    """The operating system refused an operation; `errno` and the cause say why."""

    retryable = True

    def __init__(self, operation: str, error: OSError) -> None:
        super().__init__(f"KV pool: cannot {operation}: {error.strerror or error}")
        self.operation = operation
        self.errno = error.errno


class PoolBusy(PoolError):
    """The pool's lock was not free in time: its holder is stopped, or the disk below it hangs."""

    retryable = True

    def __init__(self, path: str, waited_s: float) -> None:
        super().__init__(f"KV pool {path}: another process held the lock for {waited_s:g} s")
        self.path = path
        self.waited_s = waited_s


class PoolFull(PoolError):
    """No room for a blob now; releasing others makes room."""

    retryable = True

    def __init__(self, wanted_bytes: int, free_bytes: int, quota_bytes: int) -> None:
        super().__init__(f"KV pool is full: wanted {wanted_bytes} bytes, {free_bytes} free of a quota of {quota_bytes}")
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes
        self.quota_bytes = quota_bytes


class BlobTooLarge(PoolFull):
    """One blob is larger than the whole quota."""

    retryable = False


class ForeignPool(PoolError):
    """A reference names a pool that is not this one."""

    def __init__(self, name: str, actual: str, expected: str) -> None:
        super().__init__(f"blob {name} lies in KV pool {actual}, this is pool {expected}")
        self.name = name
        self.actual = actual
        self.expected = expected


class BlobError(KvStoreError):
    """One blob cannot be used; the others can."""


class BlobExists(BlobError):
    """A blob of this name is in the pool already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"blob {name} exists already")
        self.name = name


class BlobMissing(BlobError):
    """No blob of this name is in the pool."""

    retryable = True

    def __init__(self, name: str) -> None:
        super().__init__(f"blob {name} is not in the pool")
        self.name = name


class BlobDamaged(BlobError):
    """A blob failed a check; `field` names the first that failed."""

    retryable = True

    def __init__(self, name: str, field: str, actual: object, expected: object) -> None:
        super().__init__(f"blob {name}: {field} is {actual}, expected {expected}")
        self.name = name
        self.field = field
        self.actual = actual
        self.expected = expected
