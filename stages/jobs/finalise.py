"""Last step of a batch: its finished lines in the order of the input, in place at once.

Lines that the end of a batch cut off become errors. The step may be killed anywhere and begins again: it writes the
same bytes, and each file appears whole. What tells it how far an earlier try came: the record has a summary when the
output may be in place, and the batch's files are gone when it is. The counts of the record become those of the journal,
which nothing can make wrong.
"""

from collections.abc import Iterator
from typing import cast

from pipeline.batch.errors import BatchFilesDamaged, BatchFilesGone
from pipeline.batch.figures import BatchSummary, Highlights, summarise_records
from pipeline.batch.input_index import InputLines
from pipeline.batch.journal import finished_in_order, read_records
from pipeline.batch.lines import BatchLineError
from pipeline.batch.record import BatchState
from pipeline.batch.results import encode_line, refused_line, result_line
from pipeline.batch.store import NOW, line_request_id
from pipeline.messages import Failure
from pipeline.redis_calls import Arg
from stages.jobs.output import OutputFiles
from stages.jobs.turn import Turn

CUT_OFF = {
    "cancelled": Failure(
        stage="jobs", code="batch_cancelled", message="the batch was cancelled before it was done", retryable=True
    ),
    "expired": Failure(
        stage="jobs", code="batch_expired", message="the batch's time was over before it was done", retryable=True
    ),
}
CHECK_EVERY = 256  # lines


async def finalise(turn: Turn) -> None:
    """Write the output, then end the batch.

    Raises:
        OSError: a file cannot be written.
        BatchFilesDamaged: finished lines are missing.
        BatchFilesGone: the batch was given up.
    """
    record, store = turn.record, turn.jobs.store
    try:
        with turn.directory.locked(record.id):
            output = OutputFiles(record.options.target, record.options.errors, record.id)
            fields = _fields(await turn.in_thread(_write, turn, output))
            if await store.move(record.id, ["finalizing"], "finalizing", fields) != "finalizing":
                return
            await turn.in_thread(output.put_in_place)
            await turn.in_thread(turn.directory.remove)
    except BatchFilesGone:
        if not record.summary:
            raise
    await store.move(record.id, ["finalizing"], cast("BatchState", record.ending or "completed"))


def _fields(summary: BatchSummary) -> dict[str, Arg]:
    return {
        "summary": summary.model_dump_json(),
        "ended_ms": NOW,
        "succeeded": summary.num_succeeded,
        "failed": summary.num_failed,
        "prompt_tokens": summary.prompt_tokens,
        "output_tokens": summary.output_tokens,
    }


def _write(turn: Turn, output: OutputFiles) -> BatchSummary:
    """Write all lines to the temporary files, and return the figures."""
    record = turn.record
    records = read_records(turn.directory, record.total)
    if record.ending not in CUT_OFF and len(records) < record.total:
        problem = f"has {len(records)} of {record.total} lines, and all were finished"
        raise BatchFilesDamaged(turn.directory.finished_index, problem)
    highlights = Highlights(records)
    with InputLines(record.options.source, turn.directory.input_index) as lines, output:
        for index, reason, line in _all_lines(turn, lines):
            failed = reason == "error"
            output.write(line, failed=failed)
            highlights.saw(index, lines.line_number(index), line, failed=failed)
            if index % CHECK_EVERY == 0:
                turn.check()
    return highlights.added_to(summarise_records(records, record.total))


def _all_lines(turn: Turn, lines: InputLines) -> Iterator[tuple[int, str, bytes]]:
    """Yield index, reason and output of every line of the batch: those that are missing with what cut them off."""
    expected, total = 0, turn.record.total
    for index, reason, output in finished_in_order(turn.directory, total):
        for missing in range(expected, index):
            yield missing, "error", _cut_off(turn, lines, missing)
        yield index, reason, output
        expected = index + 1
    for missing in range(expected, total):
        yield missing, "error", _cut_off(turn, lines, missing)


def _cut_off(turn: Turn, lines: InputLines, index: int) -> bytes:
    record = turn.record
    line = lines.read(index, record.options.model)
    if isinstance(line, BatchLineError):
        return encode_line(refused_line(line))
    return encode_line(result_line(line, line_request_id(record.id, index), 0, CUT_OFF[record.ending]))
