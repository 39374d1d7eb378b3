"""Results of rows as a person reads them.

Owns the columns. Knows nothing about how rows are run.
"""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from ops.chaos.row import RowResult

COLUMNS = ("row", "fault", "what happened", "verdict", "s")


def table(results: Sequence[RowResult]) -> Table:
    """Return a row for each result, for a terminal."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column(COLUMNS[0], no_wrap=True)
    for name in COLUMNS[1:3]:
        shown.add_column(name, overflow="fold")
    shown.add_column(COLUMNS[3], no_wrap=True)
    shown.add_column(COLUMNS[4], justify="right", no_wrap=True)
    for result in results:
        shown.add_row(*map(Text, _cells(result)))  # texts: brackets are no markup
    return shown


def markdown(results: Sequence[RowResult]) -> str:
    """Return the same for a page, and what is promised besides."""
    header = (*COLUMNS[:2], "promised", *COLUMNS[2:])
    rows = ((*cells[:2], result.expected, *cells[2:]) for result in results for cells in (_cells(result),))
    lines = [header, ("---", "---", "---", "---", "---", "--:"), *rows]
    return "\n".join(f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in line)} |" for line in lines)


def _cells(result: RowResult) -> tuple[str, ...]:
    happened = "; ".join(filter(None, (result.happened, *result.problems)))
    return result.id, result.fault, happened, result.verdict, f"{result.wall_s:.0f}"
