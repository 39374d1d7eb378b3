import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kv_store.blob import HEADER_BYTES, BlobMeta
from kv_store.errors import (
    BlobDamaged,
    BlobMissing,
    ForeignPool,
)
from kv_store.pool import FilePool

QUOTA = 1 << 20  # of the pool fixture
NOISE = np.random.default_rng(0).bytes(5000)


def test_every_flipped_bit_is_noticed(meta: BlobMeta, pool: FilePool, pool_directory: Path) -> None:
    ref = pool.write("blob_0001", meta, [b"\x00\xff\x55"])
    path = pool_directory / "blob_0001"
    whole = path.read_bytes()

    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(BlobDamaged), pool.read(ref):
            pass

    path.write_bytes(whole)
    with pool.read(ref) as blob:
        assert bytes(blob.payload) == b"\x00\xff\x55"


@pytest.mark.parametrize("size_bytes", [0, 1, HEADER_BYTES, HEADER_BYTES + len(NOISE) - 1, 10_000])
def test_blob_of_another_size_is_noticed(meta: BlobMeta, pool: FilePool, pool_directory: Path, size_bytes: int) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])
    os.truncate(pool_directory / "blob_0001", size_bytes)

    with pytest.raises(BlobDamaged) as damage, pool.read(ref):
        pass

    assert (damage.value.name, damage.value.field) == ("blob_0001", "file size")
    assert (damage.value.actual, damage.value.expected) == (size_bytes, ref.size_bytes)


@pytest.mark.parametrize(
    ("other_start", "other_payload"),
    [(0, NOISE[::-1]), (64, NOISE)],
    ids=["another payload", "the same payload of another position"],
)
def test_swapped_blobs_are_noticed(
    meta: BlobMeta, pool: FilePool, pool_directory: Path, other_start: int, other_payload: bytes
) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])
    other = pool.write("blob_0002", dataclasses.replace(meta, start_token=other_start), [other_payload])
    assert other.size_bytes == ref.size_bytes
    (pool_directory / "blob_0001").rename(pool_directory / "aside")
    (pool_directory / "blob_0002").rename(pool_directory / "blob_0001")
    (pool_directory / "aside").rename(pool_directory / "blob_0002")

    for swapped in (ref, other):
        with pytest.raises(BlobDamaged, match="referenced crc32"), pool.read(swapped):
            pass


def _link(path: Path) -> None:
    path.rename(path.with_name("real_one"))
    path.symlink_to("real_one")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (_link, "type"),
        (_fifo, "type"),
        (_folder, "type"),
        (lambda path: path.chmod(0o640), "mode"),
        (lambda path: path.chmod(0o604), "mode"),
    ],
    ids=["link", "fifo", "folder", "group", "others"],
)
def test_file_that_somebody_else_could_have_put_there_is_refused(
    meta: BlobMeta, pool: FilePool, pool_directory: Path, spoil: Callable[[Path], None], field: str
) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])
    spoil(pool_directory / "blob_0001")

    with pytest.raises(BlobDamaged) as damage, pool.read(ref):
        pass

    assert damage.value.field == field


def test_file_of_another_user_is_refused(meta: BlobMeta, pool: FilePool, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    with pytest.raises(BlobDamaged, match="owner"), pool.read(ref):
        pass


def test_missing_blob_is_named(meta: BlobMeta, pool: FilePool) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])
    pool.release("blob_0001")

    with pytest.raises(BlobMissing, match="blob_0001"), pool.read(ref):
        pass


def test_reference_to_another_pool_is_refused(meta: BlobMeta, pool: FilePool, tmp_path: Path) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])

    with FilePool.open(tmp_path / "another", QUOTA) as other:
        with pytest.raises(ForeignPool) as refusal, other.read(ref):
            pass

        assert (refusal.value.actual, refusal.value.expected) == (pool.pool_id, other.pool_id)
