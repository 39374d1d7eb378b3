"""What every transport promises about results: deltas in order, one end, readable from anywhere."""

import asyncio

import pytest

from pipeline.transport import AddChunk, Delivery, Emit, Finish, Outcome, Plan, ResultEntry, Transaction, Transport
from tests.pipeline.benches import BRIEF_LEASE_S, Bench, soon, take_one


async def running(transport: Transport) -> Delivery:
    await transport.admit("r", "interactive", b"work")
    return await take_one(transport, "tokenizer")


def emit(delivery: Delivery, *emits: Emit, end: bytes | None = None) -> Transaction:
    ends = () if end is None else (Finish(end, "finished"),)
    return Transaction(delivery, "r", 0, (*emits, *ends), ack=end is not None)


async def test_deltas_are_read_in_order_with_their_offsets(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    assert await transport.commit([emit(delivery, Emit(b"a", 0, 1))]) == [Outcome.OK]
    assert await transport.commit([emit(delivery, Emit(b"b", 1, 3), Emit(b"c", 4, 1))]) == [Outcome.OK]
    entries = await transport.read_results("r", 0, block_s=0)
    assert entries == [ResultEntry(1, b"a"), ResultEntry(4, b"b"), ResultEntry(5, b"c")]


@pytest.mark.parametrize("first_index", [0, 1, 3, 100])
async def test_a_delta_that_does_not_follow_is_fenced(bench: Bench, first_index: int) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([emit(delivery, Emit(b"a", 0, 2))])
    assert await transport.commit([emit(delivery, Emit(b"b", first_index, 1))]) == [Outcome.FENCED]
    assert await transport.read_results("r", 0, block_s=0) == [ResultEntry(2, b"a")]
    assert await transport.commit([emit(delivery, Emit(b"b", 2, 1))]) == [Outcome.OK]


async def test_one_wrong_delta_refuses_all_of_its_transaction(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    refused = emit(delivery, Emit(b"a", 0, 2), Emit(b"b", 3, 1), end=b"end")
    assert await transport.commit([refused]) == [Outcome.FENCED]
    assert await transport.read_results("r", 0, block_s=0) == []
    assert await bench.state_of("r") == "queued"


async def test_a_taken_over_request_goes_on_where_it_was(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b", lease_s=BRIEF_LEASE_S)
    old = await running(a)
    await a.commit([emit(old, Emit(b"a", 0, 1))])
    new = await take_one(b, "tokenizer")
    assert await b.commit([emit(new, Emit(b"b", 1, 1))]) == [Outcome.OK]
    assert await a.commit([emit(old, Emit(b"b", 1, 1))]) == [Outcome.FENCED]
    assert await a.commit([emit(old, Emit(b"b", 2, 1))]) == [Outcome.FENCED]
    assert await a.read_results("r", 0, block_s=0) == [ResultEntry(1, b"a"), ResultEntry(2, b"b")]


async def test_progress_takes_back_the_tries(bench: Bench) -> None:
    transport = await bench.join(lease_s=BRIEF_LEASE_S)
    await running(transport)
    delivery = await take_one(transport, "tokenizer")
    assert delivery.tries == 2
    assert await transport.commit([emit(delivery, Emit(b"a", 0, 1))]) == [Outcome.OK]
    assert (await take_one(transport, "tokenizer")).tries == 2


async def test_a_request_ends_once(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    end = Transaction(delivery, "r", 0, (Emit(b"a", 0, 1), Finish(b"end", "finished")), ack=False)
    assert await transport.commit([end]) == [Outcome.OK]
    other = Transaction(delivery, "r", 0, (Finish(b"second end", "failed"),), ack=True)
    assert await transport.commit([other]) == [Outcome.GONE]
    entries = await transport.read_results("r", 0, block_s=0)
    assert entries == [ResultEntry(1, b"a"), ResultEntry(None, b"end")]
    assert await bench.state_of("r") == "finished"
    assert await bench.leftovers() == []


async def test_nothing_is_emitted_after_the_end(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([Transaction(delivery, "r", 0, (Finish(b"end", "cancelled"),), ack=False)])
    assert await transport.commit([emit(delivery, Emit(b"a", 0, 1))]) == [Outcome.GONE]
    assert await transport.read_results("r", 0, block_s=0) == [ResultEntry(None, b"end")]
    assert await bench.state_of("r") == "cancelled"


@pytest.mark.parametrize(("after", "offsets"), [(0, [2, 5, None]), (2, [5, None]), (3, [5, None]), (5, [None])])
async def test_results_are_read_from_any_offset(bench: Bench, after: int, offsets: list[int | None]) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([emit(delivery, Emit(b"a", 0, 2), Emit(b"b", 2, 3), end=b"end")])
    for _ in range(2):  # as often as one likes
        assert [entry.offset for entry in await transport.read_results("r", after, block_s=0)] == offsets


async def test_a_waiting_reader_gets_the_next_delta(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([emit(delivery, Emit(b"a", 0, 1))])
    waiting = asyncio.create_task(transport.read_results("r", 1, block_s=30))
    await transport.commit([emit(delivery, Emit(b"b", 1, 1))])
    assert await soon(waiting) == [ResultEntry(2, b"b")]


async def test_a_waiting_reader_gets_the_end(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    waiting = asyncio.create_task(transport.read_results("r", 0, block_s=30))
    await transport.commit([emit(delivery, end=b"end")])
    assert await soon(waiting) == [ResultEntry(None, b"end")]


async def test_reading_gives_up_after_its_time(bench: Bench) -> None:
    transport = await bench.join()
    await running(transport)
    assert await soon(transport.read_results("r", 0, block_s=0.02)) == []


async def test_a_long_result_is_read_to_its_end(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    num_deltas = 1100
    deltas = [Emit(str(i).encode(), i, 1) for i in range(num_deltas)]
    await transport.commit([emit(delivery, *deltas, end=b"end")])
    offsets: list[int | None] = []
    while None not in offsets:
        after = offsets[-1] if offsets else 0
        assert after is not None
        offsets += [entry.offset for entry in await transport.read_results("r", after, block_s=0)]
    assert offsets == [*range(1, num_deltas + 1), None]


async def test_impossible_effects_are_refused_where_they_are_made(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    with pytest.raises(ValueError, match="emit"):
        Emit(b"", 0, 0)
    with pytest.raises(ValueError, match="negative"):
        AddChunk(-1, b"")
    with pytest.raises(ValueError, match="never completes"):
        Plan(0, "batch", b"")
    with pytest.raises(ValueError, match="only a dead letter"):
        Transaction(delivery, "r", 0, (Finish(b"", "failed"), Emit(b"", 0, 1)), ack=True)
    with pytest.raises(ValueError, match="hand it on"):
        Transaction(delivery, "r", 0, (Plan(1, "batch", b""), Finish(b"", "failed")), ack=True)
