"""First step of a batch: index its input, and see that it is the one that was submitted."""

import asyncio

from pipeline.batch.errors import BatchFilesDamaged, InputChanged
from pipeline.batch.input_index import build_index
from stages.jobs.turn import Turn


async def validate(turn: Turn) -> None:
    """Write the input's index and let the batch begin.

    Raises:
        InputChanged: the input has another hash than at submission.
        OSError: it cannot be read.
    """
    record, directory = turn.record, turn.directory
    if directory.manifest() is None:
        raise BatchFilesDamaged(directory.path, "is not there any more")
    source = record.options.source
    summary = await asyncio.to_thread(build_index, source, directory.input_index, turn.check)
    if summary.sha256 != record.input_sha256:
        raise InputChanged(source)
    deadline_ms = record.created_ms + 1000 * record.options.timeout_s if record.options.timeout_s else 0
    fields = {"total": summary.num_lines, "started_ms": "now", "deadline_ms": deadline_ms}
    await turn.jobs.store.move(record.id, ["validating"], "in_progress", fields)
