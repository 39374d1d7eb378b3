"""Opening a delivery in the stages that have loops of their own: what cannot be served ends here, with a reason."""

import asyncio
from typing import TypeVar

from kv_store.pool import FilePool
from pipeline import wire
from pipeline.errors import WireError
from pipeline.keys import MAX_DELIVERIES
from pipeline.messages import Failure, WorkItem
from pipeline.transport import Delivery, Transport
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
