"""The real model, loaded once for all engine tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch

from kv_store.codecs.registry import CODECS, codec_named
from stages.engine.config import ModelConfig
from stages.engine.gguf_weights import GgufWeights
from stages.engine.kv_cache import PagedKvCache
from stages.engine.model import Model
from stages.engine.weights import ModelWeights
from stages.gguf.file import GgufFile

MOST_THREADS = numba.get_num_threads()


@pytest.fixture(scope="session")
def model_path() -> Path:
    home = Path(os.environ.get("SLUICE_HOME", "~/.sluice")).expanduser()
    path = Path(os.environ.get("SLUICE_TEST_MODEL", home / "models" / "smollm2-135m-instruct.gguf"))
    if not path.exists():
        pytest.fail(f"{path} is missing; `make setup` fetches it")
    return path


@pytest.fixture(scope="session")
def source(model_path: Path) -> Iterator[tuple[GgufWeights, ModelConfig]]:
    with GgufFile.open(model_path) as file:
        config = ModelConfig.from_gguf(file)
        yield GgufWeights(file, config), config


@pytest.fixture(scope="session")
def model(source: tuple[GgufWeights, ModelConfig]) -> Model:
    weights, config = source
    return Model(config, ModelWeights.fold(weights, config))


@pytest.fixture(params=[codec.name for codec in CODECS])
def cache(request: pytest.FixtureRequest, source: tuple[GgufWeights, ModelConfig]) -> PagedKvCache:
    return PagedKvCache(source[1].kv_layout, codec_named(request.param), num_pages=48)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Tests may change thread counts; each starts with two where there are two."""
    threads = min(2, MOST_THREADS)
    torch.set_num_threads(threads)
    numba.set_num_threads(threads)
    yield
    torch.set_num_threads(threads)
    numba.set_num_threads(threads)
