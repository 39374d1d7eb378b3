"""What every transport promises about queues: admission, order, claims, fences, handing back, dead letters, credits,
and the way back to prefill.

Results and the join to decode are in test_transport_results.py and test_transport_join.py.
"""

import asyncio
from typing import Any

import pytest

from pipeline.errors import UnknownRequest
from pipeline.transport import (
    Accepted,
    AddChunk,
    Busy,
    DeadLetter,
    Delivery,
    Effect,
    Emit,
    Exists,
    Finish,
    GiveCredit,
    Outcome,
    Plan,
    Process,
    Publish,
    Restart,
    ResultEntry,
    TakeCredit,
    Transaction,
    Transport,
)
from tests.pipeline.benches import BRIEF_LEASE_S, POOL, Bench, soon, take, take_one
from tests.pipeline.pools import credits_of, expire, join_pool


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


# Credits

OTHER_POOL = "pool-2"
MOST_BYTES = 10


def credit(num_bytes: int, max_requests: int = 9) -> TakeCredit:
    return TakeCredit(num_bytes, MOST_BYTES, max_requests)


def step(
    delivery: Delivery, *effects: Effect, request_id: str = "r", attempt: int = 0, ack: bool = False
) -> Transaction:
    return Transaction(delivery, request_id, attempt, effects, ack)


async def commit_one(transport: Transport, delivery: Delivery, *effects: Effect, **options: Any) -> Outcome:
    [outcome] = await transport.commit([step(delivery, *effects, **options)])
    return outcome


async def held(transport: Transport, request_id: str = "r") -> Delivery:
    """A request that prefill has in hand."""
    await admitted(transport, request_id)
    tokenized = Publish("prefill", "interactive", request_id.encode())
    tokenizer = await take_one(transport, "tokenizer")
    assert await commit_one(transport, tokenizer, tokenized, request_id=request_id, ack=True) == Outcome.OK
    return await take_one(transport, "prefill")


async def test_credits_are_taken_while_the_pool_has_bytes(bench: Bench) -> None:
    transport = await bench.join()
    for request_id, num_bytes, outcome in (("r", 6, "ok"), ("s", 5, "full"), ("t", 4, "ok"), ("u", 1, "full")):
        delivery = await held(transport, request_id)
        assert await commit_one(transport, delivery, credit(num_bytes), request_id=request_id) == outcome
    assert await credits_of(bench, POOL) == {"r": (0, 6), "t": (0, 4)}


async def test_credits_are_taken_while_the_pool_has_places(bench: Bench) -> None:
    transport = await bench.join()
    for request_id, outcome in (("r", "ok"), ("s", "ok"), ("t", "full")):
        delivery = await held(transport, request_id)
        assert await commit_one(transport, delivery, credit(1, max_requests=2), request_id=request_id) == outcome
    assert await commit_one(transport, delivery, credit(1, max_requests=3), request_id="t") == Outcome.OK
    assert await credits_of(bench, POOL) == {"r": (0, 1), "s": (0, 1), "t": (0, 1)}


async def test_a_pool_that_may_hold_nothing_has_no_credit(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await held(transport)
    assert await commit_one(transport, delivery, credit(1, max_requests=0)) == Outcome.FULL
    assert await commit_one(transport, delivery, credit(MOST_BYTES + 1)) == Outcome.FULL
    assert await credits_of(bench, POOL) == {}


async def test_what_finds_no_room_changes_nothing(bench: Bench) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    assert await commit_one(transport, r, credit(4)) == Outcome.OK
    assert await commit_one(transport, s, credit(6), request_id="s") == Outcome.OK
    effects = (Publish("prefill", "interactive", b"no"), credit(5), Emit(b"no", 0, 1))
    refused, fine = step(r, *effects, ack=True), step(r, Publish("prefill", "batch", b"yes"))
    assert await transport.commit([refused, fine]) == [Outcome.FULL, Outcome.OK]
    assert await credits_of(bench, POOL) == {"r": (0, 4), "s": (0, 6)}
    assert await transport.renew([r]) == [True]
    assert await transport.read_results("r", 0, block_s=0) == []
    assert [d.payload for d in await transport.receive("prefill", 9, block_s=0)] == [b"yes"]


async def test_a_credit_that_is_large_enough_is_enough_whatever_the_bounds_are_now(bench: Bench) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    assert await commit_one(transport, r, credit(5)) == Outcome.OK
    assert await commit_one(transport, s, credit(5), request_id="s") == Outcome.OK
    for num_bytes, outcome in ((5, "ok"), (6, "full"), (4, "ok"), (5, "full")):
        assert await commit_one(transport, r, TakeCredit(num_bytes, max_bytes=1, max_requests=0)) == outcome
    assert await credits_of(bench, POOL) == {"r": (0, 4), "s": (0, 5)}


async def test_a_credit_that_is_taken_again_is_replaced_and_does_not_count_against_itself(bench: Bench) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    for num_bytes in (6, 10, 10, 3):
        assert await commit_one(transport, r, credit(num_bytes, max_requests=1)) == Outcome.OK
        assert await credits_of(bench, POOL) == {"r": (0, num_bytes)}
        assert await commit_one(transport, s, credit(1, max_requests=1), request_id="s") == Outcome.FULL
    assert await commit_one(transport, s, credit(8), request_id="s") == Outcome.FULL
    assert await commit_one(transport, s, credit(7), request_id="s") == Outcome.OK


@pytest.mark.parametrize(
    "end",
    [
        (GiveCredit(),),
        (Finish(b"end", "finished"),),
        (Finish(b"end", "failed"), DeadLetter("crashed 5 times")),
        (credit(2), Finish(b"end", "finished")),
    ],
    ids=["given back", "finished", "failed and buried", "taken at the end"],
)
async def test_a_credit_ends_when_it_is_given_back_and_with_its_request(bench: Bench, end: tuple[Effect, ...]) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    assert await commit_one(transport, r, credit(MOST_BYTES)) == Outcome.OK
    assert await commit_one(transport, s, credit(1), request_id="s") == Outcome.FULL
    assert await commit_one(transport, r, *end) == Outcome.OK
    assert await commit_one(transport, s, credit(MOST_BYTES, max_requests=1), request_id="s") == Outcome.OK
    assert await credits_of(bench, POOL) == {"s": (0, MOST_BYTES)}


async def test_a_credit_ends_when_its_request_is_cancelled_and_is_not_taken_afterwards(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await held(transport)
    assert await commit_one(transport, delivery, credit(1)) == Outcome.OK
    assert await transport.cancel("r", b"cancelled") is True
    assert await credits_of(bench, POOL) == {}
    assert await commit_one(transport, delivery, credit(1)) == Outcome.GONE
    assert await credits_of(bench, POOL) == {}
    assert await bench.leftovers() == []


async def test_a_request_can_give_back_what_it_has_not(bench: Bench) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    assert await commit_one(transport, s, credit(1), request_id="s") == Outcome.OK
    assert await commit_one(transport, r, GiveCredit()) == Outcome.OK
    assert await commit_one(transport, s, GiveCredit(), GiveCredit(), request_id="s") == Outcome.OK
    assert await credits_of(bench, POOL) == {}


async def test_only_the_holder_under_the_current_attempt_changes_a_credit(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b", lease_s=BRIEF_LEASE_S)
    old = await held(a)
    new = await take_one(b, "prefill")
    assert await commit_one(a, old, credit(1)) == Outcome.FENCED
    assert await commit_one(b, new, credit(1), attempt=1) == Outcome.FENCED
    assert await credits_of(bench, POOL) == {}
    assert await commit_one(b, new, credit(2)) == Outcome.OK
    assert await commit_one(a, old, GiveCredit()) == Outcome.FENCED
    assert await credits_of(bench, POOL) == {"r": (0, 2)}


async def test_each_pool_has_room_of_its_own(bench: Bench) -> None:
    here, there = await bench.join("here"), await join_pool(bench, OTHER_POOL)
    r, s = await held(here, "r"), await held(there, "s")
    assert await commit_one(here, r, credit(MOST_BYTES, max_requests=1)) == Outcome.OK
    assert await commit_one(there, s, credit(MOST_BYTES, max_requests=1), request_id="s") == Outcome.OK
    assert await credits_of(bench, POOL) == {"r": (0, MOST_BYTES)}
    assert await credits_of(bench, OTHER_POOL) == {"s": (0, MOST_BYTES)}


async def test_a_request_that_goes_on_in_another_pool_takes_its_credit_along(bench: Bench) -> None:
    here, there = await bench.join("here"), await join_pool(bench, OTHER_POOL, lease_s=BRIEF_LEASE_S)
    old = await held(here)
    assert await commit_one(here, old, credit(4)) == Outcome.OK
    new = await take_one(there, "prefill")
    assert await commit_one(there, new, credit(5)) == Outcome.OK
    assert await credits_of(bench, POOL) == {}
    assert await credits_of(bench, OTHER_POOL) == {"r": (0, 5)}
    assert await commit_one(there, new, Finish(b"end", "finished"), ack=True) == Outcome.OK
    assert await credits_of(bench, OTHER_POOL) == {}
    assert await bench.leftovers() == []


async def test_a_move_to_a_full_pool_leaves_the_credit_where_it_is(bench: Bench) -> None:
    here, there = await bench.join("here"), await join_pool(bench, OTHER_POOL, lease_s=BRIEF_LEASE_S)
    assert await commit_one(here, await held(here), credit(4)) == Outcome.OK
    new = await take_one(there, "prefill")
    assert await commit_one(there, new, credit(MOST_BYTES + 1)) == Outcome.FULL
    assert await credits_of(bench, POOL) == {"r": (0, 4)}
    assert await credits_of(bench, OTHER_POOL) == {}


async def test_a_credit_is_given_back_from_wherever_its_request_is(bench: Bench) -> None:
    here, there = await bench.join("here"), await join_pool(bench, OTHER_POOL, lease_s=BRIEF_LEASE_S)
    assert await commit_one(here, await held(here), credit(4)) == Outcome.OK
    new = await take_one(there, "prefill")
    assert await commit_one(there, new, GiveCredit()) == Outcome.OK
    assert await credits_of(bench, POOL) == {}


async def let_go(bench: Bench, holder: Transport, delivery: Delivery, how: str) -> None:
    """Nobody works any more on what a request has its credit for."""
    if how == "handed back":
        await holder.hand_back([delivery])
    elif how == "acknowledged":
        assert await commit_one(holder, delivery, ack=True) == Outcome.OK
    elif how == "sent back":
        assert await restarted(holder, delivery) == Outcome.OK
    else:
        await expire(bench, delivery)


WAYS_TO_LET_GO = ["handed back", "acknowledged", "sent back", "its lease has ended"]


@pytest.mark.parametrize("how", WAYS_TO_LET_GO)
async def test_a_credit_whose_entry_nobody_works_on_makes_way_where_there_is_no_room(bench: Bench, how: str) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    assert await commit_one(transport, r, credit(6)) == Outcome.OK
    await let_go(bench, transport, r, how)
    attempt = 1 if how == "sent back" else 0
    assert await commit_one(transport, s, credit(4), request_id="s") == Outcome.OK  # there is room for both
    assert await credits_of(bench, POOL) == {"r": (attempt, 6), "s": (0, 4)}
    assert await commit_one(transport, s, credit(11), request_id="s") == Outcome.FULL  # there is none even without it
    assert await credits_of(bench, POOL) == {"r": (attempt, 6), "s": (0, 4)}
    assert await commit_one(transport, s, credit(5), request_id="s") == Outcome.OK
    assert await credits_of(bench, POOL) == {"s": (0, 5)}


async def test_whoever_comes_back_asks_again_for_a_credit_that_made_way(bench: Bench) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    assert await commit_one(transport, r, credit(6)) == Outcome.OK
    await transport.hand_back([r])
    assert await commit_one(transport, s, credit(6), request_id="s") == Outcome.OK
    again = await take_one(transport, "prefill")
    assert await commit_one(transport, again, credit(6)) == Outcome.FULL
    assert await commit_one(transport, again, GiveCredit()) == Outcome.OK
    assert await commit_one(transport, again, credit(4)) == Outcome.OK
    assert await credits_of(bench, POOL) == {"r": (0, 4), "s": (0, 6)}


async def test_a_holder_that_was_away_does_not_go_on_without_the_credit_that_made_way(bench: Bench) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    assert await commit_one(transport, r, credit(6)) == Outcome.OK
    await expire(bench, r)
    assert await commit_one(transport, s, credit(6), request_id="s") == Outcome.OK
    assert await transport.renew([r]) == [False]
    assert await commit_one(transport, r, AddChunk(0, b"sealed"), Plan(1, "batch", b"prefilled")) == Outcome.FENCED
    assert await transport.queue_length("decode", "batch") == 0
    again = (await take(transport, "prefill"))[0]
    assert (again.entry_id, again.tries) == (r.entry_id, 2)
    assert await commit_one(transport, again, credit(4)) == Outcome.OK


async def test_a_credit_whose_entry_was_taken_over_counts(bench: Bench) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    assert await commit_one(transport, r, credit(6)) == Outcome.OK
    await transport.hand_back([r])
    assert (await take_one(transport, "prefill")).entry_id == r.entry_id
    assert await commit_one(transport, s, credit(6), request_id="s") == Outcome.FULL


@pytest.mark.parametrize("how", WAYS_TO_LET_GO)
async def test_a_credit_counts_from_the_plan_on_whatever_happens_to_its_entry(bench: Bench, how: str) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    assert await commit_one(transport, r, credit(6), Plan(1, "batch", b"prefilled")) == Outcome.OK
    await let_go(bench, transport, r, how)
    # But a request that was sent back begins its prompt again.
    expected = Outcome.OK if how == "sent back" else Outcome.FULL
    assert await commit_one(transport, s, credit(6), request_id="s") == expected


# The way back to prefill


async def restarted(transport: Transport, delivery: Delivery, attempt: int = 1, *, under: int = 0) -> Outcome:
    restart = Restart(attempt, b"again %d" % attempt)
    return await commit_one(transport, delivery, restart, attempt=under, ack=True)


async def test_a_request_that_goes_back_is_served_before_what_waits(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await held(transport)
    waiting = (Publish("prefill", "batch", b"batch"), Publish("prefill", "interactive", b"interactive"))
    assert await commit_one(transport, delivery, *waiting) == Outcome.OK
    assert await restarted(transport, delivery) == Outcome.OK
    assert await transport.queue_length("prefill", "returned") == 1
    assert await transport.queue_length("tokenizer", "interactive") == 0
    received = await transport.receive("prefill", 3, block_s=0)
    assert [(d.payload, d.tries) for d in received] == [(b"again 1", 1), (b"interactive", 1), (b"batch", 1)]


async def test_a_waiting_prefill_wakes_up_for_what_goes_back(bench: Bench) -> None:
    transport, other = await bench.join("a"), await bench.join("b")
    delivery = await held(transport)
    assert await other.receive("prefill", 1, block_s=0) == []
    waiting = asyncio.create_task(other.receive("prefill", 1, block_s=30))
    assert await restarted(transport, delivery) == Outcome.OK
    assert [d.payload for d in await soon(waiting)] == [b"again 1"]


async def test_what_was_done_under_the_old_attempt_is_refused_and_its_entries_go(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await held(transport)
    raws = tuple(Publish("compressor", "interactive", b"raw %d" % index) for index in range(2))
    assert await commit_one(transport, delivery, *raws) == Outcome.OK
    taken = await take_one(transport, "compressor")
    assert await restarted(transport, delivery) == Outcome.OK
    assert await commit_one(transport, taken, AddChunk(0, b"old")) == Outcome.FENCED
    assert await commit_one(transport, await take_one(transport, "compressor"), ack=True) == Outcome.FENCED
    assert await transport.queue_length("compressor", "interactive") == 0
    again = await take_one(transport, "prefill")
    assert await commit_one(transport, again, Emit(b"old", 0, 1), attempt=0) == Outcome.FENCED
    assert await transport.queue_length("prefill", "returned") == 0
    assert await transport.read_results("r", 0, block_s=0) == []


async def test_tokens_that_are_out_stay_and_the_next_one_follows_them(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await held(transport)
    assert await commit_one(transport, delivery, Emit(b"a", 0, 1), Emit(b"b", 1, 2)) == Outcome.OK
    assert await restarted(transport, delivery) == Outcome.OK
    again = await take_one(transport, "prefill")
    assert await commit_one(transport, again, Emit(b"a", 0, 1), attempt=1) == Outcome.FENCED
    assert await commit_one(transport, again, Emit(b"c", 3, 1), attempt=1) == Outcome.OK
    entries = [ResultEntry(1, b"a"), ResultEntry(3, b"b"), ResultEntry(4, b"c")]
    assert await transport.read_results("r", 0, block_s=0) == entries


async def test_the_credit_goes_along_with_the_new_attempt(bench: Bench) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    assert await commit_one(transport, r, credit(6)) == Outcome.OK
    assert await commit_one(transport, s, credit(4), request_id="s") == Outcome.OK
    assert await restarted(transport, r) == Outcome.OK
    assert await credits_of(bench, POOL) == {"r": (1, 6), "s": (0, 4)}
    again = await take_one(transport, "prefill")
    assert await commit_one(transport, s, credit(5), request_id="s") == Outcome.FULL
    assert await commit_one(transport, again, credit(7), attempt=1) == Outcome.FULL
    assert await commit_one(transport, again, credit(5), attempt=1) == Outcome.OK
    assert await credits_of(bench, POOL) == {"r": (1, 5), "s": (0, 4)}
    assert await commit_one(transport, again, Finish(b"end", "finished"), attempt=1, ack=True) == Outcome.OK
    assert await credits_of(bench, POOL) == {"s": (0, 4)}


async def test_a_request_without_credit_goes_back_without(bench: Bench) -> None:
    transport = await bench.join()
    r, s = await held(transport, "r"), await held(transport, "s")
    assert await commit_one(transport, r, credit(1), GiveCredit()) == Outcome.OK
    assert await restarted(transport, r) == Outcome.OK
    assert await credits_of(bench, POOL) == {}
    assert await commit_one(transport, s, credit(MOST_BYTES), request_id="s") == Outcome.OK


async def test_a_credit_moves_to_the_pool_in_which_the_request_begins_again(bench: Bench) -> None:
    here, there = await bench.join("here"), await join_pool(bench, OTHER_POOL)
    delivery = await held(here)
    assert await commit_one(here, delivery, credit(4)) == Outcome.OK
    assert await restarted(here, delivery) == Outcome.OK
    assert await credits_of(bench, POOL) == {"r": (1, 4)}
    again = await take_one(there, "prefill")
    assert await commit_one(there, again, credit(4), attempt=1) == Outcome.OK
    assert await credits_of(bench, POOL) == {}
    assert await credits_of(bench, OTHER_POOL) == {"r": (1, 4)}


async def test_a_restart_that_is_sent_again_happens_once(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await held(transport)
    assert await restarted(transport, delivery) == Outcome.OK
    assert await restarted(transport, delivery) == Outcome.ALREADY
    assert await transport.queue_length("prefill", "returned") == 1


async def test_only_the_holder_sends_a_request_back(bench: Bench) -> None:
    a, b = await bench.join("a"), await bench.join("b", lease_s=BRIEF_LEASE_S)
    old = await held(a)
    new = await take_one(b, "prefill")
    assert await restarted(a, old) == Outcome.FENCED
    assert await restarted(b, new, 2, under=1) == Outcome.FENCED
    assert await a.queue_length("prefill", "returned") == 0
    assert await restarted(b, new) == Outcome.OK


async def test_a_request_that_was_cancelled_cannot_be_sent_back(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await held(transport)
    assert await commit_one(transport, delivery, credit(1)) == Outcome.OK
    assert await transport.cancel("r", b"cancelled") is True
    assert await restarted(transport, delivery) == Outcome.GONE
    assert await transport.queue_length("prefill", "returned") == 0
    assert await bench.leftovers() == []


async def test_a_request_that_was_sent_back_can_be_cancelled(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await held(transport)
    assert await commit_one(transport, delivery, credit(1), AddChunk(0, b"old")) == Outcome.OK
    assert await restarted(transport, delivery) == Outcome.OK
    again = await take_one(transport, "prefill")
    assert await commit_one(transport, again, AddChunk(0, b"new"), attempt=1) == Outcome.OK
    assert await transport.cancel("r", b"cancelled") is True
    assert await commit_one(transport, again, Emit(b"late", 0, 1), attempt=1) == Outcome.GONE
    assert [await transport.chunks("r", attempt) for attempt in (0, 1)] == [{}, {}]
    assert await credits_of(bench, POOL) == {}
    assert await bench.leftovers() == []


async def test_a_request_can_go_back_more_than_once(bench: Bench) -> None:
    transport = await bench.join()
    delivery = await held(transport)
    for under, attempt in ((0, 1), (1, 5), (5, 6)):
        assert await restarted(transport, delivery, attempt, under=under) == Outcome.OK
        delivery = await take_one(transport, "prefill")
        assert delivery.payload == b"again %d" % attempt
    assert await commit_one(transport, delivery, Finish(b"end", "finished"), attempt=6, ack=True) == Outcome.OK
    assert await bench.leftovers() == []


@pytest.mark.parametrize(
    ("attempt", "effects", "ack"),
    [
        (0, (Restart(1, b"again"), Emit(b"a", 0, 1)), True),
        (0, (AddChunk(0, b"a"), Restart(1, b"again")), True),
        (0, (Restart(1, b"again"), Restart(2, b"again")), True),
        (0, (Restart(1, b"again"), Finish(b"end", "failed")), True),
        (0, (Restart(1, b"again"),), False),
        (1, (Restart(1, b"again"),), True),
        (2, (Restart(1, b"again"),), True),
    ],
)
def test_a_restart_stands_alone_ends_its_delivery_and_grows(
    attempt: int, effects: tuple[Effect, ...], ack: bool
) -> None:
    with pytest.raises(ValueError, match="restart"):
        Transaction(Delivery("decode", "stream", "1-0", "nonce", b"", 1), "r", attempt, effects, ack)


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
