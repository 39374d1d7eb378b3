"""Feeds a batch's lines to the tokenizer, so many at a time that at most `window` are in flight.

What bounds memory is here: a line is read when there is room for it. Interactive requests are served first
wherever they meet a batch's lines, because those wait in streams of their own.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from pipeline import wire
from pipeline.batch.input_index import InputLines
from pipeline.batch.journal import read_records
from pipeline.batch.lines import BatchLineError
from pipeline.batch.store import Feed, line_request_id
from pipeline.client.asks import new_request
from pipeline.keys import ADMIT_RETRY_S
from stages.jobs.turn import Turn

PAGE = 32  # lines read at a time
ROOM_POLL_S = 0.05  # a window of lines takes longer than this, however small the model


async def feed(turn: Turn) -> None:
    """Feed lines until the time is up or there are none left.

    Raises:
        InputChanged: a line is not what it was when the input was validated.
        BatchFilesGone: the batch was given up.
    """
    record = turn.record
    turn.directory.check(record.id)
    lines = InputLines(record.options.source, turn.directory.input_index)
    with lines:
        finished = await turn.in_thread(_finished, turn)
        cursor = record.cursor
        while cursor < len(lines) and not turn.is_over:
            room = await turn.jobs.store.room(record.id, record.options.window)
            if room <= 0:
                await asyncio.sleep(ROOM_POLL_S)
                continue
            page = range(cursor, min(cursor + min(room, PAGE), len(lines)))
            fed = await _feed_page(turn, cursor, await turn.in_thread(_read, turn, lines, page, finished))
            cursor += fed
            if fed < len(page):  # the queue was full; or an answer was lost, and the line was fed all the same
                record = await turn.jobs.store.read(record.id)
                if record.state != "in_progress":
                    return
                cursor = record.cursor


async def _feed_page(turn: Turn, cursor: int, feeds: Sequence[Feed]) -> int:
    """Return how many of the lines were fed."""
    jobs = turn.jobs
    for position, one in enumerate(feeds):
        more_follow = position < len(feeds) - 1
        reply = await jobs.store.feed(turn.lease, cursor + position, one, jobs.max_queue, more_follow=more_follow)
        if reply == "busy":
            await asyncio.sleep(ADMIT_RETRY_S)
        elif reply == "moved":
            await asyncio.sleep(ROOM_POLL_S)
        if reply != "ok":
            return position
    return len(feeds)


def _finished(turn: Turn) -> frozenset[int]:
    """Return the lines that need no feeding: only where the record was made again, else the cursor knows."""
    if not turn.record.recovered:
        return frozenset()
    return frozenset(read_records(turn.directory, turn.record.total)["index"].tolist())


def _read(turn: Turn, lines: InputLines, page: range, finished: frozenset[int]) -> list[Feed]:
    return [Feed("skip") if index in finished else _line(turn, lines, index) for index in page]


def _line(turn: Turn, lines: InputLines, index: int) -> Feed:
    record, options = turn.record, turn.record.options
    line = lines.read(index, options.model)
    if isinstance(line, BatchLineError):
        return Feed("refused")
    ask = replace(line, model=options.stack_model, speculate=line.speculate and options.speculate)
    # A missing seed comes from the id, and so from the batch's, which is random: fed again, a line has it again.
    request = new_request(ask, "batch", line_request_id(record.id, index))
    return Feed("request", wire.pack(request), request.attempt, line.timeout_s)
