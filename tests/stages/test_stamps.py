"""What stages stamp: who did what to which chunk, on every way a request can take and to every end."""

import pytest

from pipeline.boundaries import (
    CHUNK_COMPUTED,
    CHUNK_WRITTEN,
    COMPRESSOR_CLAIMED,
    DECODE_CLAIMED,
    FINISHED,
    FIRST_TOKEN,
    KV_LOADED,
    PREFILL_CLAIMED,
    SEALED,
    TOKENIZED,
)
from pipeline.messages import Stamp
from pipeline.timeline import phases_us
from tests.stages.alone import prompt_of
from tests.stages.line import CHUNK_TOKENS, Line

PREFILL, COMPRESSOR, DECODE = "prefill-process", "compressor-process", "decode-process"


def crossed(stamps: tuple[Stamp, ...]) -> list[tuple[str, str | None, int | None]]:
    return [(stamp.boundary, stamp.by, stamp.chunk) for stamp in stamps]


async def test_every_process_says_who_it_is_and_which_chunk_it_means(line: Line) -> None:
    await line.submit("r", prompt_of(CHUNK_TOKENS + 5), 4, ignore_eos=True)
    async with line.running("prefill", "compressor", "decode"):
        answer = await line.answer("r")
    assert crossed(answer.terminal.stamps) == [
        (TOKENIZED, None, None),  # by the test
        (PREFILL_CLAIMED, PREFILL, None),
        (FIRST_TOKEN, PREFILL, None),
        (CHUNK_COMPUTED, PREFILL, 0),
        (CHUNK_WRITTEN, PREFILL, 0),
        (COMPRESSOR_CLAIMED, COMPRESSOR, 0),
        (SEALED, COMPRESSOR, 0),
        (CHUNK_COMPUTED, PREFILL, 1),
        (CHUNK_WRITTEN, PREFILL, 1),
        (COMPRESSOR_CLAIMED, COMPRESSOR, 1),
        (SEALED, COMPRESSOR, 1),
        (DECODE_CLAIMED, DECODE, None),
        (KV_LOADED, DECODE, None),
        (FINISHED, DECODE, None),
    ]


async def test_the_last_chunk_is_computed_when_token_0_is_chosen(line: Line) -> None:
    await line.submit("r", prompt_of(2 * CHUNK_TOKENS), 2, ignore_eos=True)
    async with line.running("prefill", "compressor", "decode"):
        stamps = (await line.answer("r")).terminal.stamps
    at_us = {(stamp.boundary, stamp.chunk): stamp.at_us for stamp in stamps}
    assert at_us[CHUNK_COMPUTED, 1] == at_us[FIRST_TOKEN, None]
    assert at_us[CHUNK_COMPUTED, 0] < at_us[CHUNK_COMPUTED, 1]


async def test_where_prefill_seals_it_says_so_and_no_compressor_claims(line: Line) -> None:
    line.seal_in_prefill = True
    await line.submit("r", prompt_of(5), 4, ignore_eos=True)
    async with line.running("prefill", "decode"):
        stamps = (await line.answer("r")).terminal.stamps
    chunk = [one for one in crossed(stamps) if one[2] is not None]
    assert chunk == [(CHUNK_COMPUTED, PREFILL, 0), (CHUNK_WRITTEN, PREFILL, 0), (SEALED, PREFILL, 0)]


async def test_a_request_that_ends_with_token_0_never_meets_decode(line: Line) -> None:
    await line.submit("r", prompt_of(5), 1)
    async with line.running("prefill"):
        stamps = (await line.answer("r")).terminal.stamps
    assert crossed(stamps)[1:] == [
        (PREFILL_CLAIMED, PREFILL, None),
        (FIRST_TOKEN, PREFILL, None),
        (FINISHED, PREFILL, None),
    ]
    assert list(phases_us(stamps)) == ["queue_prefill", "prefill"]


async def test_one_that_prefill_cannot_take_ended_there(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    await line.submit("r", prompt_of(5), 4)
    monkeypatch.setattr("stages.prefill.handover.Handover.bytes_for", lambda *_, **__: 1 << 40)
    async with line.running("prefill"):
        answer = await line.answer("r")
    assert answer.failure.code == "kv_pool_too_small"
    assert crossed(answer.terminal.stamps)[1:] == [(FINISHED, PREFILL, None)]


async def test_one_that_decode_cannot_take_ended_there(line: Line) -> None:
    line.num_pages = 2
    await line.submit("r", prompt_of(CHUNK_TOKENS), 3 * CHUNK_TOKENS, ignore_eos=True)
    async with line.running("prefill", "compressor", "decode"):
        answer = await line.answer("r")
    assert answer.failure.code == "kv_cache_too_small"
    assert crossed(answer.terminal.stamps)[1:] == [
        (PREFILL_CLAIMED, PREFILL, None),
        (FIRST_TOKEN, PREFILL, None),
        (DECODE_CLAIMED, DECODE, None),
        (FINISHED, DECODE, None),
    ]
    assert list(phases_us(answer.terminal.stamps))[-2:] == ["queue_decode", "load"]


async def test_unreadable_work_keeps_the_stamps_that_can_be_read(line: Line) -> None:
    message = await line.submit("r", prompt_of(5), 4)
    [stream] = [entries for name, entries in line.queues.broker.streams.items() if ":prefill:" in name]
    [entry] = stream.values()
    entry.tries = 99  # as after many crashes
    async with line.running("prefill"):
        answer = await line.answer("r")
    assert answer.failure.code == "too_many_tries"
    assert answer.terminal.stamps[:-1] == message.stamps
    assert crossed(answer.terminal.stamps)[-1] == (FINISHED, PREFILL, None)
