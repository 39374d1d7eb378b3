"""The two output files: whole or not there, with the rights that the user's files have, and nothing else left."""

import os
from pathlib import Path

import pytest

from pipeline.batch.directory import temporary_output
from stages.jobs.output import OutputFiles
from tests.stages.jobs.bench import names_in

ID = "batch_1"


def write(output: OutputFiles, *lines: tuple[bytes, bool]) -> None:
    with output:
        for line, failed in lines:
            output.write(line, failed=failed)


def test_lines_go_where_they_belong_and_appear_at_once(tmp_path: Path) -> None:
    target, errors = tmp_path / "out", tmp_path / "errors"
    output = OutputFiles(target, errors, ID)
    write(output, (b"a\n", False), (b"b\n", True), (b"c\n", False))
    assert not target.exists()
    assert not errors.exists()
    output.put_in_place()
    assert (target.read_bytes(), errors.read_bytes()) == (b"a\nc\n", b"b\n")
    assert names_in(tmp_path) == {"out", "errors"}


def test_one_path_for_both_keeps_the_order(tmp_path: Path) -> None:
    output = OutputFiles(tmp_path / "out", tmp_path / "out", ID)
    write(output, (b"a\n", False), (b"b\n", True), (b"c\n", False))
    output.put_in_place()
    assert (tmp_path / "out").read_bytes() == b"a\nb\nc\n"
    assert names_in(tmp_path) == {"out"}


def test_without_errors_those_of_the_batch_before_go(tmp_path: Path) -> None:
    (tmp_path / "errors").write_bytes(b"old\n")
    output = OutputFiles(tmp_path / "out", tmp_path / "errors", ID)
    write(output, (b"a\n", False))
    output.put_in_place()
    assert names_in(tmp_path) == {"out"}


def test_a_try_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old\n")
    output = OutputFiles(tmp_path / "out", tmp_path / "errors", ID)
    with pytest.raises(ZeroDivisionError), output:
        output.write(b"a\n", failed=bool(1 // 0))
    assert names_in(tmp_path) == {"out"}
    write(output, (b"b\n", True))
    output.put_in_place()
    assert ((tmp_path / "out").read_bytes(), (tmp_path / "errors").read_bytes()) == (b"", b"b\n")


def test_where_the_second_file_cannot_be_opened_the_first_is_not_left(tmp_path: Path) -> None:
    output = OutputFiles(tmp_path / "out", tmp_path / "nowhere" / "errors", ID)
    with pytest.raises(FileNotFoundError), output:
        pass
    assert names_in(tmp_path) == set()


def test_what_a_killed_try_left_is_used_again(tmp_path: Path) -> None:
    for path in temporary_output(tmp_path / "out", tmp_path / "errors", ID):
        path.write_bytes(b"much more than the next try writes\n")
    output = OutputFiles(tmp_path / "out", tmp_path / "errors", ID)
    write(output, (b"a\n", False))
    output.put_in_place()
    assert (tmp_path / "out").read_bytes() == b"a\n"
    assert names_in(tmp_path) == {"out"}


def test_results_come_last(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    output = OutputFiles(tmp_path / "out", tmp_path / "errors", ID)
    write(output, (b"a\n", False), (b"b\n", True))
    with pytest.raises(IsADirectoryError):
        output.put_in_place()
    assert names_in(tmp_path) == {"out", "errors"}
    assert (tmp_path / "errors").read_bytes() == b"b\n"


def test_files_have_the_rights_that_the_user_gives_new_files(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        output = OutputFiles(tmp_path / "out", tmp_path / "errors", ID)
        write(output, (b"a\n", False), (b"b\n", True))
        output.put_in_place()
    finally:
        os.umask(mask)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("out", "errors")} == {0o640}


def test_a_name_as_long_as_names_may_be_is_no_problem(tmp_path: Path) -> None:
    output = OutputFiles(tmp_path / ("o" * 255), tmp_path / ("e" * 255), "batch_" + "x" * 20)
    write(output, (b"a\n", False), (b"b\n", True))
    output.put_in_place()
    assert names_in(tmp_path) == {"o" * 255, "e" * 255}
