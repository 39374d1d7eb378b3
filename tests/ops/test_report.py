"""What a batch came to, as a person and as a script read it."""

import io
import json

from rich.console import Console
from rich.table import Table

from ops import report
from pipeline.batch.figures import BatchSummary, LineProblem, Phase, Row, Spread

SUMMARY = BatchSummary(
    num_lines=3,
    num_succeeded=2,
    num_failed=1,
    prompt_tokens=20,
    output_tokens=6,
    draft_tokens=4,
    accepted_tokens=2,
    finish_reasons={"stop": 2},
    ttft_ms=Spread(p50=1000, p95=3000, max=3000),
    tpot_ms=Spread(p50=250, p95=250, max=250),
    latency_ms=Spread(p50=2000, p95=3000, max=3000),
    phases=(
        Phase(name="prefill", total_ms=300, p50_ms=100, p95_ms=200),
        Phase(name="decode", total_ms=700, p50_ms=300, p95_ms=400),
    ),
    errors=(LineProblem(line=2, custom_id=None, code="invalid_json", message="is not JSON"),),
    rows=(
        Row(
            custom_id="first",
            prompt_tokens=10,
            output_tokens=5,
            ttft_ms=1000,
            tpot_ms=250,
            finish_reason="stop",
        ),
        Row(
            custom_id=None,
            prompt_tokens=None,
            output_tokens=None,
            ttft_ms=None,
            tpot_ms=None,
            finish_reason="error: invalid_json",
        ),
    ),
)
NOTHING = BatchSummary(
    num_lines=1,
    num_succeeded=0,
    num_failed=1,
    prompt_tokens=0,
    output_tokens=0,
    draft_tokens=0,
    accepted_tokens=0,
    finish_reasons={},
    ttft_ms=None,
    tpot_ms=None,
    latency_ms=None,
    phases=(),
)


def rows_of(table: Table) -> list[list[str]]:
    stream = io.StringIO()
    Console(file=stream, width=100).print(table)
    return [line.split() for line in stream.getvalue().splitlines() if line.strip()]


def test_table_has_a_row_for_each_line_and_says_how_many_more_there_are() -> None:
    rows = rows_of(report.table(SUMMARY))
    assert rows[2:4] == [
        ["first", "10", "5", "1000.0", "250.0", "stop"],
        ["-", "-", "-", "-", "-", "error:", "invalid_json"],
    ]
    assert rows[4] == ["and", "1", "more"]


def test_totals_read_as_sentences() -> None:
    assert report.totals(SUMMARY, 2.0).splitlines() == [
        "3 lines, 1 of them failed: 20 prompt tokens, 6 output tokens in 2.0 s, 3.0 output tok/s",
        "TTFT 1000 ms (p95 3000 ms), TPOT 250 ms (p95 250 ms)",
        "2 of 4 draft tokens accepted (50 %)",
    ]
    assert report.totals(NOTHING, 0.0) == (
        "1 lines, 1 of them failed: 0 prompt tokens, 0 output tokens in 0.0 s, 0.0 output tok/s"
    )


def test_of_a_batch_that_was_interrupted_no_pace_is_told() -> None:
    assert report.totals(SUMMARY, None).splitlines()[0] == (
        "3 lines, 1 of them failed: 20 prompt tokens, 6 output tokens"
    )
    figures = report.figures(SUMMARY, None)
    assert (figures["wall_s"], figures["output_tokens_per_s"]) == (None, None)


def test_what_others_wrote_is_no_markup_and_moves_no_cursor() -> None:
    row = SUMMARY.rows[0].model_copy(update={"custom_id": "[/red]\x1b[2J[b]"})
    rows = rows_of(report.table(SUMMARY.model_copy(update={"rows": (row,)})))
    assert rows[2][0] == "[/red]\\x1b[2J[b]"
    assert report.printable("a\tb ü") == "a\\tb ü"


def test_profile_shows_the_share_of_each_phase() -> None:
    rows = rows_of(report.profile(SUMMARY))
    assert [row[:3] for row in rows[-2:]] == [["prefill", "30.0", "%"], ["decode", "70.0", "%"]]


def test_scripts_get_all_figures_and_no_rows() -> None:
    figures = json.loads(json.dumps(report.figures(SUMMARY, 2.0)))
    assert (figures["output_tokens_per_s"], figures["acceptance_rate"], figures["wall_s"]) == (3.0, 0.5, 2.0)
    assert figures["errors"] == [{"line": 2, "custom_id": None, "code": "invalid_json", "message": "is not JSON"}]
    assert "rows" not in figures
    assert report.figures(NOTHING, 0.0)["acceptance_rate"] is None
