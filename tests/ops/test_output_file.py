"""The output file: whole or not at all, and what a broken-off run had finished."""

import os
import stat
from pathlib import Path

import pytest

from ops.output_file import OutputFile


def test_file_appears_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "out.jsonl"
    with OutputFile(path) as output:
        output.write(b"one\n")
        assert not path.exists()
        output.write(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    assert [entry.name for entry in path.parent.iterdir()] == ["out.jsonl"]
    assert output.num_lines == 2


def test_broken_off_run_leaves_the_old_file_and_a_partial_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    output = OutputFile(path)
    output.write(b"one\n")
    with pytest.raises(KeyboardInterrupt), output:
        raise KeyboardInterrupt
    assert path.read_text() == "old\n"
    assert output.partial.read_text() == "one\n"
    assert {entry.name for entry in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.partial"}


def test_run_that_finished_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), OutputFile(tmp_path / "out.jsonl"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with OutputFile(tmp_path / "out.jsonl"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out.jsonl").stat().st_mode) == 0o640


def test_directory_in_the_way_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is a directory"):
        OutputFile(tmp_path)


def test_a_link_stays_a_link_and_its_target_gets_the_lines(tmp_path: Path) -> None:
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.write_text("old\n")
    link.symlink_to(target)
    with OutputFile(link) as output:
        output.write(b"new\n")
    assert link.is_symlink()
    assert target.read_text() == "new\n"


def test_what_is_not_a_file_is_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="neither a file nor free"):
        OutputFile(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
