"""A line of stages on a tiny model, for the tests of stages that work on queues."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_store.pool import FilePool
from ops.chaos.tiny_model import write_tiny_llama
from pipeline import worker
from stages.decode import stage as decode_stage
from stages.prefill import stage as prefill_stage
from stages.text.tokenizer import Tokenizer
from stages.text.vocabulary import Vocabulary
from tests.stages.line import Line

QUOTA_BYTES = 4 * 1024 * 1024


@pytest.fixture(scope="session")
def line_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its folded weights."""
    directory = tmp_path_factory.mktemp("line")
    write_tiny_llama(directory / "tiny.gguf")
    return directory


@pytest.fixture
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages notice a stop within milliseconds."""
    for module, name in ((prefill_stage, "_BLOCK_S"), (decode_stage, "_BLOCK_S"), (worker, "BLOCK_S")):
        monkeypatch.setattr(module, name, 0.05)


@pytest.fixture
def line(line_directory: Path, tmp_path: Path, short_reads: None) -> Iterator[Line]:
    """Queues, a pool and a model; tests say what runs on them."""
    model = line_directory / "tiny.gguf"
    pool_directory = tmp_path / "pool"
    with FilePool.open(pool_directory, QUOTA_BYTES) as pool:
        tokenizer = Tokenizer(Vocabulary.from_gguf(model))
        yield Line(model, line_directory / "weights", pool_directory, pool, tokenizer)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The GGUF file of the default model."""
    home = Path(os.environ.get("SLUICE_HOME") or "~/.sluice").expanduser()
    path = Path(os.environ.get("SLUICE_TEST_MODEL") or home / "models" / "smollm2-135m-instruct.gguf")
    if not path.is_file():
        pytest.fail(f"the test model is not at {path}: run `make setup`, or set SLUICE_TEST_MODEL", pytrace=False)
    return path
