"""Progress on standard error: a line now and then in a log, a bar on a terminal."""

import io
from types import SimpleNamespace

import pytest

from ops import progress as progress_module
from ops.progress import BarProgress, PlainProgress, make_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_stream_decides_how_progress_is_shown() -> None:
    assert isinstance(make_progress(3, Terminal()), BarProgress)
    assert isinstance(make_progress(3, io.StringIO()), PlainProgress)


def test_log_gets_a_line_only_when_the_last_one_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), 100.0
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now))
    with PlainProgress(3, stream) as progress:
        progress.start()
        progress.tokens(10)
        progress.line(failed=True)
        assert stream.getvalue() == ""
        now += 10.0
        progress.tokens(10)
        now += 1.0
        progress.line(failed=False)
    assert stream.getvalue() == "1/3 lines, 1 failed, 20 tokens, 2.0 tok/s\n"


def test_terminal_gets_a_bar_and_notes_stay_above_it() -> None:
    stream = Terminal()
    with BarProgress(3, stream) as progress:
        progress.note("line 2: [red]wrong")
        progress.tokens(10)
        progress.line(failed=False)
    assert "line 2: [red]wrong" in stream.getvalue()
    assert "1/3" in stream.getvalue()
