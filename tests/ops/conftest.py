"""What the tests of processes share: homes, pools, a small model file, and a stack of one stand-in stage."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from pipeline.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process must not set logging up: it would write to a stream of one test for good."""
    monkeypatch.setattr("ops.commands.common.configure_logs", lambda *_: None)


@pytest.fixture
def home() -> Iterator[Path]:
    """A home of its own: short, because a socket's path has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="sl-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)  # the server of a killed command may be about to end


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


@pytest.fixture
def stack_env(home: Path, pool_dir: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set the SLUICE_* variables of a small stack, and return the whole environment."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLUICE_HOME", str(home))
    monkeypatch.setenv("SLUICE_KV_POOL_DIR", str(pool_dir))
    monkeypatch.setenv("SLUICE_MODEL", str(tiny_model))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return dict(os.environ)


@pytest.fixture
def stack_settings(stack_env: dict[str, str]) -> Settings:
    """The settings of a small stack."""
    return Settings()


@pytest.fixture
def procfile(tmp_path: Path) -> Path:
    """A Procfile whose only stage answers everything."""
    path = tmp_path / "Procfile"
    path.write_text("tokenizer: python -m tests.ops.answering\n")
    return path
