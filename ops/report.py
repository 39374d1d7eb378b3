"""What a batch run came to: a row for each request, totals, and the same as an object for scripts.

Owns the arithmetic of a run's figures and how they are shown. Memory is bounded: rows above MAX_ROWS are
counted and not kept. Knows nothing about how requests are served.
"""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from ops.session import Answer
from pipeline.batch.lines import BatchLineError
from pipeline.batch.results import Completion

MAX_ROWS = 500  # what a person may still scroll through
MAX_ERRORS = 100  # in the summary object; the output file has all of them


@dataclass(frozen=True, slots=True)
class Row:
    """One request as the table shows it; None where there is nothing to show."""

    custom_id: str
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    finish_reason: str


class RunReport:
    """The figures of one run, taken line by line."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.errors: list[dict[str, object]] = []
        self.num_lines = 0
        self.num_failed = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.finish_reasons: Counter[str] = Counter()
        self._ttft_ms = array("d")
        self._tpot_ms = array("d")

    def add_answer(self, custom_id: str, line_number: int, answer: Answer) -> None:
        """Take a request that was served, or that failed."""
        outcome, timing = answer.outcome, answer.timing
        self.num_lines += 1
        if not isinstance(outcome, Completion):
            self._add_error(line_number, custom_id, outcome.code, f"{outcome.stage}: {outcome.message}")
            self._add_row(Row(custom_id, None, None, timing.ttft_ms, None, f"error: {outcome.code}"))
            return
        usage = outcome.usage
        self.prompt_tokens += usage.prompt_tokens
        self.output_tokens += usage.completion_tokens
        self.draft_tokens += usage.draft_tokens
        self.accepted_tokens += usage.accepted_tokens
        self.finish_reasons[outcome.finish_reason] += 1
        if timing.ttft_ms is not None:
            self._ttft_ms.append(timing.ttft_ms)
        if timing.tpot_ms is not None:
            self._tpot_ms.append(timing.tpot_ms)
        self._add_row(
            Row(
                custom_id,
                usage.prompt_tokens,
                usage.completion_tokens,
                timing.ttft_ms,
                timing.tpot_ms,
                outcome.finish_reason,
            )
        )

    def add_refusal(self, error: BatchLineError) -> None:
        """Take a line that never became a request."""
        self.num_lines += 1
        self._add_error(error.line_number, error.custom_id, error.code, error.message)
        named = error.custom_id or f"(line {error.line_number})"
        self._add_row(Row(named, None, None, None, None, f"error: {error.code}"))

    def summary(self, wall_s: float) -> dict[str, object]:
        """Return all figures; wall_s is the time from the first submission to the last result."""
        return {
            "num_lines": self.num_lines,
            "num_succeeded": self.num_lines - self.num_failed,
            "num_failed": self.num_failed,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "wall_s": round(wall_s, 3),
            "output_tokens_per_s": round(self._rate(wall_s), 2),
            "ttft_ms": _percentiles(self._ttft_ms),
            "tpot_ms": _percentiles(self._tpot_ms),
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_rate": round(self.accepted_tokens / self.draft_tokens, 4) if self.draft_tokens else None,
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "errors": self.errors,
        }

    def table(self) -> Table:
        """Return the rows as a table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("custom_id", overflow="fold")
        for name in ("prompt tokens", "output tokens", "TTFT ms", "TPOT ms"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("finish reason", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.custom_id,
                _count(row.prompt_tokens),
                _count(row.output_tokens),
                _ms(row.ttft_ms),
                _ms(row.tpot_ms),
                row.finish_reason,
            )
        if self.num_lines > len(self.rows):
            table.caption = f"and {self.num_lines - len(self.rows)} more"
        return table

    def totals(self, wall_s: float) -> str:
        """Return the totals as a few sentences for a person."""
        failed = f", {self.num_failed} of them failed" if self.num_failed else ""
        lines = [
            f"{self.num_lines} lines{failed}: {self.prompt_tokens} prompt tokens, "
            f"{self.output_tokens} output tokens in {wall_s:.1f} s, {self._rate(wall_s):.1f} output tok/s"
        ]
        if self._ttft_ms:
            ttft, tpot = _percentiles(self._ttft_ms), _percentiles(self._tpot_ms)
            lines.append(f"TTFT {_spread(ttft)}, TPOT {_spread(tpot)}")
        if self.draft_tokens:
            rate = 100 * self.accepted_tokens / self.draft_tokens
            lines.append(f"{self.accepted_tokens} of {self.draft_tokens} draft tokens accepted ({rate:.0f} %)")
        return "\n".join(lines)

    def _rate(self, wall_s: float) -> float:
        return self.output_tokens / wall_s if wall_s > 0 else 0.0

    def _add_row(self, row: Row) -> None:
        if len(self.rows) < MAX_ROWS:
            self.rows.append(row)

    def _add_error(self, line_number: int, custom_id: str | None, code: str, message: str) -> None:
        self.num_failed += 1
        if len(self.errors) < MAX_ERRORS:
            details = {"line": line_number, "custom_id": custom_id, "code": code, "message": message}
            self.errors.append(details)


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50 and p95 by the nearest rank, and the maximum."""
    if not values:
        return None
    ranked = sorted(values)
    shares = {"p50": 0.50, "p95": 0.95, "max": 1.0}
    return {name: round(ranked[math.ceil(share * len(ranked)) - 1], 2) for name, share in shares.items()}


def _spread(values: dict[str, float] | None) -> str:
    return "-" if values is None else f"{values['p50']:.0f} ms (p95 {values['p95']:.0f} ms)"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
