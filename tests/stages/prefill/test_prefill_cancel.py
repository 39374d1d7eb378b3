"""Prefill and requests that are cancelled before they are computed: they block nobody and leave no blob."""

from pipeline.memory_credits import Credit
from pipeline.transport import Emit, Transaction
from stages.prefill.handover import Handover
from tests.stages.alone import prompt_of, result_alone
from tests.stages.line import CHUNK_TOKENS, Line, holds, soon


def emits(transaction: Transaction) -> bool:
    return any(isinstance(effect, Emit) for effect in transaction.effects)


def bytes_for(line: Line, num_tokens: int) -> int:
    with line.engine(1) as engine:
        handover = Handover(engine, line.pool, chunk_tokens=CHUNK_TOKENS, seal=False, compression="none")
        return handover.bytes_for(num_tokens, with_checkpoints=True)


async def test_a_prompt_cancelled_while_it_waits_for_credit_makes_way_for_others(line: Line) -> None:
    left_bytes = bytes_for(line, 2 * CHUNK_TOKENS)
    line.queues.broker.credits.by_pool[line.pool.pool_id] = {"other": Credit(0, line.pool.quota_bytes - left_bytes)}
    await line.submit("large", prompt_of(4 * CHUNK_TOKENS), 4)
    message = await line.submit("small", prompt_of(5), 3)
    async with line.process("prefill") as prefill, line.running("compressor", "decode"):
        await holds(lambda: "large" in prefill.transport.asked)
        await line.cancel("large")
        assert (await line.answer("small")).result == result_alone(line, message)
        assert {transaction.request_id for transaction, _ in prefill.transport.committed} == {"small"}
    line.queues.broker.credits.drop("other")
    line.assert_nothing_left()


async def test_a_request_cancelled_after_its_prefill_was_killed_leaves_no_blob(line: Line) -> None:
    await line.submit("r", prompt_of(2 * CHUNK_TOKENS + 1), 4)
    async with line.running("compressor"), line.process("prefill", hold=emits) as doomed:
        await soon(doomed.transport.holding.wait())
        await holds(lambda: len(line.queues.broker.requests()["r"].chunks) == 2)
        await holds(lambda: line.num_entries("compressor") == 0)
        await doomed.kill()
    await line.cancel("r")
    line.clock.end_leases()
    async with line.process("prefill") as prefill:
        await holds(lambda: line.num_entries("prefill") == 0)
    assert prefill.transport.committed == []
    line.assert_nothing_left()


async def test_a_long_prompt_that_wants_one_token_stops_within_a_chunk_of_its_cancellation(line: Line) -> None:
    await line.submit("r", prompt_of(8 * CHUNK_TOKENS), 1)
    async with line.process("prefill") as prefill:
        assert prefill.engine is not None
        compute, num_chunks = prefill.engine.compute, 0

        async def watched(*args, **kwargs):
            nonlocal num_chunks
            num_chunks += 1
            if num_chunks == 3:
                await line.cancel("r")
            return await compute(*args, **kwargs)

        prefill.engine.compute = watched
        await holds(lambda: line.num_entries("prefill") == 0)
    assert num_chunks == 3
    line.assert_nothing_left()
