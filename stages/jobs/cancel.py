"""Ends what a batch has in flight, because it was cancelled or its time is over.

Nothing is fed any more when this runs: the state says so. Lines that had finished stay finished, and the collector
takes them along with those that are ended here.
"""

from pipeline import wire
from pipeline.batch.journal import lines_in_flight
from pipeline.batch.store import line_request_id
from pipeline.errors import UnknownRequest
from pipeline.messages import Terminal
from stages.jobs.turn import Turn


async def cancel(turn: Turn) -> None:
    """Cancel every line that was fed and is not finished.

    Raises:
        BatchFilesGone: the batch was given up.
    """
    turn.directory.check(turn.record.id)
    terminal = wire.pack(Terminal(finish_reason="cancelled"))
    for index in await turn.in_thread(lines_in_flight, turn.directory, turn.record):
        if turn.is_over:
            return
        try:
            await turn.jobs.transport.cancel(line_request_id(turn.record.id, index), terminal)
        except UnknownRequest:
            continue  # refused before it became a request, or collected a while ago
