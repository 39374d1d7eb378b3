"""What stacks of all end-to-end tests share: caches, the real model, and a tiny one."""

import os
from pathlib import Path

import pytest

from ops.chaos.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def caches(pytestconfig: pytest.Config) -> Path:
    """Compiled code and folded weights: made once, for all homes and for the next session too."""
    assert pytestconfig.cache is not None
    directory = pytestconfig.cache.mkdir("sluice-stacks")
    compiled = os.environ.get("NUMBA_CACHE_DIR")
    if compiled and not (directory / "numba").exists():
        # A home keeps a directory per state of the kernels' sources (kernel_cache.py); this one is of today's.
        (directory / "numba").symlink_to(Path(compiled).parent)
    return directory.absolute()


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The GGUF file of the default model."""
    home = Path(os.environ.get("SLUICE_HOME") or "~/.sluice").expanduser()
    path = Path(os.environ.get("SLUICE_TEST_MODEL") or home / "models" / "smollm2-135m-instruct.gguf")
    if not path.is_file():
        pytest.fail(f"the test model is not at {path}: run `make setup`, or set SLUICE_TEST_MODEL", pytrace=False)
    return path.absolute()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of random weights that differ."""
    directory = tmp_path_factory.mktemp("models")
    return write_tiny_llama(directory / "one.gguf", seed=0), write_tiny_llama(directory / "two.gguf", seed=1)
