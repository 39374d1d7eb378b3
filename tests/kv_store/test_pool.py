import dataclasses
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from kv_store.blob import HEADER_BYTES, BlobKind, BlobMeta, Compression
from kv_store.errors import (
    BlobDamaged,
    BlobExists,
    BlobTooLarge,
    InvalidValue,
)
from kv_store.pool import FilePool, PoolUsage
from kv_store.ref import BlobRef

QUOTA = 1 << 20  # of the pool fixture
NOISE = np.random.default_rng(0).bytes(5000)
REPETITIVE = b"keys and values " * 500


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_blob_comes_back_as_it_was_written(meta: BlobMeta, pool: FilePool, compression: Compression) -> None:
    buffers = [np.arange(6000, dtype=np.uint16).reshape(60, 100), REPETITIVE]

    ref = pool.write("blob_0001", dataclasses.replace(meta, start_token=64), buffers, compression=compression)

    with pool.read(ref) as (header, payload):
        assert bytes(payload) == buffers[0].tobytes() + REPETITIVE
        assert (header.kind, header.codec_id, header.attempt) == (BlobKind.PAGED, 1, 2)
        assert (header.start_token, header.num_tokens) == (64, 64)
        assert (header.fingerprint, header.content_address) == (bytes(32), bytes(range(32)))
        assert (header.compression, header.payload_bytes) == (compression, len(payload))
    assert pool.usage() == PoolUsage(num_blobs=1, used_bytes=ref.size_bytes, quota_bytes=QUOTA)


def test_blob_written_by_one_pool_is_read_by_another(meta: BlobMeta, pool: FilePool, pool_directory: Path) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])

    with FilePool.open(pool_directory, QUOTA) as other, other.read(ref) as blob:
        assert bytes(blob.payload) == NOISE


def test_blob_file_is_its_header_and_payload_and_the_owners_alone(
    meta: BlobMeta, pool: FilePool, pool_directory: Path
) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])

    path = pool_directory / "blob_0001"
    assert path.read_bytes()[HEADER_BYTES:] == NOISE
    assert path.stat().st_size == ref.size_bytes == HEADER_BYTES + len(NOISE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_zstd_is_stored_compressed(meta: BlobMeta, pool: FilePool) -> None:
    ref = pool.write("blob_0001", meta, [REPETITIVE], compression="zstd")

    assert ref.size_bytes < len(REPETITIVE) / 4


def test_reference_survives_the_way_through_a_message(meta: BlobMeta, pool: FilePool) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])

    with pool.read(BlobRef.model_validate(ref.model_dump())) as blob:
        assert bytes(blob.payload) == NOISE


def test_name_is_used_once_and_the_first_bytes_stay(meta: BlobMeta, pool: FilePool) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])

    with pytest.raises(BlobExists):
        pool.write("blob_0001", meta, [REPETITIVE])

    with pool.read(ref) as blob:
        assert bytes(blob.payload) == NOISE
    assert pool.usage().used_bytes == ref.size_bytes


def test_name_taken_while_the_blob_was_written_is_not_replaced(
    meta: BlobMeta, pool: FilePool, pool_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, first = os.pwritev, True

    def write_twice(fd: int, views: list[memoryview], offset: int) -> int:
        nonlocal first
        if first:
            first = False
            pool.write("blob_0001", meta, [REPETITIVE])
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", write_twice)
    with pytest.raises(BlobExists):
        pool.write("blob_0001", meta, [NOISE])

    assert (pool_directory / "blob_0001").read_bytes()[HEADER_BYTES:] == REPETITIVE
    assert list(pool_directory.glob(".tmp-*")) == []


@pytest.mark.parametrize("name", ["../outside", "short", "dotted.name", ".pool-id", "new_line\n"])
def test_name_outside_the_pattern_reaches_no_file(
    meta: BlobMeta, pool: FilePool, pool_directory: Path, name: str
) -> None:
    with pytest.raises(InvalidValue):
        pool.write(name, meta, [NOISE])
    with pytest.raises(InvalidValue):
        pool.release(name)

    assert [path.name for path in pool_directory.iterdir()] == [".pool-id"]
    assert not (pool_directory.parent / "outside").exists()


def test_quota_below_one_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="quota_bytes"):
        FilePool.open(tmp_path / "pool", 0)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_payload_is_read_only(meta: BlobMeta, pool: FilePool, compression: Compression) -> None:
    ref = pool.write("blob_0001", meta, [REPETITIVE], compression=compression)

    with pool.read(ref) as blob:
        assert blob.payload.readonly
        assert not np.frombuffer(blob.payload, np.uint8).flags.writeable


def test_mapping_ends_with_the_context(meta: BlobMeta, pool: FilePool) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])

    with pool.read(ref) as blob:
        assert "blob_0001" in Path("/proc/self/maps").read_text()

    assert "blob_0001" not in Path("/proc/self/maps").read_text()
    with pytest.raises(ValueError, match="released"):
        blob.payload[0]


def test_array_outlives_context_blob_and_pool_and_then_unmaps(meta: BlobMeta, pool_directory: Path) -> None:
    pool = FilePool.open(pool_directory, QUOTA)
    ref = pool.write("blob_0001", meta, [NOISE])
    with pool.read(ref) as blob:
        array = np.frombuffer(blob.payload, np.uint8)
    pool.release("blob_0001")
    pool.close()

    assert array.tobytes() == NOISE
    del blob, array
    assert "blob_0001" not in Path("/proc/self/maps").read_text()


def test_slice_outlives_the_context(meta: BlobMeta, pool: FilePool) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])

    with pool.read(ref) as blob:
        part = blob.payload[10:20]

    assert bytes(part) == NOISE[10:20]


def test_reader_keeps_its_bytes_when_the_name_is_used_again(meta: BlobMeta, pool: FilePool) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])

    with pool.read(ref) as blob:
        pool.release("blob_0001")
        pool.write("blob_0001", meta, [REPETITIVE])
        assert bytes(blob.payload) == NOISE


def test_payload_starts_on_a_cache_line(meta: BlobMeta, pool: FilePool) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])

    with pool.read(ref) as blob:
        assert np.frombuffer(blob.payload, np.uint8).ctypes.data % 64 == 0


def test_no_descriptor_is_left_open(meta: BlobMeta, pool: FilePool, pool_directory: Path) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])
    before = len(list(Path("/proc/self/fd").iterdir()))

    with pool.read(ref):
        pass
    with pytest.raises(BlobDamaged), pool.read(ref.model_copy(update={"size_bytes": 7})):
        pass
    with pytest.raises(BlobDamaged), pool.read(ref.model_copy(update={"crc32": 7})):
        pass
    with pytest.raises(BlobExists):
        pool.write("blob_0001", meta, [NOISE])
    with pytest.raises(BlobTooLarge):
        pool.write("blob_0002", meta, [bytes(QUOTA)])
    pool.usage()
    pool.sweep_temporaries(0)
    FilePool.open(pool_directory, QUOTA).close()

    assert len(list(Path("/proc/self/fd").iterdir())) == before
