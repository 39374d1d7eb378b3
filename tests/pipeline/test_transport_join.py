"""What every transport promises about the join: decode gets a request once, when all of it is there."""

from itertools import permutations

import pytest

from pipeline.transport import (
    AddChunk,
    Delivery,
    Effect,
    Finish,
    GiveCredit,
    Outcome,
    Plan,
    Publish,
    Restart,
    TakeCredit,
    Transaction,
    Transport,
)
from tests.pipeline.benches import BRIEF_LEASE_S, Bench, take, take_one
from tests.pipeline.pools import join_pool

PLAN = Plan(3, "interactive", b"prefilled")
CHUNKS = tuple(AddChunk(index, b"ref %d" % index) for index in range(3))


async def running(transport: Transport, request_id: str = "r") -> Delivery:
    await transport.admit(request_id, "interactive", b"work")
    return await take_one(transport, "tokenizer")


def step(delivery: Delivery, *effects: Effect, request_id: str = "r") -> Transaction:
    return Transaction(delivery, request_id, 0, effects, ack=False)


async def decode_entries(transport: Transport) -> int:
    lengths = [await transport.queue_length("decode", priority) for priority in ("interactive", "batch")]
    return sum(lengths)


@pytest.mark.parametrize("order", list(permutations((PLAN, *CHUNKS))), ids=str)
async def test_the_last_part_joins_in_any_order(bench: Bench, order: tuple[Effect, ...]) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    for effect in order:
        assert await decode_entries(transport) == 0
        assert await transport.commit([step(delivery, effect)]) == [Outcome.OK]
    assert [d.payload for d in await transport.receive("decode", 5, block_s=0)] == [b"prefilled"]
    assert await transport.chunks("r", 0) == {0: b"ref 0", 1: b"ref 1", 2: b"ref 2"}


@pytest.mark.parametrize("order", [(PLAN, *CHUNKS), (*CHUNKS, PLAN)], ids=["plan first", "plan last"])
async def test_all_parts_in_one_call_join_once(bench: Bench, order: tuple[Effect, ...]) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    assert await transport.commit([step(delivery, effect) for effect in order]) == [Outcome.OK] * 4
    assert await decode_entries(transport) == 1

    other = await running(transport, "s")
    assert await transport.commit([step(other, *order, request_id="s")]) == [Outcome.OK]
    assert await decode_entries(transport) == 2


async def test_parts_that_come_again_do_not_join_again(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    assert await transport.commit([step(delivery, CHUNKS[1])]) == [Outcome.OK]
    assert await transport.commit([step(delivery, CHUNKS[1])]) == [Outcome.OK]
    assert await decode_entries(transport) == 0
    await transport.commit([step(delivery, *CHUNKS, PLAN)])
    assert await decode_entries(transport) == 1
    assert await transport.commit([step(delivery, CHUNKS[1])]) == [Outcome.OK]
    assert await transport.commit([step(delivery, *CHUNKS, PLAN)]) == [Outcome.OK]
    assert await transport.commit([step(delivery, Plan(1, "batch", b"other"))]) == [Outcome.OK]
    assert await decode_entries(transport) == 1


async def test_a_chunk_takes_the_place_of_an_earlier_one(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([step(delivery, CHUNKS[0], CHUNKS[1])])
    again = AddChunk(1, b"another blob of chunk 1")
    assert await transport.commit([step(delivery, again)]) == [Outcome.OK]
    assert await transport.chunks("r", 0) == {0: b"ref 0", 1: again.ref}
    await transport.commit([step(delivery, CHUNKS[2], PLAN)])
    assert await transport.commit([step(delivery, CHUNKS[1])]) == [Outcome.OK]
    assert await transport.chunks("r", 0) == {0: b"ref 0", 1: b"ref 1", 2: b"ref 2"}
    assert await decode_entries(transport) == 1


async def test_a_substitute_completes_a_plan_and_takes_nobodys_place(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    substitute = AddChunk(1, b"nothing to read", substitute=True)
    assert await transport.commit([step(delivery, CHUNKS[0], substitute, PLAN)]) == [Outcome.OK]
    assert await transport.commit([step(delivery, substitute)]) == [Outcome.OK]
    assert await transport.commit([step(delivery, AddChunk(1, b"another", substitute=True))]) == [Outcome.DUPLICATE]
    assert await transport.chunks("r", 0) == {0: b"ref 0", 1: b"nothing to read"}
    assert await decode_entries(transport) == 0
    assert await transport.commit([step(delivery, CHUNKS[1])]) == [Outcome.OK]
    assert await transport.commit([step(delivery, substitute)]) == [Outcome.DUPLICATE]
    assert await transport.chunks("r", 0) == {0: b"ref 0", 1: b"ref 1"}
    assert await transport.commit([step(delivery, AddChunk(2, b"2", substitute=True))]) == [Outcome.OK]
    assert await decode_entries(transport) == 1


async def test_the_first_plan_stays(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([step(delivery, PLAN), step(delivery, Plan(1, "batch", b"other"))])
    await transport.commit([step(delivery, CHUNKS[0])])
    assert await decode_entries(transport) == 0
    await transport.commit([step(delivery, *CHUNKS)])
    assert (await take_one(transport, "decode")).payload == b"prefilled"


async def test_a_chunk_outside_the_plan_completes_nothing(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    effects = (AddChunk(0, b"0"), AddChunk(2, b"2"), AddChunk(7, b"7"), PLAN)
    await transport.commit([step(delivery, *effects)])
    assert await decode_entries(transport) == 0
    await transport.commit([step(delivery, AddChunk(1, b"1"))])
    assert await decode_entries(transport) == 1


async def test_chunks_and_plan_come_from_two_stages(bench: Bench) -> None:
    """Prefill publishes chunks without acknowledging, then plans; compressors commit chunks in between."""
    prefill, one, two = await bench.join("p"), await bench.join("c1"), await bench.join("c2")
    delivery = await running(prefill)
    for index in range(2):
        raw = Publish("compressor", "batch", b"%d" % index)
        assert await prefill.commit([step(delivery, raw)]) == [Outcome.OK]
    first = await take_one(one, "compressor")
    second = await take_one(two, "compressor")
    done = Transaction(second, "r", 0, (AddChunk(1, b"b"),), ack=True)
    assert await two.commit([done]) == [Outcome.OK]
    planned = Transaction(delivery, "r", 0, (Plan(2, "batch", b"prefilled"),), ack=True)
    assert await prefill.commit([planned]) == [Outcome.OK]
    assert await decode_entries(prefill) == 0
    done = Transaction(first, "r", 0, (AddChunk(0, b"a"),), ack=True)
    assert await one.commit([done]) == [Outcome.OK]
    assert await one.commit([done]) == [Outcome.ALREADY]
    assert await prefill.queue_length("decode", "batch") == 1
    assert await prefill.queue_length("decode", "interactive") == 0


async def test_chunks_of_an_ended_request_are_not_kept(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    raws = tuple(Publish("compressor", "interactive", b"raw") for _ in range(2))
    await transport.commit([step(delivery, *raws)])
    early, late = await take(transport, "compressor", 2)
    early_chunk = Transaction(early, "r", 0, (AddChunk(0, b"0"),), ack=True)
    late_chunk = Transaction(late, "r", 0, (AddChunk(1, b"1"),), ack=True)
    assert await transport.commit([early_chunk]) == [Outcome.OK]
    end = Transaction(delivery, "r", 0, (Finish(b"end", "finished"),), ack=True)
    assert await transport.commit([end]) == [Outcome.OK]
    assert await transport.commit([late_chunk]) == [Outcome.GONE]
    assert await transport.chunks("r", 0) == {}
    assert await transport.queue_length("compressor", "interactive") == 0
    assert await bench.leftovers() == []


async def test_a_joined_request_leaves_nothing_when_decode_ends_it(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    joined = Transaction(delivery, "r", 0, (*CHUNKS, PLAN), ack=True)
    assert await transport.commit([joined]) == [Outcome.OK]
    decode = await take_one(transport, "decode")
    end = Transaction(decode, "r", 0, (Finish(b"end", "finished"),), ack=True)
    assert await transport.commit([end]) == [Outcome.OK]
    assert await transport.chunks("r", 0) == {}
    assert await bench.leftovers() == []


async def test_a_plan_that_is_never_joined_goes_with_the_request(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([step(delivery, PLAN)])
    end = Transaction(delivery, "r", 0, (Finish(b"end", "failed"),), ack=True)
    assert await transport.commit([end]) == [Outcome.OK]
    assert await decode_entries(transport) == 0
    assert await bench.leftovers() == []


async def test_another_attempt_has_other_chunks(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([step(delivery, CHUNKS[0])])
    assert await transport.chunks("r", 1) == {}
    assert await transport.chunks("nobody", 0) == {}


# Under a new attempt


async def sent_back(transport: Transport, delivery: Delivery) -> Delivery:
    """The request's entry in front of prefill, under attempt 1."""
    restart = Transaction(delivery, "r", 0, (Restart(1, b"again"),), ack=True)
    assert await transport.commit([restart]) == [Outcome.OK]
    return await take_one(transport, "prefill")


def again(delivery: Delivery, *effects: Effect) -> Transaction:
    return Transaction(delivery, "r", 1, effects, ack=False)


async def test_a_request_that_goes_back_leaves_its_chunks_and_its_plan(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([step(delivery, *CHUNKS[:2], PLAN)])
    delivery = await sent_back(transport, delivery)
    assert [await transport.chunks("r", attempt) for attempt in (0, 1)] == [{}, {}]
    new = tuple(AddChunk(index, b"new %d" % index) for index in range(3))
    # The third one alone does not complete the old plan, nor do all of them without a plan of their own.
    for effect in reversed(new):
        assert await transport.commit([again(delivery, effect)]) == [Outcome.OK]
    assert await decode_entries(transport) == 0
    assert await transport.commit([again(delivery, Plan(3, "batch", b"new plan"))]) == [Outcome.OK]
    assert [d.payload for d in await transport.receive("decode", 5, block_s=0)] == [b"new plan"]
    assert await transport.chunks("r", 1) == {0: b"new 0", 1: b"new 1", 2: b"new 2"}
    assert await transport.chunks("r", 0) == {}


async def test_a_plan_under_the_new_attempt_waits_for_chunks_of_its_own(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([step(delivery, *CHUNKS)])
    delivery = await sent_back(transport, delivery)
    assert await transport.commit([again(delivery, Plan(1, "batch", b"new plan"))]) == [Outcome.OK]
    assert await decode_entries(transport) == 0
    assert await transport.commit([again(delivery, AddChunk(0, b"new"))]) == [Outcome.OK]
    assert await decode_entries(transport) == 1


async def test_decode_gets_a_request_once_under_each_attempt(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([Transaction(delivery, "r", 0, (*CHUNKS, PLAN), ack=True)])
    delivery = await sent_back(transport, await take_one(transport, "decode"))
    assert await decode_entries(transport) == 0
    parts = (*CHUNKS, Plan(3, "interactive", b"new plan"))
    assert await transport.commit([again(delivery, *parts), again(delivery, *parts)]) == [Outcome.OK] * 2
    assert [d.payload for d in await transport.receive("decode", 5, block_s=0)] == [b"new plan"]


async def test_chunks_of_the_old_attempt_come_too_late(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([step(delivery, Publish("compressor", "batch", b"raw"), CHUNKS[0])])
    late = await take_one(transport, "compressor")
    delivery = await sent_back(transport, delivery)
    await transport.commit([again(delivery, Plan(2, "batch", b"new plan"), AddChunk(0, b"new"))])
    sealed = Transaction(late, "r", 0, (AddChunk(1, b"old"),), ack=True)
    assert await transport.commit([sealed]) == [Outcome.FENCED]
    assert await decode_entries(transport) == 0
    assert [await transport.chunks("r", attempt) for attempt in (0, 1)] == [{}, {0: b"new"}]
    end = Transaction(delivery, "r", 1, (Finish(b"end", "failed"),), ack=True)
    assert await transport.commit([end]) == [Outcome.OK]
    assert await transport.chunks("r", 1) == {}
    assert await bench.leftovers() == []


# With a credit


CREDIT = TakeCredit(1, max_bytes=10, max_requests=9)


async def test_whoever_takes_credit_begins_the_prompt(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b", lease_s=BRIEF_LEASE_S)
    await a.commit([step(await running(a), CREDIT, *CHUNKS[:2], Plan(3, "batch", b"old plan"))])
    delivery = await take_one(b, "tokenizer")
    assert await b.commit([step(delivery, CREDIT)]) == [Outcome.OK]
    assert await b.chunks("r", 0) == {}
    assert await b.commit([step(delivery, *CHUNKS)]) == [Outcome.OK]
    assert await decode_entries(b) == 0
    assert await b.commit([step(delivery, PLAN)]) == [Outcome.OK]
    assert [d.payload for d in await b.receive("decode", 5, block_s=0)] == [b"prefilled"]


async def test_what_decode_has_got_under_an_attempt_does_not_begin_again(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await running(transport)
    await transport.commit([step(delivery, CREDIT, *CHUNKS, PLAN)])
    assert await transport.commit([step(delivery, CREDIT)]) == [Outcome.OK]
    assert await transport.chunks("r", 0) == {0: b"ref 0", 1: b"ref 1", 2: b"ref 2"}
    assert await transport.commit([step(delivery, *CHUNKS, PLAN)]) == [Outcome.OK]
    assert await decode_entries(transport) == 1


async def test_chunks_in_another_pool_than_that_of_the_credit_are_not_stored(bench: Bench) -> None:
    here, there = await bench.join("here"), await join_pool(bench, "pool-2")
    delivery = await running(here)
    await here.commit([step(delivery, CREDIT, Plan(1, "batch", b"prefilled"))])
    await there.admit("s", "interactive", b"work")
    other = await take_one(there, "tokenizer")
    lost = Transaction(other, "r", 0, (AddChunk(0, b"from there"),), ack=True)
    assert await there.commit([lost]) == [Outcome.DUPLICATE]
    assert await here.chunks("r", 0) == {}
    assert await decode_entries(here) == 0
    assert await here.commit([step(delivery, AddChunk(0, b"from here"))]) == [Outcome.OK]
    assert await here.chunks("r", 0) == {0: b"from here"}
    assert await decode_entries(here) == 1


async def test_chunks_of_a_request_without_credit_are_stored_wherever_they_come_from(bench: Bench) -> None:
    here, there = await bench.join("here"), await join_pool(bench, "pool-2")
    delivery = await running(here)
    assert await here.commit([step(delivery, CREDIT, GiveCredit())]) == [Outcome.OK]
    await there.admit("s", "interactive", b"work")
    other = await take_one(there, "tokenizer")
    chunk = Transaction(other, "r", 0, (AddChunk(0, b"from there"),), ack=True)
    assert await there.commit([chunk]) == [Outcome.OK]
    assert await here.chunks("r", 0) == {0: b"from there"}
