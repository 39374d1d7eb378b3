"""`sluice cancel`: ends requests and batches of a running stack."""

from collections.abc import Sequence
from typing import Annotated

import typer

from ops.commands.common import EXIT_FAILED, execute
from ops.commands.connected import stack_client
from pipeline.batch.errors import UnknownBatch
from pipeline.batch.record import is_batch_id
from pipeline.client.batches import Batches
from pipeline.client.cancel import CancelOutcome
from pipeline.client.client import Client

EXAMPLES = """\b
Examples:
  sluice cancel req_3f9...
  sluice cancel req_3f9... req_8c2...
  sluice cancel batch_x7k...
"""

WORDS: dict[CancelOutcome, str] = {
    "cancelled": "cancelled",
    "ended": "had already ended",
    "unknown": "unknown: never accepted, its results have expired, or the server lost its data",
}
BATCH_WORDS: dict[CancelOutcome, str] = {
    "cancelled": "is cancelled: what it has finished goes to its output, the rest to its errors",
    "ended": "had already ended, or was about to",
    "unknown": "unknown: never submitted, ended more than a day ago, or the server lost its data",
}


def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="As `sluice enqueue` printed them, or of batches.")],
) -> None:
    """End requests now: who reads them gets the end at once, and the stages drop their work at the next step.

    Batches keep what they have finished.
    Exit code 0: all of them have ended, by this or before; 1: one is not known.
    """
    execute(_cancel(ids))


async def _cancel(ids: Sequence[str]) -> int:
    async with stack_client() as client:
        outcomes = await cancel_all(client, ids)
    for one, outcome in outcomes.items():
        print(f"{one} {(BATCH_WORDS if is_batch_id(one) else WORDS)[outcome]}")
    return EXIT_FAILED if "unknown" in outcomes.values() else 0


async def cancel_all(client: Client, ids: Sequence[str]) -> dict[str, CancelOutcome]:
    """Cancel what the ids name, and return what became of each, in their order."""
    outcomes = await client.cancel_many(one for one in ids if not is_batch_id(one))
    async with client.batches() as batches:
        outcomes |= {one: await _cancel_batch(batches, one) for one in ids if is_batch_id(one)}
    return {one: outcomes[one] for one in ids}


async def _cancel_batch(batches: Batches, batch_id: str) -> CancelOutcome:
    try:
        return "cancelled" if await batches.cancel(batch_id) else "ended"
    except UnknownBatch:
        return "unknown"
