"""What a batch came to, as a person reads it: a row for each request, totals, and where the time went.

Owns how figures are shown. Knows nothing about where they come from.
"""

from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.batch.figures import BatchSummary, Spread


def table(summary: BatchSummary) -> Table:
    """Return the first lines of a batch as a table."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("custom_id", overflow="fold")
    for name in ("prompt tokens", "output tokens", "TTFT ms", "TPOT ms"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("finish reason", no_wrap=True)
    for row in summary.rows:
        shown.add_row(
            Text("-" if row.custom_id is None else printable(row.custom_id)),  # a text: brackets are no markup
            _count(row.prompt_tokens),
            _count(row.output_tokens),
            _ms(row.ttft_ms),
            _ms(row.tpot_ms),
            row.finish_reason,
        )
    if summary.num_lines > len(summary.rows):
        shown.caption = f"and {summary.num_lines - len(summary.rows)} more"
    return shown


def totals(summary: BatchSummary, wall_s: float | None) -> str:
    """Return the totals as a few sentences; wall_s is the time that the output tokens took, where that is known."""
    failed = f", {summary.num_failed} of them failed" if summary.num_failed else ""
    pace = "" if wall_s is None else f" in {wall_s:.1f} s, {_rate(summary, wall_s):.1f} output tok/s"
    lines = [
        f"{summary.num_lines} lines{failed}: {summary.prompt_tokens} prompt tokens, "
        f"{summary.output_tokens} output tokens{pace}"
    ]
    if summary.ttft_ms is not None:
        lines.append(f"TTFT {_spread(summary.ttft_ms)}, TPOT {_spread(summary.tpot_ms)}")
    if summary.acceptance_rate is not None:
        share = f"{100 * summary.acceptance_rate:.0f} %"
        lines.append(f"{summary.accepted_tokens} of {summary.draft_tokens} draft tokens accepted ({share})")
    return "\n".join(lines)


def profile(summary: BatchSummary) -> Table:
    """Return where the time of all requests went, phase by phase."""
    whole_ms = sum(phase.total_ms for phase in summary.phases) or 1.0
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="where the time of all requests went")
    shown.add_column("phase")
    for name in ("share", "p50 ms", "p95 ms"):
        shown.add_column(name, justify="right", no_wrap=True)
    for phase in summary.phases:
        share = f"{100 * phase.total_ms / whole_ms:.1f} %"
        shown.add_row(phase.name, share, f"{phase.p50_ms:.1f}", f"{phase.p95_ms:.1f}")
    return shown


def figures(summary: BatchSummary, wall_s: float | None) -> dict[str, object]:
    """Return all figures as an object for scripts; lines are in the output, not here."""
    accepted = summary.acceptance_rate
    pace: dict[str, object] = {
        "wall_s": None if wall_s is None else round(wall_s, 3),
        "output_tokens_per_s": None if wall_s is None else round(_rate(summary, wall_s), 2),
        "acceptance_rate": None if accepted is None else round(accepted, 4),
    }
    return summary.model_dump(mode="json", exclude={"rows"}) | pace


def printable(text: str) -> str:
    """Return what others wrote, without what would move a terminal's cursor or colours."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _rate(summary: BatchSummary, wall_s: float) -> float:
    return summary.output_tokens / wall_s if wall_s > 0 else 0.0


def _spread(values: Spread | None) -> str:
    return "-" if values is None else f"{values.p50:.0f} ms (p95 {values.p95:.0f} ms)"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
