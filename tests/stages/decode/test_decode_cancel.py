"""Decode and requests that are cancelled while they wait at its door: nothing of them is computed, nothing stays."""

import pytest
from structlog.testing import capture_logs

from pipeline.transport import Transaction
from stages.common.kv_blobs import owner_of
from stages.decode import stage as decode_stage
from tests.stages.alone import prompt_of, result_alone
from tests.stages.line import CHUNK_TOKENS, Line, holds, soon


def emits(transaction: Transaction) -> bool:
    return bool(transaction.effects)


def blobs_of(line: Line, request_id: str) -> list[str]:
    return [name for name in line.pool.names() if owner_of(request_id, 0) in name]


async def at_decodes_door(line: Line, num_entries: int) -> None:
    async with line.running("prefill", "compressor"):
        await holds(lambda: line.num_entries("decode") == num_entries)


async def test_a_request_cancelled_while_it_waits_for_pages_makes_way_at_once(line: Line) -> None:
    line.num_pages = 2
    running = await line.submit("running", prompt_of(20), 2 * CHUNK_TOKENS - 20)
    await line.submit("waiting", prompt_of(CHUNK_TOKENS + 1), 4)
    await at_decodes_door(line, 2)
    with capture_logs() as logs:
        async with line.process("decode", hold=emits) as decode:
            await soon(decode.transport.holding.wait())
            await holds(lambda: "waiting" in decode.transport.asked)
            await line.cancel("waiting")
            # The one that runs has all pages and is held in mid-request.
            await holds(lambda: line.num_entries("decode") == 1 and blobs_of(line, "waiting") == [])
            decode.transport.go_on.set()
            assert (await line.answer("running")).result == result_alone(line, running)
    assert (await line.answer("waiting")).terminal.finish_reason == "cancelled"
    assert "kv_recomputed" not in [entry["event"] for entry in logs]
    line.assert_nothing_left()


async def test_a_request_cancelled_just_before_pages_are_free_is_not_computed(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_stage, "_BLOCK_S", 2.0)  # pages are free long before it is asked in passing
    line.num_pages = 2
    await line.submit("running", prompt_of(20), 2 * CHUNK_TOKENS - 20)
    await line.submit("waiting", prompt_of(CHUNK_TOKENS + 1), 4)
    await at_decodes_door(line, 2)
    with capture_logs() as logs:
        async with line.process("decode", hold=emits) as decode:
            await soon(decode.transport.holding.wait())
            await holds(lambda: "waiting" in decode.transport.asked)
            await line.cancel("waiting")
            await line.cancel("running")
            decode.transport.go_on.set()
            await holds(lambda: line.num_entries("decode") == 0 and line.pool.names() == [])
            message = await line.submit("next", prompt_of(5), 3)
            async with line.running("prefill", "compressor"):
                assert (await line.answer("next")).result == result_alone(line, message)
    assert "kv_recomputed" not in [entry["event"] for entry in logs]
    line.assert_nothing_left()


async def test_a_request_cancelled_while_it_is_computed_again_stops_between_two_pieces(line: Line) -> None:
    await line.submit("r", prompt_of(5 * CHUNK_TOKENS + 1), 4)
    await at_decodes_door(line, 1)
    for name in line.pool.names():
        line.pool.release(name)
    async with line.process("decode") as decode:
        assert decode.engine is not None
        compute, num_pieces = decode.engine.compute, 0

        async def watched(*args, **kwargs):
            nonlocal num_pieces
            num_pieces += 1
            if num_pieces == 2:
                await line.cancel("r")
            return await compute(*args, **kwargs)

        decode.engine.compute = watched
        await holds(lambda: line.num_entries("decode") == 0)
        message = await line.submit("next", prompt_of(5), 3)
        async with line.running("prefill", "compressor"):
            assert (await line.answer("next")).result == result_alone(line, message)
    line.assert_nothing_left()
    assert num_pieces == 2 + 2  # of the next one: it has two tokens to go
