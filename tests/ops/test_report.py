"""A run's figures: percentiles, totals, and a table whose memory is bounded."""

import io
import json

import pytest
from rich.console import Console

from ops import report as report_module
from ops.report import RunReport
from pipeline.batch.lines import BatchLineError
from pipeline.batch.results import Completion
from pipeline.client.answers import Answer, Timing
from pipeline.client.asks import Submitted
from pipeline.messages import Failure, Terminal, Usage


def answer(num_tokens: int = 5, first_at: float = 1.0, last_at: float = 2.0, drafted: int = 0) -> Answer:
    usage = Usage(prompt_tokens=10, completion_tokens=num_tokens, draft_tokens=drafted, accepted_tokens=drafted // 2)
    outcome = Completion(tuple(range(num_tokens)), "text", "stop", usage)
    timing = Timing(0.0, first_at, last_at, num_tokens)
    return Answer(Submitted("req_x", 1, 0, 0.0), outcome, timing, Terminal(finish_reason="stop"), last_at)


def failed() -> Answer:
    failure = Failure(stage="decode", code="internal_error", message="broke", retryable=True)
    return Answer(Submitted("req_x", 1, 0, 0.0), failure, Timing(0.0), Terminal(finish_reason="error"), 1.0)


def text_of(report: RunReport) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(report.table())
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_summary_adds_up() -> None:
    report = RunReport()
    report.add_answer("a", 1, answer(drafted=4))
    report.add_answer("b", 2, answer(num_tokens=1, first_at=3.0, last_at=3.0))
    report.add_answer("c", 3, failed())
    report.add_refusal(BatchLineError(4, None, "invalid_json", "is not JSON", None))
    summary = report.summary(wall_s=2.0)
    assert json.loads(json.dumps(summary)) == {
        "num_lines": 4,
        "num_succeeded": 2,
        "num_failed": 2,
        "prompt_tokens": 20,
        "output_tokens": 6,
        "wall_s": 2.0,
        "output_tokens_per_s": 3.0,
        "ttft_ms": {"p50": 1000.0, "p95": 3000.0, "max": 3000.0},
        "tpot_ms": {"p50": 250.0, "p95": 250.0, "max": 250.0},
        "draft_tokens": 4,
        "accepted_tokens": 2,
        "acceptance_rate": 0.5,
        "finish_reasons": {"stop": 2},
        "errors": [
            {"line": 3, "custom_id": "c", "code": "internal_error", "message": "decode: broke"},
            {"line": 4, "custom_id": None, "code": "invalid_json", "message": "is not JSON"},
        ],
    }


def test_percentiles_are_by_nearest_rank() -> None:
    report = RunReport()
    for number in range(1, 101):
        report.add_answer(str(number), number, answer(first_at=number / 1000, last_at=1.0))
    assert report.summary(1.0)["ttft_ms"] == {"p50": 50.0, "p95": 95.0, "max": 100.0}


def test_empty_run_has_no_figures() -> None:
    report = RunReport()
    assert report.summary(0.0)["ttft_ms"] is None
    assert report.summary(0.0)["acceptance_rate"] is None
    assert report.totals(0.0) == "0 lines: 0 prompt tokens, 0 output tokens in 0.0 s, 0.0 output tok/s"


def test_table_has_a_row_for_each_line_in_order() -> None:
    report = RunReport()
    report.add_answer("first", 1, answer())
    report.add_refusal(BatchLineError(2, None, "invalid_json", "is not JSON", None))
    report.add_answer("third", 3, failed())
    rows = [line.split() for line in text_of(report).splitlines() if line.strip()][2:]
    assert rows == [
        ["first", "10", "5", "1000.0", "250.0", "stop"],
        ["(line", "2)", "-", "-", "-", "-", "error:", "invalid_json"],
        ["third", "-", "-", "-", "-", "error:", "internal_error"],
    ]


def test_rows_and_errors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "MAX_ROWS", 2)
    monkeypatch.setattr(report_module, "MAX_ERRORS", 1)
    report = RunReport()
    for number in range(5):
        report.add_answer(str(number), number, failed())
    assert len(report.rows) == 2
    assert len(report.errors) == 1
    assert report.summary(1.0)["num_failed"] == 5
    assert "and 3 more" in text_of(report)


def test_totals_read_as_sentences() -> None:
    report = RunReport()
    report.add_answer("a", 1, answer(drafted=4))
    report.add_answer("c", 3, failed())
    assert report.totals(2.0).splitlines() == [
        "2 lines, 1 of them failed: 10 prompt tokens, 5 output tokens in 2.0 s, 2.5 output tok/s",
        "TTFT 1000 ms (p95 1000 ms), TPOT 250 ms (p95 250 ms)",
        "2 of 4 draft tokens accepted (50 %)",
    ]
