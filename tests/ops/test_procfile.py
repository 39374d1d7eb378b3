"""The Procfile: plain lines, one a process, and a sentence for everything else."""

import sys
from pathlib import Path

import pytest

from ops.supervision.procfile import ProcfileError, default_procfile, read_procfile
from pipeline.keys import STAGES


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "Procfile"
    path.write_text(text)
    return path


def test_projects_own_procfile_has_a_line_for_each_stage_in_order() -> None:
    lines = read_procfile(default_procfile())
    assert [line.stage for line in lines] == ["jobs", *STAGES]
    assert [line.command for line in lines] == [(sys.executable, "-m", f"stages.{line.stage}") for line in lines]


def test_comments_and_blank_lines_are_skipped_and_quotes_are_kept_together(tmp_path: Path) -> None:
    lines = read_procfile(write(tmp_path, '# stages\n\nweb_1: python3 -c "a b"\nother:  sleep 1\n'))
    assert [(line.stage, line.command) for line in lines] == [
        ("web_1", (sys.executable, "-c", "a b")),
        ("other", ("sleep", "1")),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("decode python -m x\n", ":1: not `name: command`"),
        ("a: b\nDecode: b\n", ":2: not `name: command`"),
        ("a:\n", ":1: not `name: command`"),
        ('a: python "\n', ":1: No closing quotation"),
        ("a: b\na: c\n", ":2: a is there twice"),
        ("# nothing\n", ": names no process"),
    ],
)
def test_wrong_line_is_named_with_its_number(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ProcfileError) as refusal:
        read_procfile(path)
    assert str(refusal.value) == f"{path}{problem}"


def test_missing_procfile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProcfileError, match="nowhere: cannot be read: No such file"):
        read_procfile(tmp_path / "nowhere")
