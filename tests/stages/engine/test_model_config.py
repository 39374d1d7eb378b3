"""The configuration of a model file: what is read, and every kind of model we cannot run refused by name."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from stages.engine.config import ModelConfig
from stages.gguf.errors import UnsupportedModelError
from stages.gguf.file import GgufFile

FIELDS: Mapping[str, float] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES: Mapping[str, tuple[int, ...]] = {
    "token_embd": (10, 32),
    "output_norm": (32,),
    "blk.0.attn_norm": (32,),
    "blk.0.attn_q": (32, 32),
    "blk.0.attn_k": (16, 32),
    "blk.0.attn_v": (16, 32),
    "blk.0.attn_output": (32, 32),
    "blk.0.ffn_norm": (32,),
    "blk.0.ffn_gate": (96, 32),
    "blk.0.ffn_up": (96, 32),
    "blk.0.ffn_down": (32, 96),
}

Shapes = Mapping[str, tuple[int, ...] | None]
Read = Callable[..., ModelConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that writes a tiny model, changed as asked (None leaves out), and reads it."""

    def write(
        fields: Mapping[str, object] | None = None, shapes: Shapes | None = None, architecture: str = "llama"
    ) -> ModelConfig:
        path = tmp_path / "tiny.gguf"
        writer = GGUFWriter(path, architecture)
        for name, value in {**FIELDS, **(fields or {})}.items():
            _add(writer, f"llama.{name}", value)
        for name, shape in {**SHAPES, **(shapes or {})}.items():
            if shape is not None:
                writer.add_tensor(name if "bias" in name else f"{name}.weight", np.ones(shape, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with GgufFile.open(path) as file:
            return ModelConfig.from_gguf(file)

    return write


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def test_the_default_model_is_read_as_it_is(model_path: Path) -> None:
    started = time.process_time()
    with GgufFile.open(model_path) as file:
        config = ModelConfig.from_gguf(file)
    assert time.process_time() - started < 0.3
    assert config == ModelConfig(
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49_152,
        rms_norm_eps=float(np.float32(1e-5)),
        rope_theta=100_000.0,
        max_model_len=8192,
        tied_embedding=True,
    )


def test_what_is_not_stated_has_its_default(read: Read) -> None:
    config = read()
    assert (config.head_dim, config.rope_theta, config.tied_embedding) == (8, 10_000.0, True)
    no_groups = {"blk.0.attn_k": (32, 32), "blk.0.attn_v": (32, 32)}
    assert read({"attention.head_count_kv": None}, no_groups).num_kv_heads == 4


def test_an_output_matrix_of_its_own_is_seen(read: Read) -> None:
    assert not read(shapes={"output": (10, 32)}).tied_embedding


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"block_count": None}, "metadata field llama.block_count is missing"),
        ({"block_count": 0}, "metadata field llama.block_count is 0, expected a whole number"),
        ({"block_count": 2**32 - 1}, "tensor blk.1.attn_norm.weight is missing"),
        ({"context_length": 128.5}, "metadata field llama.context_length is 128.5, expected a whole number"),
        ({"context_length": "many"}, "metadata field llama.context_length is not a single number"),
        ({"attention.head_count": True}, "metadata field llama.attention.head_count is not a single number"),
        ({"attention.head_count": 0}, "metadata field llama.attention.head_count is 0"),
        ({"attention.head_count_kv": [2, 1]}, "metadata field llama.attention.head_count_kv is not a single number"),
        ({"attention.head_count_kv": 3}, "4 query heads do not divide over 3 kv heads"),
        ({"attention.key_length": 12}, "head_dim is 12; the kernels need a power of two"),
        ({"attention.head_count": 64, "attention.head_count_kv": 64}, "metadata field llama.attention.key_length is 0"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon is nan, expected a number above 0"),
        ({"rope.freq_base": -1.0}, "metadata field llama.rope.freq_base is -1.0, expected a number above 0"),
        ({"rope.dimension_count": 4}, "only part of each head is rotated"),
        ({"rope.scaling.type": "yarn"}, "rotary scaling is not supported: llama.rope.scaling.type"),
    ],
)
def test_another_kind_of_model_is_refused_by_field(read: Read, fields: dict[str, object], problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf: ") as refusal:
        read(fields)
    assert problem in refusal.value.problem


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"token_embd": None}, "tensor token_embd.weight is missing"),
        ({"blk.0.ffn_gate": None}, "tensor blk.0.ffn_gate.weight is missing"),
        ({"blk.0.attn_v": (32, 32)}, "tensor blk.0.attn_v.weight has shape (32, 32), expected (16, 32)"),
        ({"blk.0.attn_q.bias": (32,)}, "holds 1 tensors that this engine would not use, such as blk.0.attn_q.bias"),
        ({"rope_freqs": (4,)}, "rotary scaling is not supported: rope_freqs.weight"),
    ],
)
def test_another_kind_of_model_is_refused_by_tensor(read: Read, shapes: Shapes, problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf: ") as refusal:
        read(shapes=shapes)
    assert problem in refusal.value.problem


def test_another_architecture_is_refused_by_name(read: Read) -> None:
    with pytest.raises(UnsupportedModelError, match="holds a model of architecture 'gemma3'; only llama can be served"):
        read(architecture="gemma3")
