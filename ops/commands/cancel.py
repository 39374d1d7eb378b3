"""`sluice cancel`: ends requests of a running stack."""

from collections.abc import Sequence
from typing import Annotated

import typer

from ops.commands.common import EXIT_FAILED, execute
from ops.commands.connected import stack_client
from pipeline.client.cancel import CancelOutcome
from pipeline.client.client import Client

EXAMPLES = """\b
Examples:
  sluice cancel req_3f9...
  sluice cancel req_3f9... req_8c2...
"""

WORDS: dict[CancelOutcome, str] = {
    "cancelled": "cancelled",
    "ended": "had already ended",
    "unknown": "unknown: never accepted, its results have expired, or the server lost its data",
}


def cancel(
    request_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="As `sluice enqueue` printed them.")],
) -> None:
    """End requests now: who reads them gets the end at once, and the stages drop their work at the next step.

    Exit code 0: all of them have ended, by this or before; 1: one is not known.
    """
    execute(_cancel(request_ids))


async def _cancel(request_ids: Sequence[str]) -> int:
    async with stack_client() as client:
        outcomes = await cancel_all(client, request_ids)
    for request_id, outcome in outcomes.items():
        print(f"{request_id} {WORDS[outcome]}")
    return EXIT_FAILED if "unknown" in outcomes.values() else 0


async def cancel_all(client: Client, ids: Sequence[str]) -> dict[str, CancelOutcome]:
    """Cancel what the ids name, and return what became of each."""
    # Ids that begin with BATCH_ID_PREFIX (pipeline/batch/record.py) name batches: they part from the others here.
    return await client.cancel_many(ids)
