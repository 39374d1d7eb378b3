"""Collects a batch's lines that have ended: from their result streams to its journal on the disk.

A line's results have no TTL before they are on the disk, and a short one afterwards. The order is what makes a
crash harmless: bytes, record, acknowledgement. Whoever comes after it finds lines that are recorded and not
acknowledged, and only acknowledges them.
"""

from collections.abc import Mapping

from pipeline import wire
from pipeline.batch.input_index import InputLines
from pipeline.batch.journal import PHASE_NAMES, FinishedLine, Journal
from pipeline.batch.lines import BatchLineError
from pipeline.batch.record import states_of
from pipeline.batch.results import Completion, encode_line, outcome_of, refused_line, result_line
from pipeline.batch.store import EPOCH, Collected, DoneLine, line_request_id
from pipeline.errors import StateDamaged, WireError
from pipeline.messages import Delta, Failure, Terminal
from pipeline.timeline import phases_us, ttft_ms
from stages.jobs.turn import Turn

PAGE = 64  # lines collected at a time, with one sync of the disk
BLOCK_S = 0.5
CANCELLED = "cancelled"

StreamEntries = list[tuple[bytes, bytes]]


async def collect(turn: Turn) -> None:
    """Collect until the time is up or the batch has nothing left in flight.

    Raises:
        OSError: the disk does not take the lines.
        BatchFilesGone: the batch was given up.
    """
    store, record = turn.jobs.store, turn.record
    source, index = record.options.source, turn.directory.input_index
    with (
        turn.directory.locked(record.id),
        Journal(turn.directory, record.total) as journal,
        InputLines(source, index) as lines,
    ):
        state = await store.acknowledge(record.id, [])
        while state in states_of("collect") and not turn.is_over:
            done = await store.wait_done(record.id, EPOCH, PAGE, BLOCK_S)
            fresh = [line for line in done if journal.reason(line.index) is None]
            streams = await store.results(record.id, fresh)
            # Asked for after the results: a line that the batch's end cut off was so after the state said it.
            dropping = bool(streams) and await store.acknowledge(record.id, []) != "in_progress"
            finished = await turn.in_thread(_finish, turn, lines, streams, dropping=dropping)
            await turn.in_thread(journal.append, finished)
            tokens = {line.index: (line.prompt_tokens, line.output_tokens) for line in finished}
            state = await store.acknowledge(record.id, [_collected(line, journal, tokens) for line in done])


def _collected(line: DoneLine, journal: Journal, tokens: dict[int, tuple[int, int]]) -> Collected:
    reason = journal.reason(line.index)
    if reason is None:
        return Collected(line, "dropped")
    return Collected(line, "failed" if reason == "error" else "succeeded", *tokens.get(line.index, (0, 0)))


def _finish(
    turn: Turn, lines: InputLines, streams: Mapping[int, StreamEntries], *, dropping: bool
) -> list[FinishedLine]:
    finished = (_finished_line(turn, lines, index, entries, dropping=dropping) for index, entries in streams.items())
    return [line for line in finished if line is not None]


def _finished_line(
    turn: Turn, lines: InputLines, index: int, entries: StreamEntries, *, dropping: bool
) -> FinishedLine | None:
    """Return what goes to the journal; None for a line that the end of its batch cut off."""
    options = turn.record.options
    line = lines.read(index, options.model)
    if isinstance(line, BatchLineError):
        return FinishedLine(index, "error", encode_line(refused_line(line)))
    request_id = line_request_id(turn.record.id, index)
    try:
        deltas, terminal = _unpack(entries)
        outcome = outcome_of(deltas, terminal)
    except (WireError, StateDamaged) as error:  # one line's results, and not a reason to lose the others
        terminal = _lost("result_damaged", str(error))
        outcome = outcome_of((), terminal)
    if dropping and terminal.finish_reason == CANCELLED:
        return None
    created_s = terminal.stamps[0].at_us // 1_000_000 if terminal.stamps else 0
    token_bytes = turn.jobs.names.token_bytes
    output = encode_line(result_line(line, request_id, created_s, outcome, token_bytes, options.response_role))
    phases = phases_us(terminal.stamps)
    ttft = ttft_ms(terminal.stamps)
    figures = {
        "ttft_us": None if ttft is None else round(1000 * ttft),
        "latency_us": sum(phases.values()) if phases else None,
        "phases_us": [phases.get(name, 0) for name in PHASE_NAMES],
    }
    if not isinstance(outcome, Completion):
        return FinishedLine(index, "error", output, **figures)
    usage = outcome.usage
    return FinishedLine(
        index,
        outcome.finish_reason,
        output,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        draft_tokens=usage.draft_tokens,
        accepted_tokens=usage.accepted_tokens,
        **figures,
    )


def _unpack(entries: StreamEntries) -> tuple[list[Delta], Terminal]:
    deltas = [wire.unpack(payload, Delta) for entry_id, payload in entries if entry_id.startswith(b"0-")]
    ends = [wire.unpack(payload, Terminal) for entry_id, payload in entries if not entry_id.startswith(b"0-")]
    if ends:
        return deltas, ends[0]
    # It is said to have ended, and its results are gone: an hour of no jobs process after a failure, or a lost key.
    return [], _lost("result_lost", "its result had expired")


def _lost(code: str, message: str) -> Terminal:
    failure = Failure(stage="jobs", code=code, message=message, retryable=True)
    return Terminal(finish_reason="error", failure=failure)
