"""Results of rows as a person reads them.

Owns the columns. Knows nothing about how rows are run.
"""

from collections.abc import Sequence

from ops.chaos.row import RowResult
from ops.measuring import markdown_table


def table(results: Sequence[RowResult]) -> str:
    """Return one line for each row, as Markdown."""
    header = ("row", "fault", "what happened", "verdict", "s")
    rows = [
        (
            result.id,
            result.fault,
            "; ".join((result.happened, *result.problems)),
            result.verdict,
            f"{result.wall_s:.0f}",
        )
        for result in results
    ]
    return markdown_table(header, rows)
