"""First step of a batch: index its input, and see that it is the one that was submitted."""

from pipeline.batch.errors import InputChanged
from pipeline.batch.input_index import build_index
from pipeline.batch.store import NOW
from stages.jobs.turn import Turn


async def validate(turn: Turn) -> None:
    """Write the input's index and let the batch begin.

    Raises:
        InputChanged: the input has another hash than at submission.
        OSError: it cannot be read.
        BatchFilesGone: the batch was given up.
    """
    record, directory = turn.record, turn.directory
    source = record.options.source
    with directory.locked(record.id):
        summary = await turn.in_thread(build_index, source, directory.input_index, turn.check)
    if summary.sha256 != record.input_sha256:
        raise InputChanged(source)
    fields = {"total": summary.num_lines, "started_ms": NOW}
    await turn.jobs.store.move(record.id, ["validating"], "in_progress", fields)
