"""The input's index: every line is what a plain reader of the file sees, and a changed file is noticed."""

import hashlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batch.errors import BatchFilesDamaged, InputChanged
from pipeline.batch.input_index import ENTRY, InputLines, build_index, summarise
from pipeline.batch.lines import MAX_LINE_BYTES, BatchLine, BatchLineError, read_batch

MODEL = "tiny"
BOM = b"\xef\xbb\xbf"


def line(custom_id: object, prompt: str = "a") -> bytes:
    body = {"model": MODEL, "prompt": prompt, "seed": 1}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}).encode()


PIECES = st.sampled_from(
    [
        *(line(custom_id) for custom_id in ("a", "b", "ü", "\ud800", "x" * 513, "", None, 7)),
        line("a", prompt="another"),
        BOM + line("a"),
        b'{"custom_id": "a", "x": NaN}',
        b'{"custom_id": "b"}',
        '{"custom_id": "a"}'.encode("utf-16"),
        b"[1, 2]",
        b"{",
        b"\xff\xfe",
        b"",
        b"   \t",
        BOM,
        b"\x0b",
    ]
)
ENDS = st.sampled_from([b"\n", b"\r\n"])


def indexed(data: bytes, directory: Path) -> list[BatchLine | BatchLineError]:
    source, index = directory / "in.jsonl", directory / "input.index"
    source.write_bytes(data)
    summary = build_index(source, index)
    assert summary == summarise(source)
    assert summary.sha256 == hashlib.sha256(data).hexdigest()
    with InputLines(source, index) as lines:
        assert len(lines) == summary.num_lines
        found = [lines.read(position, MODEL) for position in range(len(lines))]
        assert [lines.line_number(position) for position in range(len(lines))] == [one.line_number for one in found]
    assert not index.with_suffix(".new").exists()
    return found


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(PIECES, ENDS), max_size=12), st.booleans(), st.booleans())
def test_every_line_is_what_a_plain_reader_sees(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[bytes, bytes]], has_bom: bool, is_cut: bool
) -> None:
    data = (BOM if has_bom else b"") + b"".join(piece + end for piece, end in pieces)
    if is_cut:
        data = data.removesuffix(b"\n")
    assert indexed(data, tmp_path_factory.mktemp("index")) == list(read_batch(io.BytesIO(data), MODEL))


def test_a_line_that_is_too_long_is_an_error_in_its_place(tmp_path: Path) -> None:
    fits = line("fits")
    fits += b" " * (MAX_LINE_BYTES - 1 - len(fits))
    data = b"\n".join(
        [line("a"), b"x" * (2 * MAX_LINE_BYTES + 5), fits, fits + b"  ", b" " * MAX_LINE_BYTES, line("b")]
    )
    found = indexed(data, tmp_path)
    assert found == list(read_batch(io.BytesIO(data), MODEL))
    codes = [one.code if isinstance(one, BatchLineError) else None for one in found]
    assert codes == [None, "line_too_long", None, "line_too_long", "line_too_long", None]


def test_duplicates_are_found_however_far_apart(tmp_path: Path) -> None:
    ids = [f"id-{number}" for number in range(9000)] + ["id-3", "id-8999", "id-3"]
    found = indexed(b"\n".join(line(custom_id) for custom_id in ids), tmp_path)
    problems = [one for one in found if isinstance(one, BatchLineError)]
    assert [(one.line_number, one.code) for one in problems] == [
        (number, "duplicate_custom_id") for number in (9001, 9002, 9003)
    ]
    assert ["is already on line 4" in one.message for one in problems] == [True, False, True]


def test_a_file_of_nothing_has_no_lines(tmp_path: Path) -> None:
    assert indexed(b"", tmp_path) == []
    assert indexed(BOM + b"\r\n\n  \n", tmp_path) == []


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        (line("a") + b"\n" + line("c") + b"\n", "line 2"),
        (line("a") + b"\n" + line("b"), "line 2"),
        (line("a") + b"\n", "line 2"),
        (b"", "line 1"),
        (b"\n" + line("a") + b"\n" + line("b") + b"\n", "line 1"),
    ],
)
def test_a_line_that_was_changed_is_noticed_when_it_is_read(tmp_path: Path, changed: bytes, where: str) -> None:
    source, index = tmp_path / "in.jsonl", tmp_path / "input.index"
    source.write_bytes(line("a") + b"\n" + line("b") + b"\n")
    build_index(source, index)
    source.write_bytes(changed)
    with InputLines(source, index) as lines, pytest.raises(InputChanged, match=where):
        [lines.read(position, MODEL) for position in range(len(lines))]


def test_a_copy_under_the_same_name_is_the_same_input(tmp_path: Path) -> None:
    source, index = tmp_path / "in.jsonl", tmp_path / "input.index"
    source.write_bytes(line("a") + b"\n")
    build_index(source, index)
    data = source.read_bytes()
    source.unlink()
    source.write_bytes(data)
    with InputLines(source, index) as lines:
        assert isinstance(lines.read(0, MODEL), BatchLine)


def test_half_an_index_is_said_to_be_damaged(tmp_path: Path) -> None:
    source, index = tmp_path / "in.jsonl", tmp_path / "input.index"
    source.write_bytes(line("a"))
    index.write_bytes(b"x" * (ENTRY.itemsize + 1))
    with pytest.raises(BatchFilesDamaged, match="not a multiple of 40"):
        InputLines(source, index)


def test_a_pass_that_is_broken_off_leaves_no_index(tmp_path: Path) -> None:
    source, index = tmp_path / "in.jsonl", tmp_path / "input.index"
    source.write_bytes(line("a"))

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        build_index(source, index, stop)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_long_pass_can_be_broken_off(tmp_path: Path) -> None:
    source, num_ticks = tmp_path / "in.jsonl", 0
    source.write_bytes(b"{}\n" * 10_000)

    def count() -> None:
        nonlocal num_ticks
        num_ticks += 1

    summarise(source, count)
    assert num_ticks == 2
    build_index(source, tmp_path / "index", count)
    assert num_ticks == 5
