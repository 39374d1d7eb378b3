"""A small model file, written by gguf's own writer and changed by the tests that need it otherwise."""

import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

WriteGguf = Callable[..., Path]


def write(
    path: Path,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    architecture: str = "llama",
    tensor_type: str = "Q8_0",
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    writer.add_array("tokenizer.ggml.scores", [0.0, 1.0, 2.0])
    writer.add_chat_template("{% for message in messages %}{% endfor %}")
    if change:
        change(writer)
    writer.add_tensor("norm.weight", np.arange(64, dtype=np.float32))
    quantisation = gguf.GGMLQuantizationType[tensor_type]
    rows = gguf.quants.quantize(np.ones((4, 64), dtype=np.float32), quantisation)
    writer.add_tensor("token_embd.weight", rows, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_gguf() -> WriteGguf:
    """Return a function that writes the file: an F32 tensor and a quantised one."""
    return write


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of that file as it is."""
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The GGUF file of the default model."""
    home = Path(os.environ.get("SLUICE_HOME") or "~/.sluice").expanduser()
    path = Path(os.environ.get("SLUICE_TEST_MODEL") or home / "models" / "smollm2-135m-instruct.gguf")
    if not path.is_file():
        pytest.fail(f"the test model is not at {path}: run `make setup`, or set SLUICE_TEST_MODEL", pytrace=False)
    return path
