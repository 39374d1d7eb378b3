"""What every transport promises about queues: admission, order, claims, fences, handing back, dead letters.

Results and the join to decode are in test_transport_results.py and test_transport_join.py.
"""

import asyncio

import pytest

from pipeline.errors import UnknownRequest
from pipeline.transport import (
    Accepted,
    Busy,
    DeadLetter,
    Delivery,
    Emit,
    Exists,
    Finish,
    Outcome,
    Process,
    Publish,
    Transaction,
    Transport,
)
from tests.pipeline.benches import BRIEF_LEASE_S, Bench, soon, take, take_one


def publish(delivery: Delivery, request_id: str = "r", *, ack: bool = True, attempt: int = 0) -> Transaction:
    effects = (Publish("prefill", "interactive", b"tokenized"),)
    return Transaction(delivery, request_id, attempt, effects, ack)


def finish(delivery: Delivery, request_id: str = "r") -> Transaction:
    return Transaction(delivery, request_id, 0, (Finish(b"end", "finished"),), ack=True)


async def admitted(transport: Transport, request_id: str = "r") -> None:
    assert await transport.admit(request_id, "interactive", b"work") == Accepted()


# Admission


async def test_an_admitted_request_reaches_the_tokenizer(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    assert (delivery.stage, delivery.payload, delivery.tries) == ("tokenizer", b"work", 1)
    assert delivery.consumer == transport.consumer
    assert await bench.state_of("r") == "queued"


async def test_an_id_is_admitted_once(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    assert await transport.admit("r", "batch", b"other") == Exists()
    assert await transport.queue_length("tokenizer", "interactive") == 1
    assert await transport.queue_length("tokenizer", "batch") == 0


async def test_the_id_of_a_finished_request_stays_taken(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    assert await transport.commit([finish(await take_one(transport, "tokenizer"))]) == [Outcome.OK]
    assert await transport.admit("r", "interactive", b"again") == Exists()


async def test_the_door_closes_per_priority_while_the_queue_is_full(bench: Bench) -> None:
    transport = await bench.join(max_queue=2)
    for request_id in ("r", "s"):
        await admitted(transport, request_id)
    refusal = await transport.admit("t", "interactive", b"work")
    assert isinstance(refusal, Busy)
    assert refusal.retry_after_s > 0
    assert await bench.state_of("t") is None
    assert await transport.admit("t", "batch", b"work") == Accepted()


async def test_work_in_front_of_prefill_counts_for_the_door(bench: Bench) -> None:
    transport = await bench.join(max_queue=1)
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    assert await transport.commit([publish(delivery)]) == [Outcome.OK]
    assert isinstance(await transport.admit("s", "interactive", b"work"), Busy)
    delivery = await take_one(transport, "prefill")
    assert await transport.commit([finish(delivery)]) == [Outcome.OK]
    await admitted(transport, "s")


# Receiving


async def test_interactive_comes_before_batch_and_each_in_order(bench: Bench) -> None:
    transport = await bench.join()
    for name in ("b1", "b2"):
        await transport.admit(name, "batch", name.encode())
    for name in ("i1", "i2"):
        await transport.admit(name, "interactive", name.encode())
    first = await transport.receive("tokenizer", 3, block_s=0)
    rest = await transport.receive("tokenizer", 3, block_s=0)
    assert [d.payload for d in (*first, *rest)] == [b"i1", b"i2", b"b1", b"b2"]
    assert len(first) == 3


async def test_no_more_than_max_items_are_taken_after_a_wait(bench: Bench) -> None:
    transport = await bench.join()
    waiting = asyncio.create_task(transport.receive("tokenizer", 1, block_s=10))
    await transport.admit("b", "batch", b"b")
    await transport.admit("i", "interactive", b"i")
    assert len(await soon(waiting)) == 1


async def test_a_waiting_receiver_wakes_up(bench: Bench) -> None:
    transport = await bench.join()
    assert await transport.receive("tokenizer", 1, block_s=0) == []
    waiting = asyncio.create_task(transport.receive("tokenizer", 1, block_s=30))
    await admitted(transport)
    assert len(await soon(waiting)) == 1


async def test_receiving_gives_up_after_its_time(bench: Bench) -> None:
    transport = await bench.join()
    assert await soon(transport.receive("tokenizer", 1, block_s=0.02)) == []


async def test_consumers_share_a_queue(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b")
    for request_id in ("r", "s"):
        await admitted(a, request_id)
    (one,) = await a.receive("tokenizer", 1, block_s=0)
    (other,) = await b.receive("tokenizer", 5, block_s=0)
    assert one.entry_id != other.entry_id
    assert one.nonce != other.nonce


async def test_asking_for_nothing_is_a_mistake(bench: Bench) -> None:
    transport = await bench.join()
    with pytest.raises(ValueError, match="max_items"):
        await transport.receive("tokenizer", 0, block_s=0)


# Claims


async def test_an_expired_lease_passes_to_another_consumer(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b", lease_s=BRIEF_LEASE_S)
    await admitted(a)
    old = await take_one(a, "tokenizer")
    new = await take_one(b, "tokenizer")
    assert (new.entry_id, new.payload, new.tries) == (old.entry_id, old.payload, 2)

    assert await a.renew([old]) == [False]
    assert await a.commit([publish(old)]) == [Outcome.FENCED]
    assert await a.queue_length("prefill", "interactive") == 0
    assert await b.renew([new]) == [True]
    assert await b.commit([publish(new)]) == [Outcome.OK]
    assert await b.queue_length("prefill", "interactive") == 1


async def test_a_lost_holder_learns_that_the_work_is_done(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b", lease_s=BRIEF_LEASE_S)
    await admitted(a)
    old = await take_one(a, "tokenizer")
    new = await take_one(b, "tokenizer")
    assert await b.commit([publish(new)]) == [Outcome.OK]
    assert await a.renew([old]) == [False]
    assert await a.commit([publish(old)]) == [Outcome.ALREADY]
    assert await a.queue_length("prefill", "interactive") == 1


async def test_the_same_consumer_can_lose_an_entry_to_itself(bench: Bench) -> None:
    transport = await bench.join("a", lease_s=BRIEF_LEASE_S)
    await admitted(transport)
    old = await take_one(transport, "tokenizer")
    new = await take_one(transport, "tokenizer")
    assert await transport.commit([publish(old)]) == [Outcome.FENCED]
    assert await transport.commit([publish(new)]) == [Outcome.OK]


async def test_every_take_over_counts_as_a_try(bench: Bench) -> None:
    transport = await bench.join(lease_s=BRIEF_LEASE_S)
    await admitted(transport)
    assert [(await take_one(transport, "tokenizer")).tries for _ in range(3)] == [1, 2, 3]


async def test_a_commit_sent_twice_happens_once(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    transaction = publish(await take_one(transport, "tokenizer"))
    assert await transport.commit([transaction]) == [Outcome.OK]
    assert await transport.commit([transaction]) == [Outcome.ALREADY]
    assert await transport.queue_length("prefill", "interactive") == 1


async def test_a_commit_without_ack_keeps_the_lease(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    assert await transport.commit([publish(delivery, ack=False)]) == [Outcome.OK]
    assert await transport.commit([publish(delivery, ack=False)]) == [Outcome.OK]
    assert await transport.renew([delivery]) == [True]
    assert await transport.queue_length("prefill", "interactive") == 2
    assert await transport.queue_length("tokenizer", "interactive") == 1


async def test_only_the_attempt_that_was_admitted_is_committed_and_an_older_one_ends(bench: Bench) -> None:
    transport, admitted_at = await bench.join(), 1_764_470_000
    assert await transport.admit("r", "interactive", b"work", admitted_at) == Accepted()
    delivery = await take_one(transport, "tokenizer")
    attempts = [admitted_at + 1, admitted_at, admitted_at - 1, admitted_at]
    outcomes = await transport.commit([publish(delivery, ack=False, attempt=attempt) for attempt in attempts])
    assert outcomes == [Outcome.FENCED, Outcome.OK, Outcome.FENCED, Outcome.ALREADY]
    assert await transport.queue_length("tokenizer", "interactive") == 0
    assert await transport.queue_length("prefill", "interactive") == 1


async def test_another_attempt_is_fenced(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    assert await transport.commit([publish(delivery, attempt=1)]) == [Outcome.FENCED]
    assert await transport.renew([delivery]) == [True]


async def test_an_entry_of_an_unknown_request_is_removed(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    assert await transport.commit([publish(delivery, "other", ack=False)]) == [Outcome.GONE]
    assert await transport.queue_length("tokenizer", "interactive") == 0
    assert await transport.queue_length("prefill", "interactive") == 0


async def test_an_entry_of_an_ended_request_is_removed(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    await transport.commit([publish(delivery, ack=False)])
    queued = await take_one(transport, "prefill")
    assert await transport.commit([finish(delivery)]) == [Outcome.OK]
    assert await transport.commit([publish(queued, ack=False)]) == [Outcome.GONE]
    assert await bench.leftovers() == []


# Batches of transactions


async def test_a_refused_transaction_does_not_touch_the_others(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b", lease_s=BRIEF_LEASE_S)
    for request_id in ("r", "s", "t", "u"):
        await admitted(a, request_id)
    lost, mismatch, unknown, fine = await take(a, "tokenizer", 4)
    await take_one(b, "tokenizer")
    (last,) = [d for d in (lost, mismatch, unknown, fine) if not (await a.renew([d]))[0]][:1]
    assert last == lost

    outcomes = await a.commit(
        [
            publish(lost, "r"),
            Transaction(mismatch, "s", 0, (Publish("prefill", "batch", b"no"), Emit(b"x", 1, 1)), ack=True),
            publish(unknown, "nobody"),
            publish(fine, "u"),
        ]
    )
    assert outcomes == [Outcome.FENCED, Outcome.FENCED, Outcome.GONE, Outcome.OK]
    assert await a.queue_length("prefill", "interactive") == 1
    assert await a.queue_length("prefill", "batch") == 0
    assert await a.read_results("s", 0, block_s=0) == []


async def test_transactions_of_one_call_see_each_other(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    emits = [Transaction(delivery, "r", 0, (Emit(b"x", i, 1),), ack=False) for i in (0, 1, 1)]
    assert await transport.commit([*emits, finish(delivery), finish(delivery)]) == [
        Outcome.OK,
        Outcome.OK,
        Outcome.FENCED,
        Outcome.OK,
        Outcome.ALREADY,
    ]


async def test_nothing_to_do_needs_no_answer(bench: Bench) -> None:
    transport = await bench.join()
    assert await transport.commit([]) == []
    assert await transport.renew([]) == []
    await transport.hand_back([])


# Handing back and dead letters


async def test_what_is_handed_back_is_free_at_once_and_no_try(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b")
    for request_id in ("r", "s"):
        await admitted(a, request_id)
    given, kept = await take(a, "tokenizer", 2)
    await a.hand_back([given])
    (delivery,) = await b.receive("tokenizer", 5, block_s=0)
    assert (delivery.entry_id, delivery.tries) == (given.entry_id, 1)
    assert await a.renew([given, kept]) == [False, True]
    assert await a.commit([publish(given)]) == [Outcome.FENCED]
    assert await b.commit([publish(delivery)]) == [Outcome.OK]


async def test_what_is_handed_back_comes_before_what_is_new(bench: Bench) -> None:
    transport = await bench.join()
    for request_id in ("r", "s", "t"):
        await transport.admit(request_id, "interactive", request_id.encode())
    taken = await take(transport, "tokenizer", 2)
    await transport.hand_back(taken)
    again = await transport.receive("tokenizer", 3, block_s=0)
    assert [d.payload for d in again] == [b"r", b"s", b"t"]


async def test_handing_back_a_lost_entry_leaves_its_holder_alone(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b", lease_s=BRIEF_LEASE_S)
    await admitted(a)
    old = await take_one(a, "tokenizer")
    new = await take_one(b, "tokenizer")
    await a.hand_back([old])
    await a.hand_back([old])
    assert await b.renew([new]) == [True]
    assert await b.commit([publish(new)]) == [Outcome.OK]


async def test_a_dead_letter_leaves_the_queue(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    await transport.dead_letter(delivery, "unreadable")
    await transport.dead_letter(delivery, "unreadable")
    assert await bench.dead_letters("tokenizer") == [(b"work", "unreadable")]
    assert await transport.queue_length("tokenizer", "interactive") == 0
    assert await transport.commit([publish(delivery)]) == [Outcome.ALREADY]


async def test_only_the_holder_can_bury_an_entry(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b", lease_s=BRIEF_LEASE_S)
    await admitted(a)
    old = await take_one(a, "tokenizer")
    new = await take_one(b, "tokenizer")
    await a.dead_letter(old, "not mine")
    assert await bench.dead_letters("tokenizer") == []
    assert await b.renew([new]) == [True]


async def test_a_request_fails_and_its_entry_is_buried_together(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    delivery = await take_one(transport, "tokenizer")
    effects = (Finish(b"failure", "failed"), DeadLetter("crashed 5 times"))
    assert await transport.commit([Transaction(delivery, "r", 0, effects, ack=True)]) == [Outcome.OK]
    assert await bench.dead_letters("tokenizer") == [(b"work", "crashed 5 times")]
    assert await bench.state_of("r") == "failed"
    assert [entry.data for entry in await transport.read_results("r", 0, block_s=0)] == [b"failure"]
    assert await bench.leftovers() == []


# Processes


async def test_processes_are_listed_until_they_leave(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b:1")
    await b.register("decode", b"old", ttl_s=60)
    await b.register("decode", b"ready", ttl_s=60)
    await a.register("compressor", b"starting", ttl_s=60)
    both = [Process("compressor", "a", b"starting"), Process("decode", "b:1", b"ready")]
    assert await a.processes() == both
    await b.close()
    assert await a.processes() == both[:1]


async def test_a_registration_runs_out(bench: Bench) -> None:
    transport = await bench.join()
    await transport.register("decode", b"ready", ttl_s=0.001)

    async def gone() -> None:
        while await transport.processes():
            pass

    await soon(gone())


# A whole life


async def test_nothing_is_left_of_a_request_that_failed_early(bench: Bench) -> None:
    transport = await bench.join()
    await admitted(transport)
    assert await bench.leftovers() != []
    await transport.commit([finish(await take_one(transport, "tokenizer"))])
    assert await bench.leftovers() == []


async def test_an_unknown_request_has_no_results_to_wait_for(bench: Bench) -> None:
    transport = await bench.join()
    with pytest.raises(UnknownRequest, match="nobody"):
        await soon(transport.read_results("nobody", 0, block_s=30))
