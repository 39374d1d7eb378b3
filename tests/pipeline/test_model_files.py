"""Model files: names and paths, and a header check that tells every kind of wrong file apart."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from struct import pack

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.gguf_header import TensorInfo
from pipeline.model_files import (
    KNOWN_MODELS,
    ModelFileError,
    UnknownModel,
    check_gguf,
    list_models,
    model_path,
    resolve,
)

NAME = "smollm2-135m-instruct"
KNOWN = KNOWN_MODELS[NAME]


def write_gguf(path: Path, architecture: str = "llama", tensor_type: str | None = None) -> Path:
    """Write a small model file with gguf's own writer: an F32 tensor and a quantised one."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    writer.add_array("tokenizer.ggml.scores", [0.0, 1.0, 2.0])
    writer.add_chat_template("{% for message in messages %}{% endfor %}")
    writer.add_tensor("norm.weight", np.ones(64, dtype=np.float32))
    quantisation = gguf.GGMLQuantizationType[tensor_type or "Q8_0"]
    rows = gguf.quants.quantize(np.ones((4, 64), dtype=np.float32), quantisation)
    writer.add_tensor("token_embd.weight", rows, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def problem_of(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as refusal:
        check_gguf(path)
    assert str(refusal.value) == f"{path}: {refusal.value.problem}"
    return refusal.value.problem


def put_known(home: Path, size: int) -> Path:
    path = model_path(NAME, home)
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, size)
    return path


def test_a_whole_file_passes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    summary = check_gguf(path)
    assert (summary.architecture, summary.num_tensors) == ("llama", 2)
    assert summary.size_bytes == path.stat().st_size


@pytest.mark.parametrize("tensor_type", ["F32", "Q4_1", "Q8_0"])
def test_served_tensor_types_pass(tmp_path: Path, tensor_type: str) -> None:
    check_gguf(write_gguf(tmp_path / "model.gguf", tensor_type=tensor_type))


@pytest.mark.parametrize("tensor_type", ["F16", "Q4_0", "BF16"])
def test_another_tensor_type_is_refused_by_tensor_and_type(tmp_path: Path, tensor_type: str) -> None:
    data = write_gguf(tmp_path / "other.gguf", tensor_type=tensor_type).read_bytes()
    assert problem_of(tmp_path, data) == (
        f"tensor token_embd.weight is {tensor_type}; only F32, Q4_1, Q8_0 can be served"
    )


def test_tensor_types_are_named_as_gguf_names_them() -> None:
    for known in gguf.GGMLQuantizationType:
        assert TensorInfo("t", known.value, (1,), 0).type_name == known.name
    assert TensorInfo("t", 999, (1,), 0).type_name == "type 999"


def test_sizes_of_tensors_agree_with_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tensor_type="Q4_1")
    for tensor in gguf.GGUFReader(path).tensors:
        dims = tuple(int(dim) for dim in tensor.shape)
        assert TensorInfo(tensor.name, tensor.tensor_type, dims, 0).num_bytes() == tensor.n_bytes


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "other.gguf", architecture="gemma3").read_bytes()
    assert "architecture 'gemma3'; only llama can be served" in problem_of(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is cut short: it has 0 bytes"),
        (b"PK\x03\x04 a zip archive", r"is not a GGUF file: it starts with b'PK\x03\x04'"),
        (pack("<4sIQQ", b"GGUF", 2, 0, 0), "is GGUF version 2; only version 3 can be read"),
        (pack(">4sIQQ", b"GGUF", 3, 0, 0), "is a big-endian GGUF file"),
        (pack("<4sIQQ", b"GGUF", 3, 0, 0), "holds a model of architecture None"),
        (pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "is cut short: it has 24 bytes"),
        (pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), "is cut short: it has 24 bytes"),
        (pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 40), "is damaged: it claims a name of 1099511627776 bytes"),
        (pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 77), "is damaged: a metadata value has type 77"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    assert problem_of(tmp_path, data).startswith(problem)


def test_endlessly_nested_arrays_are_refused(tmp_path: Path) -> None:
    data = pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 9) + pack("<IQ", 9, 1) * 5000
    assert problem_of(tmp_path, data).startswith("is damaged: a metadata value has type 9")


def test_missing_tensor_data_is_noticed_to_the_byte(tmp_path: Path, whole: bytes) -> None:
    needed = len(whole.rstrip(b"\0"))  # the writer pads after the last tensor
    assert problem_of(tmp_path, whole[: needed - 32]).startswith("is cut short: it has")


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_a_file_cut_anywhere_is_refused_as_cut_short(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(whole) - 64))
    assert problem_of(tmp_path_factory.mktemp("cut"), whole[:cut]).startswith("is cut short")


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_a_flipped_bit_gives_a_sentence_or_passes(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    flipped = bytearray(whole)
    position = data.draw(st.integers(0, len(whole) - 1))
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flip") / "model.gguf"
    path.write_bytes(flipped)
    with suppress(ModelFileError):  # and nothing else
        check_gguf(path)


@pytest.mark.parametrize("make", ["absent", "directory", "fifo"])
def test_what_is_not_a_file_is_refused(tmp_path: Path, make: str) -> None:
    path = tmp_path / "model.gguf"
    if make == "directory":
        path.mkdir()
    if make == "fifo":
        os.mkfifo(path)
    with pytest.raises(ModelFileError, match=r"model\.gguf: (is not a file|cannot be read: No such file)"):
        check_gguf(path)


def test_a_name_resolves_to_the_file_under_the_home(tmp_path: Path) -> None:
    path = put_known(tmp_path, KNOWN.size_bytes)
    assert resolve(NAME, tmp_path) == path


def test_a_name_that_was_not_pulled_says_how_to_pull(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"is not there yet; run `sluice models pull smollm2-135m-instruct`"):
        resolve(NAME, tmp_path)


def test_a_cut_file_says_how_to_pull(tmp_path: Path) -> None:
    put_known(tmp_path, 1000)
    with pytest.raises(ModelFileError, match=r"has 1000 bytes instead of 98362432; run `sluice models pull"):
        resolve(NAME, tmp_path)


@pytest.mark.parametrize("name", ["gpt-4", "", "..", "smollm2", "a b", "\0"])
def test_an_unknown_name_lists_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnknownModel, match="known: smollm2-135m-instruct") as refusal:
        resolve(name, tmp_path)
    assert refusal.value.known == (NAME,)


def test_a_path_works_wherever_a_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "mine.gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spelling in (str(path), "./mine.gguf", "mine.gguf", "~/mine.gguf"):
        assert resolve(spelling, tmp_path / "home").samefile(path)


def test_a_path_without_a_file_is_refused_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere/x\.gguf: cannot be read: No such file"):
        resolve("nowhere/x.gguf", tmp_path)


def test_a_file_put_into_the_home_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    path = write_gguf(tmp_path / "models" / "mine-1b.gguf")
    assert resolve("mine-1b", tmp_path) == path
    assert [(entry.name, entry.state) for entry in list_models(tmp_path)] == [
        ("mine-1b", "ready"),
        (NAME, "missing"),
    ]


def test_a_cut_known_file_is_listed_as_damaged(tmp_path: Path) -> None:
    put_known(tmp_path, 5)
    assert [(entry.state, entry.size_bytes) for entry in list_models(tmp_path)] == [("damaged", 5)]


def test_model_files_are_resolved_without_torch() -> None:
    code = "import sys, pipeline.model_files; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)
