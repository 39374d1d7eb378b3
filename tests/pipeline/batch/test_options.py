"""What makes two batches the same, and what a batch's author may choose."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.batch.options import MAX_TIMEOUT_S, MAX_WINDOW, BatchOptions, directory_name


def options(**fields: Any) -> BatchOptions:
    named = {
        "source": Path("/in"),
        "target": Path("/out"),
        "errors": Path("/out.errors"),
        "model": "tiny",
        "stack_model": "/models/tiny.gguf",
    }
    return BatchOptions(**named | fields)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("target", Path("/elsewhere"), "output"),
        ("errors", Path("/out"), "errors"),
        ("model", "other", "model name"),
        ("stack_model", "/models/other/tiny.gguf", "model"),
        ("speculate", False, "speculate"),
        ("response_role", "bot", "response role"),
    ],
)
def test_what_the_output_depends_on_is_identity(field: str, value: object, said: str) -> None:
    ours, theirs = options().identity("hash"), options(**{field: value}).identity("hash")
    assert [name for name in ours if ours[name] != theirs[name]] == [said]


def test_how_it_is_done_and_where_the_input_lies_is_not() -> None:
    other = options(window=1, timeout_s=60, source=Path("/moved"))
    assert other.identity("hash") == options().identity("hash")
    assert other.identity("another hash") != options().identity("hash")


def test_every_output_has_a_directory_of_its_own() -> None:
    names = {directory_name(Path(path)) for path in ("/a", "/b", "/a.jsonl", "/a/b", "/ä", "/a\udc80")}
    assert len(names) == 6
    assert all(name.isalnum() for name in names)
    assert directory_name(Path("/a")) in names


@pytest.mark.parametrize(
    "fields",
    [
        {"window": 0},
        {"window": MAX_WINDOW + 1},
        {"timeout_s": -1},
        {"timeout_s": MAX_TIMEOUT_S + 1},
        {"response_role": ""},
        {"unknown": 1},
    ],
)
def test_what_is_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        options(**fields)


def test_options_survive_being_written_down() -> None:
    one = options(target=Path("/ü/a b.jsonl"), window=7, timeout_s=3)
    assert BatchOptions.model_validate_json(one.model_dump_json()) == one
