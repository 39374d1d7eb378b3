"""The real model, loaded once for all engine tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch

from kv_store.codecs.registry import CODECS, codec_named
from stages.engine.config import ModelConfig, open_gguf
from stages.engine.gguf_weights import GgufWeights
from stages.engine.kv_cache import PagedKvCache
from stages.engine.model import Model
from stages.engine.weights import load_weights


@pytest.fixture(scope="session")
def model_path() -> Path:
    home = Path(os.environ.get("SLUICE_HOME", "~/.sluice")).expanduser()
    path = Path(os.environ.get("SLUICE_TEST_MODEL", home / "models" / "smollm2-135m-instruct.gguf"))
    if not path.exists():
        pytest.fail(f"{path} is missing; `make setup` fetches it")
    return path


@pytest.fixture(scope="session")
def source(model_path: Path) -> tuple[GgufWeights, ModelConfig]:
    reader = open_gguf(model_path)
    config = ModelConfig.from_gguf(reader)
    return GgufWeights(reader, config), config


@pytest.fixture(scope="session")
def model(source: tuple[GgufWeights, ModelConfig]) -> Model:
    return Model(load_weights(*source))


@pytest.fixture(params=[codec.name for codec in CODECS])
def cache(request: pytest.FixtureRequest, source: tuple[GgufWeights, ModelConfig]) -> PagedKvCache:
    return PagedKvCache(source[1].kv_layout, codec_named(request.param), num_pages=48)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Tests may change thread counts; each starts with two where there are two."""
    threads = min(2, numba.config.NUMBA_NUM_THREADS)
    torch.set_num_threads(threads)
    numba.set_num_threads(threads)
    yield
    torch.set_num_threads(threads)
    numba.set_num_threads(threads)
