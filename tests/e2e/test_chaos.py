"""Faults on purpose, as `sluice chaos` makes them: a few rows here, all of them with `make chaos`."""

import asyncio
import sys
from pathlib import Path

import pytest

from ops.chaos.row import RowResult
from ops.chaos.rows import ROWS, chosen
from ops.chaos.runner import ChaosOptions, line_of, run_rows
from tests.e2e.stacks import new_settings

QUICK = ("F4x", "F14", "F20", "F22")
"""Stages killed again and again, answers lost, blobs damaged, clients that leave."""
REAL = ("F4",)
"""On the model that people use."""


@pytest.fixture(scope="module")
def home(caches: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that has nothing but the caches."""
    home = tmp_path_factory.mktemp("home")
    (home / "cache").symlink_to(caches)
    return home


def results_of(home: Path, ids: tuple[str, ...], options: ChaosOptions) -> dict[str, RowResult]:
    """Run rows one after the other, and so compare them with one and the same quiet stack."""

    def note(line: str) -> None:
        print(line, file=sys.stderr)

    results = asyncio.run(run_rows(new_settings(home=home), chosen(list(ids)), options, note))
    return {result.id: result for result in results}


@pytest.fixture(scope="module")
def quick(home: Path) -> dict[str, RowResult]:
    return results_of(home, QUICK, ChaosOptions(timed=False))


@pytest.fixture(scope="module")
def real(home: Path, real_model: Path) -> dict[str, RowResult]:
    return results_of(home, REAL, ChaosOptions(model=real_model, timed=False))


# The first of each kind waits for all of them.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", QUICK)
def test_nothing_shows_of_a_fault_on_a_tiny_model(row: str, quick: dict[str, RowResult]) -> None:
    assert quick[row].verdict == "passed", line_of(quick[row])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", REAL)
def test_nothing_shows_of_a_fault_on_a_real_model(row: str, real: dict[str, RowResult]) -> None:
    assert real[row].verdict == "passed", line_of(real[row])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("row", [row.id for row in ROWS if row.id not in QUICK])
def test_nothing_shows_of_any_other_fault(row: str, home: Path, real_model: Path) -> None:
    [result] = results_of(home, (row,), ChaosOptions(real_model=real_model)).values()
    assert result.verdict == "passed", line_of(result)
