"""The rows of `sluice chaos` as a list, and what becomes of one that finds something, breaks, or takes too long."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.chaos import rows as all_rows
from ops.chaos.inquiry import NotRun
from ops.chaos.lab import Lab
from ops.chaos.row import Row, RowResult
from ops.chaos.rows import ROWS, chosen
from ops.chaos.runner import ChaosOptions, line_of, run_rows
from ops.chaos.table import markdown
from ops.cli import app
from pipeline.errors import InvalidRequest
from pipeline.settings import Settings

ENGINE_AND_DELIVERY = {
    *(f"F{number}" for number in (*range(1, 23), *range(27, 30), *range(33, 43))),
    "F4x",
}  # fmt: skip


def row(run: Callable[[Lab], Awaitable[None]], **changes: object) -> Row:
    values: dict[str, object] = {"id": "F0", "fault": "nothing", "expected": "all is well", "run": run} | changes
    return Row(**values)  # pyright: ignore[reportArgumentType]


async def results_of(*rows: Row, real_model: Path | None = None) -> list[RowResult]:
    return await run_rows(Settings(), rows, ChaosOptions(real_model=real_model), lambda _: None)


async def passes(lab: Lab) -> None:
    lab.note("all of 3 were there")
    lab.require(lab.models.served.is_file(), "there is no model")


async def fails(lab: Lab) -> None:
    lab.require(1 > 2, "1 is not larger than 2")
    lab.blame(["and another thing"])


async def breaks(lab: Lab) -> None:
    raise KeyError("what")


async def waits(lab: Lab) -> None:
    lab.note("so far")
    await asyncio.Event().wait()


async def cannot(lab: Lab) -> None:
    raise NotRun("there is no such machine")


def test_every_row_of_the_matrix_is_there_once_and_in_its_order() -> None:
    ids = [row.id for row in ROWS]
    # F30 needs two versions of the messages at once, which there are not yet.
    assert set(ids) == ENGINE_AND_DELIVERY
    assert len(set(ids)) == len(ids)
    assert ids.index("F4") < ids.index("F4x") < ids.index("F5") < ids.index("F10")
    assert all(row.fault and row.expected and row.run.__doc__ for row in ROWS)


def test_rows_are_chosen_by_id_in_any_spelling() -> None:
    assert [row.id for row in chosen(["f20", "F4X"])] == ["F4x", "F20"]
    assert chosen([]) == list(ROWS)
    with pytest.raises(InvalidRequest, match="there is no F99; there are F1, F2"):
        chosen(["F4", "F99"])


async def test_verdicts() -> None:
    results = await results_of(row(passes), row(fails), row(breaks), row(waits, limit_s=0.05), row(cannot))
    assert [result.verdict for result in results] == ["passed", "FAILED", "FAILED", "FAILED", "not run"]
    assert [result.problems for result in results[:2]] == [(), ("1 is not larger than 2", "and another thing")]
    assert "the row broke: KeyError: 'what' (test_chaos_rows.py:" in results[2].problems[0]
    assert "TimeoutError" in results[3].problems[0]
    assert [result.happened for result in results] == [
        "all of 3 were there", "", "", "so far", "there is no such machine",
    ]  # fmt: skip
    assert "FAILED" in line_of(results[1])
    assert "\n  and another thing" in line_of(results[1])


async def test_row_that_needs_a_real_model_is_not_run_without_one(tmp_path: Path) -> None:
    [result] = await results_of(row(passes, real=True))
    assert (result.verdict, "sluice models pull" in result.happened) == ("not run", True)
    (tmp_path / "real.gguf").touch()
    [result] = await results_of(row(passes, real=True), real_model=tmp_path / "real.gguf")
    assert result.verdict == "passed"


async def test_table_of_a_page_has_a_line_for_each_row() -> None:
    lines = markdown(await results_of(row(passes), row(fails, id="F2", fault="a | b"))).splitlines()
    assert lines[2] == "| F0 | nothing | all is well | all of 3 were there | passed | 0 |"
    assert lines[3] == "| F2 | a / b | all is well | 1 is not larger than 2; and another thing | FAILED | 0 |"


def test_command_says_what_happened_and_fails_where_a_row_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_rows, "ROWS", (row(passes, id="F1"), row(fails, id="F2")))
    passed = CliRunner().invoke(app, ["chaos", "F1", "--json"])
    assert passed.exit_code == 0
    assert json.loads(passed.stdout)["verdict"] == "passed"
    failed = CliRunner().invoke(app, ["chaos"])
    assert failed.exit_code == 1
    assert "| F2 | nothing | all is well | 1 is not larger than 2; and another thing | FAILED |" in failed.stdout
    unknown = CliRunner().invoke(app, ["chaos", "F9"])
    assert unknown.exit_code == 2
    assert "there is no F9; there are F1, F2" in unknown.stderr
