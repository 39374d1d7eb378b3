"""Model files: names and paths, and a check that tells which files cannot be served before anything starts."""

import os
from collections.abc import Callable
from pathlib import Path
from struct import pack

import pytest

from stages.gguf.model_files import (
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
WriteGguf = Callable[..., Path]


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


def test_a_whole_file_passes(tmp_path: Path, write_gguf: WriteGguf) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    summary = check_gguf(path)
    assert (summary.architecture, summary.num_tensors) == ("llama", 2)
    assert summary.size_bytes == path.stat().st_size


@pytest.mark.parametrize("tensor_type", ["F32", "Q4_1", "Q8_0"])
def test_served_tensor_types_pass(tmp_path: Path, write_gguf: WriteGguf, tensor_type: str) -> None:
    check_gguf(write_gguf(tmp_path / "model.gguf", tensor_type=tensor_type))


@pytest.mark.parametrize("tensor_type", ["F16", "Q4_0", "BF16"])
def test_another_tensor_type_is_refused_by_tensor_and_type(
    tmp_path: Path, write_gguf: WriteGguf, tensor_type: str
) -> None:
    data = write_gguf(tmp_path / "other.gguf", tensor_type=tensor_type).read_bytes()
    assert problem_of(tmp_path, data) == (
        f"tensor token_embd.weight is {tensor_type}; only F32, Q4_1, Q8_0 can be served"
    )


def test_another_architecture_is_refused_by_name(tmp_path: Path, write_gguf: WriteGguf) -> None:
    data = write_gguf(tmp_path / "other.gguf", architecture="gemma3").read_bytes()
    assert "architecture 'gemma3'; only llama can be served" in problem_of(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"PK\x03\x04 a zip archive", "is not a GGUF file"),
        (pack("<4sIQQ", b"GGUF", 3, 0, 0), "holds a model of architecture None"),
        (pack("<4sIQQ", b"GGUF", 3, 0, 1), "is cut short: it has 24 bytes"),
    ],
)
def test_a_foreign_or_cut_file_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    assert problem_of(tmp_path, data).startswith(problem)


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


def test_a_path_works_wherever_a_name_does(
    tmp_path: Path, write_gguf: WriteGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "mine.gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spelling in (str(path), "./mine.gguf", "mine.gguf", "~/mine.gguf"):
        assert resolve(spelling, tmp_path / "home").samefile(path)


def test_a_path_without_a_file_is_refused_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere/x\.gguf: cannot be read: No such file"):
        resolve("nowhere/x.gguf", tmp_path)


def test_a_file_put_into_the_home_has_its_name(tmp_path: Path, write_gguf: WriteGguf) -> None:
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
