"""Feeds a batch's lines to the tokenizer, so many at a time that at most `window` are in flight.

What bounds memory is here: a line is read when there is room for it. Interactive requests are served first
wherever they meet a batch's lines, because those wait in streams of their own.
"""

import asyncio
import hashlib
from collections.abc import Sequence

from pipeline import wire
from pipeline.batch.input_index import InputLines
from pipeline.batch.journal import read_records
from pipeline.batch.lines import BatchLine, BatchLineError
from pipeline.batch.store import FeedKind, line_request_id
from pipeline.boundaries import SUBMITTED
from pipeline.clock import now_us
from pipeline.keys import ADMIT_RETRY_S
from pipeline.messages import GenerateRequest, Stamp
from pipeline.params import MAX_SEED
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
            attempt = now_us() // 1_000_000
            payloads = await turn.in_thread(_read, turn, lines, page, finished, attempt)
            fed = await _feed_page(turn, cursor, payloads, attempt)
            cursor += fed
            if fed < len(page):  # the queue was full; or an answer was lost, and the line was fed all the same
                record = await turn.jobs.store.read(record.id)
                if record.state != "in_progress":
                    return
                cursor = record.cursor


async def _feed_page(turn: Turn, cursor: int, payloads: Sequence[tuple[FeedKind, bytes]], attempt: int) -> int:
    """Return how many of the lines were fed."""
    jobs = turn.jobs
    for position, (kind, payload) in enumerate(payloads):
        reply = await jobs.store.feed(turn.lease, cursor + position, kind, payload, jobs.max_queue, attempt)
        if reply == "busy":
            await asyncio.sleep(ADMIT_RETRY_S)
        elif reply == "moved":
            await asyncio.sleep(ROOM_POLL_S)
        if reply != "ok":
            return position
    return len(payloads)


def _finished(turn: Turn) -> frozenset[int]:
    """Return the lines that need no feeding: only where the record was made again, else the cursor knows."""
    if not turn.record.recovered:
        return frozenset()
    return frozenset(read_records(turn.directory, turn.record.total)["index"].tolist())


def _read(
    turn: Turn, lines: InputLines, page: range, finished: frozenset[int], attempt: int
) -> list[tuple[FeedKind, bytes]]:
    return [("skip", b"") if index in finished else _payload(turn, lines, index, attempt) for index in page]


def _payload(turn: Turn, lines: InputLines, index: int, attempt: int) -> tuple[FeedKind, bytes]:
    record = turn.record
    line = lines.read(index, record.options.model)
    if isinstance(line, BatchLineError):
        return "refused", b""
    return "request", wire.pack(_request(record.id, index, attempt, line, turn))


def _request(batch_id: str, index: int, attempt: int, line: BatchLine, turn: Turn) -> GenerateRequest:
    options = turn.record.options
    seed = line.params.seed
    if seed is None:
        # From the batch's id, which is random: a line that has to be fed again gets the same text again.
        digest = hashlib.blake2b(f"{batch_id}:{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") % (MAX_SEED + 1)
    return GenerateRequest(
        request_id=line_request_id(batch_id, index),
        attempt=attempt,
        priority="batch",
        model=options.stack_model,
        prompt=line.prompt,
        messages=line.messages,
        params=line.params.model_copy(update={"seed": seed}),
        speculate=line.speculate and options.speculate,
        stamps=(Stamp(boundary=SUBMITTED, at_us=now_us()),),
    )
