"""A batch's figures: they add up, percentiles are by nearest rank, and what people look at is bounded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.batch import figures
from pipeline.batch.directory import BatchDirectory
from pipeline.batch.figures import BatchSummary, Highlights, LineProblem, Row, Spread, summarise_records
from pipeline.batch.journal import PHASE_NAMES, FinishedLine, Journal, read_records
from tests.pipeline.batch.files import finished, new_directory

NUM_LINES = 200


@pytest.fixture
def directory(tmp_path: Path) -> BatchDirectory:
    return new_directory(tmp_path)


def records_of(directory: BatchDirectory, *lines: FinishedLine) -> NDArray[np.void]:
    with Journal(directory, NUM_LINES) as journal:
        journal.append(lines)
    return read_records(directory)


def served(index: int, **figures: Any) -> FinishedLine:
    named: dict[str, Any] = {
        "prompt_tokens": 10,
        "output_tokens": 5,
        "ttft_us": 1_000_000,
        "latency_us": 2_000_000,
    }
    return finished(index, **named | figures)


def test_figures_add_up(directory: BatchDirectory) -> None:
    records = records_of(
        directory,
        served(0, draft_tokens=4, accepted_tokens=2),
        served(1, output_tokens=1, ttft_us=3_000_000, latency_us=3_000_000),
        finished(2, "error", prompt_tokens=99, output_tokens=99, ttft_us=1),
        finished(3, "length"),
    )
    summary = summarise_records(records, 6)
    assert (summary.num_lines, summary.num_succeeded, summary.num_failed) == (6, 3, 3)
    assert (summary.prompt_tokens, summary.output_tokens) == (20, 6)
    assert (summary.draft_tokens, summary.accepted_tokens, summary.acceptance_rate) == (4, 2, 0.5)
    assert summary.finish_reasons == {"stop": 2, "length": 1}
    assert summary.ttft_ms == Spread(p50=1000.0, p95=3000.0, max=3000.0)
    assert summary.tpot_ms == Spread(p50=250.0, p95=250.0, max=250.0)
    assert summary.latency_ms == Spread(p50=2000.0, p95=3000.0, max=3000.0)


def test_percentiles_are_by_nearest_rank(directory: BatchDirectory) -> None:
    records = records_of(directory, *(served(n - 1, ttft_us=1000 * n) for n in range(1, 101)))
    assert summarise_records(records, 100).ttft_ms == Spread(p50=50.0, p95=95.0, max=100.0)


def test_nothing_served_has_no_times(directory: BatchDirectory) -> None:
    for records in (read_records(directory), records_of(directory, finished(0, "error"))):
        summary = summarise_records(records, 1)
        assert (summary.num_failed, summary.num_succeeded) == (1, 0)
        assert (summary.ttft_ms, summary.tpot_ms, summary.latency_ms, summary.acceptance_rate) == (None,) * 4
        assert summary.phases == ()


def test_phases_sum_over_all_lines_that_were_served(directory: BatchDirectory) -> None:
    phases = [1000 * (number + 1) for number in range(len(PHASE_NAMES))]
    records = records_of(
        directory,
        served(0, phases_us=phases),
        served(1, phases_us=[3 * us for us in phases]),
        finished(2, "error", phases_us=[10**6] * len(phases)),
    )
    found = summarise_records(records, 3).phases
    assert [phase.name for phase in found] == list(PHASE_NAMES)
    assert [(phase.total_ms, phase.p50_ms, phase.p95_ms) for phase in found[:2]] == [(4.0, 1.0, 3.0), (8.0, 2.0, 6.0)]


def output(custom_id: str | None, code: str | None = None) -> bytes:
    error = None if code is None else {"code": code, "message": f"why {custom_id} failed"}
    return json.dumps({"custom_id": custom_id, "error": error}).encode()


def test_rows_and_problems_are_in_the_order_of_the_input(directory: BatchDirectory) -> None:
    highlights = Highlights(records_of(directory, served(2), finished(1, "error"), served(0, output_tokens=1)))
    highlights.saw(0, 1, output("first"), failed=False)
    highlights.saw(1, 3, output(None, "invalid_json"), failed=True)
    highlights.saw(2, 4, output("third"), failed=False)
    highlights.saw(3, 5, output("cut", "batch_expired"), failed=True)
    summary = highlights.added_to(summarise_records(read_records(directory), 4))
    assert [(row.custom_id, row.finish_reason) for row in summary.rows] == [
        ("first", "stop"),
        (None, "error: invalid_json"),
        ("third", "stop"),
        ("cut", "error: batch_expired"),
    ]
    assert summary.rows[0].tpot_ms is None
    assert summary.rows[2] == Row(
        custom_id="third", prompt_tokens=10, output_tokens=5, ttft_ms=1000.0, tpot_ms=250.0, finish_reason="stop"
    )
    assert summary.errors == (
        LineProblem(line=3, custom_id=None, code="invalid_json", message="why None failed"),
        LineProblem(line=5, custom_id="cut", code="batch_expired", message="why cut failed"),
    )


def test_rows_and_problems_are_bounded(directory: BatchDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MAX_ROWS", 2)
    monkeypatch.setattr(figures, "MAX_ERRORS", 1)
    highlights = Highlights(records_of(directory, *(finished(index, "error") for index in range(5))))
    for index in range(5):
        highlights.saw(index, index + 1, output(str(index), "x"), failed=True)
    summary = highlights.added_to(summarise_records(read_records(directory), 5))
    assert [row.custom_id for row in summary.rows] == ["0", "1"]
    assert [problem.custom_id for problem in summary.errors] == ["0"]
    assert summary.num_failed == 5


def test_a_summary_survives_being_written_down(directory: BatchDirectory) -> None:
    highlights = Highlights(records_of(directory, served(0)))
    highlights.saw(0, 1, output("ü\n"), failed=False)
    summary = highlights.added_to(summarise_records(read_records(directory), 2))
    assert BatchSummary.model_validate_json(summary.model_dump_json()) == summary
