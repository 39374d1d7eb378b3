"""Opening a delivery in the stages that have loops of their own: what cannot be served ends here, with a reason.

Also asks, before a stage goes to great length, whether anybody still wants the request.
"""

import asyncio
from typing import TypeVar

from kv_store.pool import FilePool
from pipeline import wire
from pipeline.errors import WireError
from pipeline.keys import MAX_DELIVERIES
from pipeline.messages import Failure, WorkItem
from pipeline.transport import Delivery, Effect, Outcome, Transaction, Transport
from pipeline.worker import bury, is_poison
from stages.common.kv_blobs import release_all

M = TypeVar("M", bound=WorkItem)


async def open_delivery(transport: Transport, pool: FilePool, delivery: Delivery, kind: type[M]) -> M | None:
    """The message of a delivery, or None when it was buried: unreadable, or the end of every process that had it.

    A buried request's blobs are released.
    """
    if is_poison(delivery):
        code, message = "too_many_tries", f"given up after {MAX_DELIVERIES} tries"
    else:
        try:
            return wire.unpack(delivery.payload, kind)
        except WireError as error:
            code, message = error.code, str(error)
    await bury(transport, delivery, Failure(stage=delivery.stage, code=code, message=message, retryable=False))
    identity = wire.read_identity(delivery.payload)
    if identity is not None:
        await asyncio.to_thread(release_all, pool, *identity)
    return None


async def commit_one(
    transport: Transport, delivery: Delivery, message: WorkItem, *effects: Effect, ack: bool
) -> Outcome:
    """Commit effects under the claim of one delivery, and return what became of them."""
    [outcome] = await transport.commit([Transaction(delivery, message.request_id, message.attempt, effects, ack)])
    return outcome


async def still_wanted(transport: Transport, pool: FilePool, delivery: Delivery, message: WorkItem) -> bool:
    """Whether the request is still open, and ours; the blobs of one that has gone are released."""
    outcome = await commit_one(transport, delivery, message, ack=False)
    if outcome is Outcome.GONE:  # chunks that were sealed already have lost their reader
        await asyncio.to_thread(release_all, pool, message.request_id, message.attempt)
    return outcome is Outcome.OK
