"""Opening a delivery in the stages that have loops of their own: what cannot be served ends here, with a reason."""

from typing import TypeVar

from pipeline import wire
from pipeline.errors import WireError
from pipeline.keys import MAX_DELIVERIES
from pipeline.messages import Failure, WorkItem
from pipeline.transport import Delivery, Transport
from pipeline.worker import bury, is_poison

M = TypeVar("M", bound=WorkItem)


async def open_delivery(transport: Transport, delivery: Delivery, kind: type[M]) -> M | None:
    """The message of a delivery, or None when it was buried: unreadable, or the end of every process that had it."""
    if is_poison(delivery):
        code, message = "too_many_tries", f"given up after {MAX_DELIVERIES} tries"
    else:
        try:
            return wire.unpack(delivery.payload, kind)
        except WireError as error:
            code, message = error.code, str(error)
    await bury(transport, delivery, Failure(stage=delivery.stage, code=code, message=message, retryable=False))
    return None
