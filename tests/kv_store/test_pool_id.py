import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kv_store.errors import (
    PoolRefused,
    PoolUnavailable,
)
from kv_store.pool import FilePool

QUOTA = 1 << 20  # of the pool fixture
NOISE = np.random.default_rng(0).bytes(5000)


def _link(path: Path) -> None:
    path.rename(path.with_name("real_one"))
    path.symlink_to("real_one")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def test_pool_id_stays_and_is_no_blob(pool: FilePool, pool_directory: Path) -> None:
    with FilePool.open(pool_directory, QUOTA) as again:
        assert again.pool_id == pool.pool_id
        assert again.names() == []
        assert again.usage().used_bytes == 0


def test_pools_have_different_ids(tmp_path: Path) -> None:
    with FilePool.open(tmp_path / "one", QUOTA) as one, FilePool.open(tmp_path / "two", QUOTA) as two:
        assert one.pool_id != two.pool_id


def test_all_who_open_a_new_pool_at_once_see_one_id(pool_directory: Path) -> None:
    def open_pool(_: int) -> str:
        with FilePool.open(pool_directory, QUOTA) as pool:
            return pool.pool_id

    with ThreadPoolExecutor(8) as executor:
        assert len(set(executor.map(open_pool, range(16), timeout=60))) == 1


@pytest.mark.parametrize("content", [b"", b"0123", b"0123456789ABCDEF", b"0123456789abcdef\n"])
def test_pool_with_a_broken_id_is_refused(pool: FilePool, pool_directory: Path, content: bytes) -> None:
    (pool_directory / ".pool-id").write_bytes(content)

    with pytest.raises(PoolRefused, match="content"):
        FilePool.open(pool_directory, QUOTA)


@pytest.mark.parametrize(
    ("spoil", "field"), [(_link, "type"), (_fifo, "type"), (lambda path: path.chmod(0o644), "mode")]
)
def test_pool_id_that_is_not_safely_ours_is_refused(
    pool: FilePool, pool_directory: Path, spoil: Callable[[Path], None], field: str
) -> None:
    spoil(pool_directory / ".pool-id")

    with pytest.raises(PoolRefused) as refusal:
        FilePool.open(pool_directory, QUOTA)

    assert refusal.value.field == field


def test_loose_directory_is_refused(pool: FilePool, pool_directory: Path) -> None:
    pool_directory.chmod(0o755)

    with pytest.raises(PoolRefused, match="mode is 0755"):
        FilePool.open(pool_directory, QUOTA)


def test_crash_while_the_id_is_made_leaves_none(pool_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, views: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", write)
        with pytest.raises(PoolUnavailable):
            FilePool.open(pool_directory, QUOTA)

    FilePool.open(pool_directory, QUOTA).close()
