"""The figures of a batch, from its journal: counts, tokens, times, and where the time went.

Owns the arithmetic and the shape of a summary. Knows nothing about how it is shown.
"""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from pipeline.batch.journal import NOT_YET, PHASE_NAMES, REASONS

MAX_ROWS = 500  # what a person may still scroll through
MAX_ERRORS = 100  # in a summary; the file of errors has all of them


class Spread(BaseModel):
    """A distribution by the nearest rank, in milliseconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    p50: float
    p95: float
    max: float


class Row(BaseModel):
    """One line as a table shows it; None where there is nothing to show."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    custom_id: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    finish_reason: str


class LineProblem(BaseModel):
    """Why one line failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    line: int
    custom_id: str | None
    code: str
    message: str


class Phase(BaseModel):
    """What one phase of a request's life took, over all lines of a batch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    total_ms: float
    p50_ms: float
    p95_ms: float


class BatchSummary(BaseModel):
    """An ended batch in figures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_lines: int
    num_succeeded: int
    num_failed: int
    """Lines that the end of their batch cut off are among them."""
    prompt_tokens: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    finish_reasons: dict[str, int]
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    latency_ms: Spread | None
    phases: tuple[Phase, ...]
    errors: tuple[LineProblem, ...] = ()
    """The first MAX_ERRORS of them."""
    rows: tuple[Row, ...] = ()
    """The first MAX_ROWS lines."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None


class Highlights:
    """The first lines and the first problems of a batch, for people to look at; bounded."""

    def __init__(self, records: NDArray[np.void]) -> None:
        """Take the journal's records."""
        first = records[records["index"] < MAX_ROWS]
        self._records = {int(record["index"]): record for record in first}
        self._rows: list[Row] = []
        self._errors: list[LineProblem] = []

    def saw(self, index: int, line_number: int, line: bytes, *, failed: bool) -> None:
        """Take the next line of the output."""
        is_problem = failed and len(self._errors) < MAX_ERRORS
        if index >= MAX_ROWS and not is_problem:
            return
        value = json.loads(line)
        custom_id, error = value["custom_id"], value["error"]
        if is_problem:
            problem = LineProblem(line=line_number, custom_id=custom_id, code=error["code"], message=error["message"])
            self._errors.append(problem)
        if index < MAX_ROWS:
            reason = f"error: {error['code']}" if failed else None
            self._rows.append(_row(custom_id, self._records.get(index), reason))

    def added_to(self, summary: BatchSummary) -> BatchSummary:
        """Return a summary with what was seen."""
        return summary.model_copy(update={"rows": tuple(self._rows), "errors": tuple(self._errors)})


def _row(custom_id: str | None, record: np.void | None, problem: str | None) -> Row:
    if record is None or problem is not None:
        finish_reason = problem or "unknown"
        return Row(
            custom_id=custom_id,
            prompt_tokens=None,
            output_tokens=None,
            ttft_ms=None,
            tpot_ms=None,
            finish_reason=finish_reason,
        )
    tpot = tpot_ms(np.array([record]))
    ttft_us = int(record["ttft_us"])
    return Row(
        custom_id=custom_id,
        prompt_tokens=int(record["prompt_tokens"]),
        output_tokens=int(record["output_tokens"]),
        ttft_ms=None if ttft_us == NOT_YET else round(ttft_us / 1000, 2),
        tpot_ms=round(float(tpot[0]), 2) if len(tpot) else None,
        finish_reason=REASONS[int(record["reason"])],
    )


def summarise_records(records: NDArray[np.void], num_lines: int) -> BatchSummary:
    """Return the figures of finished lines; lines of the batch that are missing count as failed."""
    reasons = {name: int((records["reason"] == code).sum()) for code, name in enumerate(REASONS)}
    num_succeeded = len(records) - reasons["error"]
    served = records[records["reason"] != REASONS.index("error")]
    return BatchSummary(
        num_lines=num_lines,
        num_succeeded=num_succeeded,
        num_failed=num_lines - num_succeeded,
        prompt_tokens=int(served["prompt_tokens"].sum()),
        output_tokens=int(served["output_tokens"].sum()),
        draft_tokens=int(served["draft_tokens"].sum()),
        accepted_tokens=int(served["accepted_tokens"].sum()),
        finish_reasons={name: count for name, count in reasons.items() if count and name != "error"},
        ttft_ms=_spread(_known(served["ttft_us"]) / 1000),
        tpot_ms=_spread(tpot_ms(served)),
        latency_ms=_spread(_known(served["latency_us"]) / 1000),
        phases=_phases(served),
    )


def tpot_ms(records: NDArray[np.void]) -> NDArray[np.float64]:
    """Return the time per output token after the first, of the lines that have two and whose times are known."""
    timed = records[
        (records["output_tokens"] > 1) & (records["ttft_us"] != NOT_YET) & (records["latency_us"] != NOT_YET)
    ]
    decoding_us = np.maximum(timed["latency_us"].astype(np.int64) - timed["ttft_us"], 0)
    return decoding_us / 1000 / (timed["output_tokens"] - 1)


def _known(times_us: NDArray[np.uint32]) -> NDArray[np.float64]:
    return times_us[times_us != NOT_YET].astype(np.float64)


def _phases(served: NDArray[np.void]) -> tuple[Phase, ...]:
    if not len(served):
        return ()
    times_ms = served["phases_us"].astype(np.float64) / 1000  # [lines, phases]
    return tuple(
        Phase(
            name=name,
            total_ms=round(float(column.sum()), 3),
            p50_ms=_rank(np.sort(column), 0.5),
            p95_ms=_rank(np.sort(column), 0.95),
        )
        for name, column in zip(PHASE_NAMES, times_ms.T, strict=True)
    )


def _spread(values: NDArray[np.float64]) -> Spread | None:
    if not len(values):
        return None
    ranked = np.sort(values)
    return Spread(p50=_rank(ranked, 0.5), p95=_rank(ranked, 0.95), max=_rank(ranked, 1.0))


def _rank(ranked: Sequence[float] | NDArray[np.float64], share: float) -> float:
    return round(float(ranked[int(np.ceil(share * len(ranked))) - 1]), 2)
