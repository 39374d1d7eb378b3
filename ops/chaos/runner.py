"""Runs rows one after the other, each within its time, and makes a result of whatever comes of it.

Owns the models that rows are run on, and the order. Knows nothing about any one row.
"""

import asyncio
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ops.chaos.inquiry import Models, NotRun
from ops.chaos.lab import Lab
from ops.chaos.reference import Reference
from ops.chaos.row import LONG_LIMIT_S, Row, RowResult, Verdict
from ops.chaos.tiny_model import write_tiny_llama
from pipeline.errors import SluiceError
from pipeline.settings import Settings


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """How rows are run."""

    model: Path | None = None
    """What all rows are run on; None takes a tiny one where that says as much."""
    real_model: Path | None = None
    """What rows are run on that need a real one; None where it is not there."""
    long: bool = False
    timed: bool = True
    """Whether times are judged: only where nothing else runs."""
    keep_logs: Path | None = None


async def run_rows(
    base: Settings, rows: Iterable[Row], options: ChaosOptions, note: Callable[[str], None]
) -> list[RowResult]:
    """Run rows and return their results; `note` is told of each as it comes.

    Raises:
        SluiceError: nothing can be run at all.
    """
    results: list[RowResult] = []
    with tempfile.TemporaryDirectory(prefix="sl-models-") as directory:
        tiny = write_tiny_llama(Path(directory) / "tiny.gguf", seed=0)
        other = write_tiny_llama(Path(directory) / "other.gguf", seed=1)
        async with Reference(base) as reference:
            for row in rows:
                note(f"{row.id}: {row.fault}")
                served = options.model or (options.real_model if row.real else tiny)
                logs = None if options.keep_logs is None else options.keep_logs / row.id
                if served is None:
                    results.append(_result(row, "not run", ["the model is not there: sluice models pull"], (), 0.0))
                else:
                    lab = Lab(base, Models(served, other), reference, long=options.long, timed=options.timed, logs=logs)
                    results.append(await _run(row, lab))
                note(line_of(results[-1]))
    return results


def line_of(result: RowResult) -> str:
    """Return a result in one line, and one more for each problem."""
    first = f"{result.id}: {result.verdict}, {result.wall_s:.0f} s: {result.happened}"
    return "\n".join((first, *(f"  {problem}" for problem in result.problems)))


async def _run(row: Row, lab: Lab) -> RowResult:
    started_at = time.monotonic()
    verdict: Verdict = "passed"
    try:
        async with asyncio.timeout(LONG_LIMIT_S if lab.long else row.limit_s):
            await row.run(lab)
    except NotRun as reason:
        verdict = "not run"
        lab.note(str(reason))
    except (SluiceError, TimeoutError) as error:
        lab.blame([f"{type(error).__name__}: {error}"])
    except Exception as error:  # noqa: BLE001 - a row that breaks is one that fails, and the others are run all the same
        place = traceback.extract_tb(error.__traceback__)[-1]
        lab.blame([f"the row broke: {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"])
    if lab.problems:
        verdict = "FAILED"
    return _result(row, verdict, lab.notes, lab.problems, time.monotonic() - started_at)


def _result(row: Row, verdict: Verdict, notes: Iterable[str], problems: Iterable[str], wall_s: float) -> RowResult:
    return RowResult(row.id, row.fault, row.expected, verdict, "; ".join(notes), tuple(problems), wall_s)
