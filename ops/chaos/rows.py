"""Every row there is, in the order of the matrix."""

import re

from ops.chaos import (
    rows_clients,
    rows_memory,
    rows_network,
    rows_queues,
    rows_server,
    rows_stacks,
    rows_stages,
    rows_texts,
)
from ops.chaos.row import Row
from pipeline.errors import InvalidRequest

FAMILIES = (
    rows_stages,
    rows_queues,
    rows_server,
    rows_network,
    rows_memory,
    rows_clients,
    rows_stacks,
    rows_texts,
)


def _place(row: Row) -> tuple[int, str]:
    """F4 before F4x before F10."""
    found = re.fullmatch(r"F(\d+)(.*)", row.id)
    assert found is not None, f"{row.id} is no id of a row"
    return int(found[1]), found[2]


ROWS: tuple[Row, ...] = tuple(sorted((row for family in FAMILIES for row in family.ROWS), key=_place))


def chosen(ids: list[str]) -> list[Row]:
    """Return the rows with these ids, in the order of the matrix; all of them where none is named.

    Raises:
        InvalidRequest: there is no such row.
    """
    wanted = {name.upper() for name in ids}
    if unknown := wanted - {row.id.upper() for row in ROWS}:
        names = ", ".join(row.id for row in ROWS)
        raise InvalidRequest(
            "row",
            f"there is no {', '.join(sorted(unknown))}; there are {names} (docs/faults.md says where the others of the "
            "matrix are)",
        )
    return [row for row in ROWS if not wanted or row.id.upper() in wanted]
