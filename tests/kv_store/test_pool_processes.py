import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kv_store.blob import HEADER_BYTES, BlobMeta
from kv_store.directory import PrivateDirectory
from kv_store.errors import (
    PoolBusy,
)
from kv_store.pool import FilePool, PoolUsage

QUOTA = 1 << 20  # of the pool fixture
NOISE = np.random.default_rng(0).bytes(5000)
REPOSITORY = Path(__file__).parents[2]


def test_threads_share_one_pool(meta: BlobMeta, pool: FilePool) -> None:
    def use(worker: int) -> None:
        for index in range(10):
            payload = bytes([worker, index]) * 2000
            ref = pool.write(f"blob_{worker}_{index:03}", meta, [payload])
            with pool.read(ref) as blob:
                assert bytes(blob.payload) == payload
            if index % 2:
                pool.release(ref.name)

    with ThreadPoolExecutor(4) as executor:
        for done in [executor.submit(use, worker) for worker in range(4)]:
            done.result(timeout=60)

    assert len(pool.names()) == 20
    assert pool.usage() == PoolUsage(20, 20 * (HEADER_BYTES + 4000), QUOTA)


def test_two_processes_never_exceed_the_quota_together(meta: BlobMeta, pool: FilePool, pool_directory: Path) -> None:
    size_bytes = HEADER_BYTES + len(NOISE)
    fill = (
        "written = 0\n"
        "try:\n"
        "    while True:\n"
        f"        pool.write(f'blob_{{os.getpid()}}_{{written:06}}', meta, [bytes({len(NOISE)})])\n"
        "        written += 1\n"
        "except PoolFull:\n"
        "    print(written)\n"
    )
    children = [_run(pool_directory, fill) for _ in range(2)]
    try:
        assert [child.stdout.readline() for child in children if child.stdout] == ["ready\n"] * 2
        for child in children:
            assert child.stdin
            child.stdin.write("go\n")
            child.stdin.flush()
        counts = [int(child.communicate(timeout=60)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()

    assert sum(counts) == QUOTA // size_bytes
    assert pool.usage() == PoolUsage(sum(counts), sum(counts) * size_bytes, QUOTA)


def test_stopped_lock_holder_makes_writers_busy_not_stuck(meta: BlobMeta, pool_directory: Path) -> None:
    holder = PrivateDirectory.open(pool_directory, 5.0)
    with FilePool.open(pool_directory, QUOTA, lock_timeout_s=0.02) as pool:
        with holder.locked(), pytest.raises(PoolBusy):
            pool.write("blob_0001", meta, [NOISE])
        pool.write("blob_0001", meta, [NOISE])
    holder.close()


def _crash_while_writing(directory: Path) -> None:
    child = _run(
        directory,
        "os.pwritev = lambda *_: os._exit(9)\npool.write('blob_0001', meta, [bytes(5000)])\n",
    )
    child.communicate("go\n", timeout=60)
    assert child.returncode == 9


def test_what_a_crashed_writer_left_counts_until_it_is_swept(pool: FilePool, pool_directory: Path) -> None:
    _crash_while_writing(pool_directory)
    assert pool.usage() == PoolUsage(0, HEADER_BYTES + 5000, QUOTA)
    assert pool.names() == []

    assert pool.sweep_temporaries(older_than_s=3600) == 0
    (left,) = _temporaries(pool_directory)
    os.utime(left, (left.stat().st_atime, left.stat().st_mtime - 3601))
    assert pool.sweep_temporaries(older_than_s=3600) == 1

    assert pool.sweep_temporaries(older_than_s=0) == 0
    assert pool.usage() == PoolUsage(0, 0, QUOTA)


def test_living_writer_is_not_swept_however_old_its_file(
    meta: BlobMeta, pool: FilePool, pool_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    swept: list[int] = []

    def sweep_first(fd: int, views: list[memoryview], offset: int) -> int:
        (temporary,) = _temporaries(pool_directory)
        os.utime(temporary, (0, 0))
        with FilePool.open(pool_directory, QUOTA) as other:
            swept.append(other.sweep_temporaries(older_than_s=0))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", sweep_first)
    ref = pool.write("blob_0001", meta, [NOISE])

    assert swept == [0]
    with pool.read(ref) as blob:
        assert bytes(blob.payload) == NOISE


def test_sweeping_leaves_blobs_alone(meta: BlobMeta, pool: FilePool, pool_directory: Path) -> None:
    ref = pool.write("blob_0001", meta, [NOISE])
    os.utime(pool_directory / "blob_0001", (0, 0))

    assert pool.sweep_temporaries(older_than_s=0) == 0

    with pool.read(ref):
        pass


def _temporaries(directory: Path) -> list[Path]:
    return sorted(directory.glob(".tmp-*"))


def _run(directory: Path, code: str) -> "subprocess.Popen[str]":
    """Start another process that has a pool open in `directory`, and says so in its first line."""
    preamble = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from kv_store.blob import BlobKind, BlobMeta\n"
        "from kv_store.errors import PoolFull\n"
        "from kv_store.pool import FilePool\n"
        "meta = BlobMeta(kind=BlobKind.PAGED, codec_id=1, fingerprint=bytes(32), content_address=bytes(32),\n"
        "                start_token=0, num_tokens=64, attempt=0)\n"
        f"pool = FilePool.open(Path(sys.argv[1]), {QUOTA})\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", preamble + code, str(directory)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
