"""A pool of blobs in shared memory: one immutable file each, in a tmpfs directory, below a quota.

It owns references, quota and verification. It knows nothing about requests, streams or codecs, nor about who
still needs a blob: whoever holds the last reference calls `release`.

The directory is the only truth. Nothing is counted elsewhere, so a crash cannot leak quota: what a dead
writer left is a temporary file, which counts until `sweep_temporaries` removes it. Nothing is synced to a
disk: a blob that does not survive is computed again, and one that survives in part fails its checksum.

Every method blocks for milliseconds and may be called from any thread; in a coroutine, use asyncio.to_thread.
"""

import errno
import mmap
import os
import stat
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kv_store import payload
from kv_store.blob import (
    HEADER_BYTES,
    BlobHeader,
    BlobMeta,
    Compression,
    header_crc32,
    pack_header,
    require,
    unpack_header,
)
from kv_store.directory import TEMPORARY_PREFIX, PrivateDirectory, find_fault
from kv_store.errors import (
    BlobDamaged,
    BlobExists,
    BlobMissing,
    BlobTooLarge,
    ForeignPool,
    InvalidValue,
    PoolFull,
    PoolUnavailable,
)
from kv_store.pool_id import POOL_ID_FILE, load_pool_id
from kv_store.ref import BlobRef, check_name, is_name

if TYPE_CHECKING:
    from kv_store.payload import ByteSource

# Half a lease: whoever waits for a stopped lock holder still has time to hand its own work back.
LOCK_TIMEOUT_S: Final = 5.0

# Errors of open() that mean somebody put something else where a blob was.
_NOT_A_BLOB: Final = {
    errno.ELOOP: "a symbolic link",
    errno.EACCES: "an unreadable file",
    errno.ENXIO: "a socket or a device",
}


class Blob(NamedTuple):
    """A blob whose every check has passed."""

    header: BlobHeader
    payload: memoryview  # read-only bytes, decompressed


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """What is in a pool; `used_bytes` includes blobs still being written, `num_blobs` does not."""

    num_blobs: int
    used_bytes: int
    quota_bytes: int


class FilePool:
    """The blobs of one directory; any number of processes may have it open at once."""

    def __init__(self, directory: PrivateDirectory, pool_id: str, quota_bytes: int) -> None:
        self._directory = directory
        self.pool_id = pool_id
        self.quota_bytes = quota_bytes

    @classmethod
    def open(cls, directory: Path, quota_bytes: int, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> Self:
        """Open the pool in `directory`, created if there is none; close it, or use it in a `with`.

        The random `pool_id` stays the same for as long as the directory exists.

        Raises:
            PoolRefused: the directory is not safely ours.
            PoolBusy: another process held the lock for `lock_timeout_s`.
        """
        if quota_bytes < 1:
            raise InvalidValue("quota_bytes", quota_bytes, "at least 1")
        with ExitStack() as on_error:
            private = PrivateDirectory.open(directory, lock_timeout_s)
            on_error.callback(private.close)
            pool = cls(private, load_pool_id(private), quota_bytes)
            on_error.pop_all()
        return pool

    def close(self) -> None:
        """Close the directory; blobs that are being read stay readable."""
        self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(
        self,
        name: str,
        meta: BlobMeta,
        buffers: "Sequence[ByteSource]",
        *,
        compression: Compression = "none",
    ) -> BlobRef:
        """Store the payload made of `buffers` end to end, and return the reference that finds it again.

        Uncompressed bytes are copied once, from the buffers into the file; the buffers must not change
        meanwhile. Readers see the whole blob or none.

        Raises:
            InvalidValue: the name or the payload is not acceptable.
            BlobExists: the name is taken, by whatever bytes.
            PoolFull: quota or file system is full; BlobTooLarge if the quota could never hold it.
        """
        check_name(name)
        header, stored = payload.encode(meta, buffers, compression)
        packed = pack_header(header)
        size_bytes = HEADER_BYTES + header.stored_bytes
        with ExitStack() as stack:
            with self._directory.locked():
                self._require_unused(name)
                self._require_room(size_bytes)
                temporary = stack.enter_context(self._directory.temporary(size_bytes))
            try:
                temporary.fill([memoryview(packed), *stored])
            except OSError as error:
                raise self._write_error(size_bytes, error) from error
            with self._directory.locked():
                self._require_unused(name)
                self._directory.seal(temporary, name)
        return BlobRef(pool_id=self.pool_id, name=name, size_bytes=size_bytes, crc32=header_crc32(packed))

    @contextmanager
    def read(self, ref: BlobRef) -> Generator[Blob]:
        """Map the blob, check all of it, and give its header and payload.

        Lifetime: the payload is the mapped file itself unless it was compressed. On leaving the `with` it is
        unmapped at once, unless something made from it (a slice, a numpy array) still exists: that stays
        valid, and the mapping goes when the last such thing is collected. Until then it holds memory and one
        descriptor, even if the blob was released; copy what must outlive the `with`.

        Raises:
            ForeignPool: the reference belongs to another pool.
            BlobMissing: there is no such blob (any more).
            BlobDamaged: it is not the blob the reference means.
        """
        if ref.pool_id != self.pool_id:
            raise ForeignPool(ref.name, ref.pool_id, self.pool_id)
        with ExitStack() as stack:
            mapping = self._map(ref)
            stack.callback(_close_unless_used, mapping)
            stored = memoryview(mapping)[HEADER_BYTES:]
            stack.callback(_release_unless_used, stored)
            packed = mapping[:HEADER_BYTES]
            header = unpack_header(packed, name=ref.name)
            require(ref.name, "referenced crc32", header_crc32(packed), ref.crc32)
            yield Blob(header, payload.decode(header, stored, name=ref.name))

    def release(self, name: str) -> bool:
        """Delete a blob; False if it was gone already. Whoever has it mapped keeps its bytes."""
        check_name(name)
        return self._directory.unlink(name)

    def names(self) -> list[str]:
        """The names of all sealed blobs, sorted."""
        return sorted(name for name, _ in self._directory.files() if is_name(name))

    def usage(self) -> PoolUsage:
        """How much of the quota is used."""
        files = self._directory.files()
        return PoolUsage(
            num_blobs=sum(is_name(name) for name, _ in files),
            used_bytes=_used_bytes(files),
            quota_bytes=self.quota_bytes,
        )

    def free_bytes(self) -> int:
        """How large a file would be accepted now: the less of what quota and file system have left."""
        left = self.quota_bytes - _used_bytes(self._directory.files())
        on_file_system = self._directory.free_bytes()
        return max(0, left if on_file_system is None else min(left, on_file_system))

    def sweep_temporaries(self, older_than_s: float) -> int:
        """Delete what crashed writers left unfinished for that long, and return how many files that was.

        A living writer's file is never touched, however old: each writer holds a lock on its file, which ends
        with the process.
        """
        with self._directory.locked():
            limit = time.time() - older_than_s  # file times are wall-clock times
            old = [
                name
                for name, status in self._directory.files()
                if name.startswith(TEMPORARY_PREFIX) and status.st_mtime <= limit
            ]
            return sum(self._directory.unlink_abandoned(name) for name in old)

    def _require_unused(self, name: str) -> None:
        if self._directory.exists(name):
            raise BlobExists(name)

    def _require_room(self, wanted_bytes: int) -> None:
        free_bytes = max(0, self.quota_bytes - _used_bytes(self._directory.files()))
        if wanted_bytes > self.quota_bytes:
            raise BlobTooLarge(wanted_bytes, free_bytes, self.quota_bytes)
        if wanted_bytes > free_bytes:
            raise PoolFull(wanted_bytes, free_bytes, self.quota_bytes)

    def _write_error(self, wanted_bytes: int, error: OSError) -> PoolFull | PoolUnavailable:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return PoolFull(wanted_bytes, self.free_bytes(), self.quota_bytes)
        return PoolUnavailable("write a blob", error)

    def _map(self, ref: BlobRef) -> mmap.mmap:
        fd = self._open_blob(ref.name)
        try:
            status = os.fstat(fd)
            fault = find_fault(status, stat.S_IFREG)
            if fault is not None:
                raise BlobDamaged(ref.name, fault.field, fault.actual, fault.expected)
            require(ref.name, "file size", status.st_size, ref.size_bytes)
            # Checking reads every page anyway, so let one call map them all.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return mmap.mmap(fd, ref.size_bytes, flags=flags, prot=mmap.PROT_READ)
        except OSError as error:
            raise PoolUnavailable("map a blob", error) from error
        finally:
            os.close(fd)

    def _open_blob(self, name: str) -> int:
        try:
            return self._directory.open_file(name)
        except FileNotFoundError as error:
            raise BlobMissing(name) from error
        except OSError as error:
            if error.errno in _NOT_A_BLOB:
                raise BlobDamaged(name, "type", _NOT_A_BLOB[error.errno], "a regular file") from error
            raise PoolUnavailable("open a blob", error) from error


def _used_bytes(files: Sequence[tuple[str, os.stat_result]]) -> int:
    return sum(status.st_size for name, status in files if name != POOL_ID_FILE)


def _close_unless_used(mapping: mmap.mmap) -> None:
    with suppress(BufferError):  # something made from it exists; unmapping is then the garbage collector's
        mapping.close()


def _release_unless_used(view: memoryview) -> None:
    with suppress(BufferError):
        view.release()
