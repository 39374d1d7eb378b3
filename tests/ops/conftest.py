"""What the tests of processes share: short homes, watched pids, and a model file that is small."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest


@pytest.fixture
def home() -> Iterator[Path]:
    """A home of its own: short, because a socket's path has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="sl-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def pool_dir() -> Iterator[Path]:
    """A pool of its own, in memory where there is such a place."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="sl-pool-", dir=parent))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file that passes the header check; no stand-in reads more of it."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
