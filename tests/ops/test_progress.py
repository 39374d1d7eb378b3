"""Progress: a line now and then in a log, a bar on a terminal, objects for scripts."""

import io
import json
from types import SimpleNamespace

import pytest

from ops import progress as progress_module
from ops.progress import BarProgress, JsonProgress, PlainProgress, RunProgress, make_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def show(progress: RunProgress, num_done: int, num_tokens: int, num_failed: int = 0) -> None:
    progress.set(num_lines=4, num_done=num_done, num_failed=num_failed, num_tokens=num_tokens)


def test_stream_decides_how_progress_is_shown() -> None:
    assert isinstance(make_progress(3, Terminal()), BarProgress)
    assert isinstance(make_progress(3, io.StringIO()), PlainProgress)


def test_log_gets_a_line_only_when_the_last_one_is_old(clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    with PlainProgress(4, stream) as progress:
        show(progress, 0, 0)
        clock.s += 5
        show(progress, 1, 10)
        assert stream.getvalue() == ""
        clock.s += 5
        show(progress, 2, 20, num_failed=1)
        clock.s += 1
        show(progress, 3, 30)
    assert stream.getvalue() == "2/4 lines, 1 failed, 20 tokens, 2.0 tok/s, 10 s left\n"


def test_what_an_earlier_run_did_is_no_speed(clock: SimpleNamespace) -> None:
    progress = PlainProgress(4, io.StringIO())
    show(progress, 2, 1000)
    assert (progress.rate, progress.left_s) == (0.0, None)
    clock.s += 10
    show(progress, 3, 1010)
    assert (progress.rate, progress.left_s) == (1.0, 10.0)


def test_scripts_get_an_object_a_second_and_the_last_one_at_once(clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    with JsonProgress(4, stream) as progress:
        progress.note("starting")
        for num_done in (0, 1, 2):
            show(progress, num_done, 10 * num_done)
        clock.s += 2
        show(progress, 3, 30)
        show(progress, 4, 40)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert events[0] == {"event": "note", "message": "starting"}
    assert [event["num_done"] for event in events[1:]] == [0, 3, 4]
    assert (events[2]["output_tokens_per_s"], events[2]["left_s"]) == (15.0, 0.7)


def test_terminal_gets_a_bar_and_notes_stay_above_it() -> None:
    stream = Terminal()
    with BarProgress(4, stream) as progress:
        progress.note("line 2: [red]wrong")
        show(progress, 1, 10)
    assert "line 2: [red]wrong" in stream.getvalue()
    assert "1/4" in stream.getvalue()


def test_single_counts_add_up() -> None:
    progress = PlainProgress(2, io.StringIO())
    progress.add(num_tokens=3)
    progress.add(num_tokens=4, num_done=1)
    assert (progress.num_tokens, progress.num_done) == (7, 1)
