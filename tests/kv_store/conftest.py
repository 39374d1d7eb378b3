"""Fixtures of the KV store's tests: a pool, once in shared memory and once on a disk."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_store.blob import BlobKind, BlobMeta
from kv_store.pool import FilePool

_SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(params=["shared memory", "disk"])
def pool_directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A path at which no pool is yet; what the test puts there is deleted."""
    if request.param == "disk":
        yield tmp_path / "pool"
        return
    if not os.access(_SHARED_MEMORY, os.W_OK):
        pytest.skip("no shared memory here")
    parent = Path(tempfile.mkdtemp(prefix="sluice-pytest-", dir=_SHARED_MEMORY))
    try:
        yield parent / "pool"
    finally:
        shutil.rmtree(parent)


@pytest.fixture
def pool(pool_directory: Path) -> Iterator[FilePool]:
    """An empty pool with a quota of one MiB."""
    with FilePool.open(pool_directory, 1 << 20) as opened:
        yield opened


@pytest.fixture
def meta() -> BlobMeta:
    """What a writer says about the first chunk of a request."""
    return BlobMeta(
        kind=BlobKind.PAGED,
        codec_id=1,
        fingerprint=bytes(32),
        content_address=bytes(range(32)),
        start_token=0,
        num_tokens=64,
        attempt=2,
    )
