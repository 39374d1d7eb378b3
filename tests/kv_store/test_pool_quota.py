import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kv_store.blob import HEADER_BYTES, BlobMeta
from kv_store.errors import (
    BlobTooLarge,
    PoolFull,
    PoolUnavailable,
)
from kv_store.pool import FilePool, PoolUsage

QUOTA = 1 << 20  # of the pool fixture
NOISE = np.random.default_rng(0).bytes(5000)


def test_released_bytes_can_be_used_again(meta: BlobMeta, pool: FilePool) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])
    assert pool.names() == ["blob_0001"]

    assert pool.release("blob_0001")
    assert not pool.release("blob_0001")

    assert pool.names() == []
    assert pool.usage() == PoolUsage(num_blobs=0, used_bytes=0, quota_bytes=QUOTA)
    assert pool.free_bytes() == QUOTA
    assert pool.write("blob_0001", meta, [NOISE]) == ref


def test_quota_is_exact_and_counts_headers(meta: BlobMeta, pool_directory: Path) -> None:
    size_bytes = HEADER_BYTES + len(NOISE)
    with FilePool.open(pool_directory, 2 * size_bytes) as pool:
        pool.write("blob_0001", meta, [NOISE])
        assert pool.free_bytes() == size_bytes
        pool.write("blob_0002", meta, [NOISE])
        assert pool.free_bytes() == 0

        with pytest.raises(PoolFull) as full:
            pool.write("blob_0003", meta, [b"x"])

        assert full.value.retryable
        assert full.value.wanted_bytes == HEADER_BYTES + 1
        assert (full.value.free_bytes, full.value.quota_bytes) == (0, 2 * size_bytes)
        pool.release("blob_0001")
        pool.write("blob_0003", meta, [b"x"])
        assert pool.names() == ["blob_0002", "blob_0003"]


def test_blob_above_the_whole_quota_is_not_worth_a_retry(meta: BlobMeta, pool: FilePool) -> None:
    with pytest.raises(BlobTooLarge) as refusal:
        pool.write("blob_0001", meta, [bytes(QUOTA)])

    assert not refusal.value.retryable
    assert isinstance(refusal.value, PoolFull)


def test_quota_below_what_is_there_leaves_no_room(meta: BlobMeta, pool: FilePool, pool_directory: Path) -> None:
    pool.write("blob_0001", meta, [NOISE])

    with FilePool.open(pool_directory, 1000) as smaller:
        assert smaller.free_bytes() == 0
        with pytest.raises(PoolFull):
            smaller.write("blob_0002", meta, [b"x"])


def test_full_shared_memory_is_a_clean_error(meta: BlobMeta, pool: FilePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(PoolFull) as full:
            pool.write("blob_0001", meta, [NOISE])

    assert full.value.wanted_bytes == HEADER_BYTES + len(NOISE)
    assert pool.usage().used_bytes == 0
    pool.write("blob_0001", meta, [NOISE])


@pytest.mark.parametrize("pool_directory", ["shared memory"], indirect=True)
def test_tmpfs_refuses_before_a_page_is_touched(
    meta: BlobMeta, pool: FilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    total_bytes = shutil.disk_usage("/dev/shm").total
    if total_bytes == 0:
        pytest.skip("this tmpfs has no limit")
    real = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, _: real(fd, offset, total_bytes + QUOTA))

    with pytest.raises(PoolFull) as full:
        pool.write("blob_0001", meta, [NOISE])

    assert isinstance(full.value.__cause__, OSError)
    assert pool.usage().used_bytes == 0


def test_other_write_error_is_unavailable_and_leaves_nothing(
    meta: BlobMeta, pool: FilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(fd: int, views: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", write)
    with pytest.raises(PoolUnavailable) as failure:
        pool.write("blob_0001", meta, [NOISE])

    assert failure.value.errno == errno.EIO
    assert pool.usage().used_bytes == 0


def test_free_bytes_is_what_the_file_system_has_if_that_is_less(
    pool: FilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearly_full = os.statvfs_result((4096, 4096, 100, 2, 2, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: nearly_full)

    assert pool.free_bytes() == 8192
