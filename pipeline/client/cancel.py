"""Cancelling: the request's last entry is written now, and what a stage still does for it is refused.

Owns that entry. Knows nothing about stages.
"""

from typing import Literal

from pipeline.boundaries import FINISHED
from pipeline.client.follow import ResultReader
from pipeline.client.patience import Patience
from pipeline.clock import now_us
from pipeline.errors import UnknownRequest
from pipeline.messages import Stamp, Terminal
from pipeline.transport import AFTER_ALL, Transport
from pipeline.wire import pack

CancelOutcome = Literal["cancelled", "ended", "unknown"]


async def cancel(transport: Transport, patience: Patience, reader: ResultReader, request_id: str) -> bool:
    """End a request; False where it had ended already.

    Raises:
        UnknownRequest: there is no such request.
    """
    stamp = Stamp(boundary=FINISHED, at_us=now_us(), by=transport.consumer)
    terminal = pack(Terminal(finish_reason="cancelled", stamps=(stamp,)))

    async def send() -> bool:
        return await transport.cancel(request_id, terminal)

    if await patience.call(send):
        return True
    # Where an answer was lost, the call that got through is found to have ended the request: it may be ours.
    return any(entry.data == terminal for entry in await reader.read(request_id, AFTER_ALL, 0))


async def cancel_any(
    transport: Transport, patience: Patience, reader: ResultReader, request_id: str
) -> tuple[str, CancelOutcome]:
    """Cancel a request and say what became of it, whether or not it is known."""
    try:
        return request_id, "cancelled" if await cancel(transport, patience, reader, request_id) else "ended"
    except UnknownRequest:
        return request_id, "unknown"
