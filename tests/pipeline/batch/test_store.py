"""Batches on a real server: each change of state is a compare-and-set, each line is fed, counted and forgotten once."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from redis.asyncio import Redis

from pipeline.batch.errors import UnknownBatch
from pipeline.batch.record import BATCH_STATES, OVER, STEPS, BatchRecord, BatchState, StepName, states_of
from pipeline.batch.store import (
    COLLECTED_TTL_S,
    EPOCH,
    KEPT_WINDOWS,
    NOW,
    STEP_LEASE_S,
    BatchStore,
    Collected,
    DoneLine,
    Feed,
    FeedKind,
    FeedReply,
    StepTurn,
    later,
    line_request_id,
    new_nonce,
)
from pipeline.keys import BATCH_TTL_S, MAX_QUEUE, RESULT_TTL_S, Keys
from pipeline.messages import Terminal
from pipeline.transport import Emit, Finish, Outcome, Transaction, Transport
from pipeline.wire import pack
from tests.pipeline.batch.files import new_manifest
from tests.pipeline.benches import RedisBench, take, take_one

ID = "batch_1"
FEEDER = "whose turn it is"
TERMINAL = pack(Terminal(finish_reason="stop"))
CANCELLED = pack(Terminal(finish_reason="cancelled"))
Leftovers = Callable[[], Awaitable[list[str]]]


@pytest.fixture
def keys(namespace: str) -> Keys:
    return Keys(namespace)


@pytest.fixture
def store(raw_redis: Redis, keys: Keys) -> BatchStore:
    return BatchStore(raw_redis, "test", keys)


@pytest.fixture
async def stage(redis_bench: RedisBench) -> Transport:
    return await redis_bench.join()


async def create(store: BatchStore, batch_id: str = ID, **counts: int) -> BatchRecord:
    manifest = new_manifest(Path("/nowhere"), batch_id)
    assert await store.create(manifest, "/nowhere/batches/one", counts or None)
    return await store.read(batch_id)


async def begin(store: BatchStore, total: int = 3) -> None:
    """A batch in progress."""
    await create(store)
    fields: dict[str, Any] = {"total": total, "feed_nonce": FEEDER}
    assert await store.move(ID, ["validating"], "in_progress", fields) == "in_progress"


async def feed(store: BatchStore, *indexes: int, attempt: int = 0) -> None:
    for index in indexes:
        assert await feed_one(store, index, "request", pack_index(index), attempt=attempt) == "ok"


async def feed_one(
    store: BatchStore, index: int, kind: FeedKind, payload: bytes = b"", max_queue: int = MAX_QUEUE, attempt: int = 0
) -> FeedReply:
    """Feed a line, as the one whose turn it is."""
    return await store.feed(turn(0, "feed", FEEDER), index, Feed(kind, payload, attempt), max_queue)


def pack_index(index: int) -> bytes:
    return f"request {index}".encode()


async def end(stage: Transport, num: int, attempt: int = 0) -> None:
    """End the requests that come next, as a stage does."""
    effects = (Finish(TERMINAL, "finished"),)
    for delivery in await take(stage, "tokenizer", num):
        index = int(delivery.payload.split()[-1])
        await stage.commit([Transaction(delivery, line_request_id(ID, index), attempt, effects, ack=True)])


async def done(store: BatchStore) -> list[DoneLine]:
    return await store.wait_done(ID, EPOCH, 100, 0)


# Records


async def test_a_record_is_what_was_submitted(store: BatchStore) -> None:
    record = await create(store)
    manifest = new_manifest(Path("/nowhere"), ID)
    assert (record.id, record.state, record.options) == (ID, "validating", manifest.options)
    assert (record.directory, record.input_sha256) == ("/nowhere/batches/one", manifest.input_sha256)
    assert record.created_ms > 0
    assert (record.recovered, record.cursor, record.admitted, record.num_finished) == (False, 0, 0, 0)


async def test_a_record_that_exists_is_left_as_it_is(store: BatchStore) -> None:
    await begin(store)
    before = await store.read(ID)
    assert not await store.create(new_manifest(Path("/other"), ID), "/other", {"succeeded": 7})
    assert await store.read(ID) == before


async def test_a_record_that_is_made_again_knows_what_its_files_hold(store: BatchStore) -> None:
    record = await create(store, succeeded=5, failed=2)
    assert (record.succeeded, record.failed, record.num_finished, record.recovered) == (5, 2, 7, True)


async def test_an_unknown_batch_is_said_so(store: BatchStore) -> None:
    for call in (
        lambda: store.read(ID),
        lambda: store.move(ID, ["validating"], "in_progress"),
        lambda: store.move(ID, ["validating"], None, {"total": 1}),
        lambda: store.cancel(ID),
        lambda: store.acknowledge(ID, []),
    ):
        with pytest.raises(UnknownBatch, match="batch_1 is not known"):
            await call()
    assert await store.all() == []


@pytest.mark.parametrize("state", BATCH_STATES)
async def test_a_move_happens_only_from_where_it_may(store: BatchStore, raw_redis: Redis, state: BatchState) -> None:
    await create(store)
    raw: Any = raw_redis
    await raw.hset(store.keys.batch(ID), "state", state)
    origins: list[BatchState] = ["in_progress", "cancelling"]
    assert await store.move(ID, origins, "finalizing", {"ending": "completed"}) == (
        "finalizing" if state in origins else state
    )
    assert (await store.read(ID)).ending == ("completed" if state in origins else "")


async def test_times_are_the_servers(store: BatchStore) -> None:
    record = await create(store)
    await store.move(ID, ["validating"], "in_progress", {"started_ms": NOW, "deadline_ms": later(60), "error": "now"})
    after = await store.read(ID)
    assert 0 <= after.started_ms - record.created_ms < 20_000
    assert after.deadline_ms - after.started_ms == 60_000
    assert after.error == "now"


async def test_fields_can_be_set_without_a_move(store: BatchStore) -> None:
    await begin(store)
    assert await store.move(ID, tuple(STEPS), None, {"deadline_ms": 5}) == "in_progress"
    assert (await store.read(ID)).deadline_ms == 5
    await store.move(ID, ["in_progress"], "completed")
    assert await store.move(ID, tuple(STEPS), None, {"deadline_ms": 6}) == "completed"
    assert (await store.read(ID)).deadline_ms == 5


@pytest.mark.parametrize("ending", sorted(OVER))
async def test_a_batch_that_is_over_goes_away_after_a_day(
    store: BatchStore, raw_redis: Redis, leftovers: Leftovers, ending: BatchState
) -> None:
    await begin(store)
    await feed_one(store, 0, "refused")
    assert len(await leftovers()) == 3  # record, index and done lines, while it goes on
    await store.move(ID, ["in_progress"], ending)
    assert await leftovers() == []
    for key in (store.keys.batch(ID), store.keys.batches()):
        assert BATCH_TTL_S - 60 < await raw_redis.ttl(key) <= BATCH_TTL_S
    assert not await raw_redis.exists(store.keys.batch_done(ID))


async def test_the_index_stays_while_any_batch_goes_on(store: BatchStore, raw_redis: Redis) -> None:
    await begin(store)
    await create(store, "batch_2")
    await store.move(ID, ["in_progress"], "completed")
    assert await raw_redis.ttl(store.keys.batches()) == -1
    await store.move("batch_2", ["validating"], "failed")
    assert await raw_redis.ttl(store.keys.batches()) > 0
    await create(store, "batch_3")
    assert await raw_redis.ttl(store.keys.batches()) == -1


async def test_a_failed_batch_that_goes_on_does_not_expire(store: BatchStore, raw_redis: Redis) -> None:
    await begin(store)
    await store.move(ID, ["in_progress"], "failed")
    await store.move(ID, ["failed"], "validating")
    assert await raw_redis.ttl(store.keys.batch(ID)) == -1
    assert await raw_redis.ttl(store.keys.batches()) == -1


async def test_batches_are_listed_from_the_oldest_on_and_leave_with_their_record(
    store: BatchStore, raw_redis: Redis
) -> None:
    for number in range(3):
        await create(store, f"batch_{number}")
        await raw_redis.zadd(store.keys.batches(), {f"batch_{number}": number})
    await raw_redis.delete(store.keys.batch("batch_1"))
    await store.move("batch_2", ["validating"], "in_progress", {"deadline_ms": 77})
    now_ms, found = await store.survey()
    assert now_ms > 0
    assert [(one.id, one.state, one.deadline_ms) for one in found] == [
        ("batch_0", "validating", 0),
        ("batch_2", "in_progress", 77),
    ]
    assert await raw_redis.zrange(store.keys.batches(), 0, -1) == [b"batch_0", b"batch_2"]
    assert [record.id for record in await store.all()] == ["batch_0", "batch_2"]


# Cancelling


async def test_cancelled_before_it_begins_it_does_not_begin(store: BatchStore) -> None:
    await create(store)
    assert await store.cancel(ID)
    assert await store.cancel(ID)
    assert (await store.read(ID)).state == "validating"
    assert await store.move(ID, ["validating"], "in_progress", {"total": 3}) == "cancelling"
    assert await feed_one(store, 0, "request") == "moved"


async def test_cancelled_in_progress_it_is_told_so_as_often_as_asked(store: BatchStore) -> None:
    await begin(store)
    assert await store.cancel(ID)
    assert await store.cancel(ID)
    assert (await store.read(ID)).state == "cancelling"


@pytest.mark.parametrize("state", ["expiring", "finalizing", *sorted(OVER)])
async def test_what_is_over_or_about_to_be_is_not_cancelled(store: BatchStore, state: BatchState) -> None:
    await begin(store)
    await store.move(ID, ["in_progress"], state)
    assert not await store.cancel(ID)
    assert (await store.read(ID)).state == state


# Steps


def turn(number: int, step: StepName = "feed", nonce: str | None = None) -> StepTurn:
    return StepTurn(ID, step, number, nonce or new_nonce())


async def revived(store: BatchStore, step: StepName = "feed") -> int:
    number = await store.revive(ID, step)
    assert number is not None
    return number


async def expire_lease(store: BatchStore, raw: Any, step: StepName = "feed") -> None:
    await raw.hset(store.keys.batch(ID), f"{step}_until_ms", 1)


async def test_one_job_has_a_turn_and_renews_it(store: BatchStore) -> None:
    await begin(store)
    number = await revived(store)
    mine, other = turn(number), turn(number)
    assert [await store.begin(mine), await store.begin(other), await store.begin(mine)] == ["ok", "held", "ok"]
    assert await store.revive(ID, "feed") is None
    assert [await store.end(other), await store.end(mine), await store.end(mine)] == ["stale", "ok", "stale"]
    assert await store.begin(mine) == "stale"


async def test_the_next_turn_can_be_asked_for_at_once_unless_it_is_to_wait(store: BatchStore) -> None:
    await begin(store)
    first = turn(await revived(store))
    await store.begin(first)
    await store.end(first)
    second = turn(await revived(store))
    assert second.number > first.number
    assert await store.begin(second) == "ok"
    await store.end(second, pause_s=60)
    assert await store.revive(ID, "feed") is None


async def test_a_job_that_was_asked_for_has_time_to_begin(store: BatchStore, raw_redis: Redis) -> None:
    await begin(store)
    first = turn(await revived(store))
    assert await store.revive(ID, "feed") is None
    await expire_lease(store, raw_redis)
    second = turn(await revived(store))
    assert [await store.begin(first), await store.begin(second)] == ["stale", "ok"]


async def test_whoever_lost_its_lease_is_told_so(store: BatchStore, raw_redis: Redis) -> None:
    await begin(store)
    killed = turn(await revived(store))
    await store.begin(killed)
    await expire_lease(store, raw_redis)
    heir = turn(await revived(store))
    assert await store.begin(heir) == "ok"
    assert [await store.begin(killed), await store.end(killed)] == ["stale", "stale"]
    assert await store.end(heir) == "ok"


async def test_a_lease_that_ran_out_unnoticed_goes_on(store: BatchStore, raw_redis: Redis) -> None:
    await begin(store)
    slow = turn(await revived(store))
    await store.begin(slow)
    await expire_lease(store, raw_redis)
    assert await store.begin(slow) == "ok"
    assert await store.revive(ID, "feed") is None


async def test_a_clock_that_is_set_back_stops_no_step(store: BatchStore, raw_redis: Redis) -> None:
    await begin(store)
    await store.begin(turn(await revived(store)))
    now_ms, _ = await store.survey()
    raw: Any = raw_redis
    await raw.hset(store.keys.batch(ID), "feed_until_ms", now_ms + 3_600_000)
    assert await store.begin(turn(await revived(store))) == "ok"


async def test_steps_of_a_state_do_not_disturb_each_other(store: BatchStore) -> None:
    await begin(store)
    feeding, collecting = turn(await revived(store)), turn(await revived(store, "collect"), "collect")
    assert [await store.begin(feeding), await store.begin(collecting)] == ["ok", "ok"]


@pytest.mark.parametrize("step", get_args(StepName))
async def test_a_step_runs_only_in_the_states_that_it_is_for(store: BatchStore, step: StepName) -> None:
    await create(store)
    for state in BATCH_STATES:
        await store.move(ID, BATCH_STATES, state)
        number = await store.revive(ID, step)
        assert (number is not None) == (state in states_of(step)), state
        if number is None:
            assert await store.begin(turn(0, step)) == "over"
            assert await store.end(turn(0, step)) == "over"
        else:
            one = turn(number, step)
            assert await store.begin(one) == "ok"
            await store.end(one)


async def test_a_step_of_an_unknown_batch_is_over(store: BatchStore, raw_redis: Redis) -> None:
    assert await store.revive(ID, "feed") is None
    assert await store.begin(turn(0)) == "over"
    assert await store.end(turn(0)) == "over"
    assert not await raw_redis.exists(store.keys.batch(ID))


def test_a_lease_outlasts_renewals_that_fail() -> None:
    assert STEP_LEASE_S >= 4


# Lines


async def test_each_line_is_fed_once_and_in_order(store: BatchStore, stage: Transport) -> None:
    await begin(store)
    await feed(store, 0)
    assert await feed_one(store, 0, "request", b"again") == "moved"
    assert await feed_one(store, 2, "request", b"too early") == "moved"
    await feed(store, 1)
    record = await store.read(ID)
    assert (record.cursor, record.admitted) == (2, 2)
    assert [delivery.payload for delivery in await take(stage, "tokenizer", 2)] == [pack_index(0), pack_index(1)]
    assert await stage.queue_length("tokenizer", "batch") == 2


async def test_only_the_one_whose_turn_it_is_feeds(store: BatchStore, stage: Transport) -> None:
    await begin(store)
    stale = turn(await revived(store))
    assert await store.begin(stale) == "ok"
    await store.end(stale)
    mine = turn(await revived(store))
    assert await store.feed(mine, 0, Feed("request", b"x")) == "moved"  # not begun
    assert await store.begin(mine) == "ok"
    assert await store.feed(stale, 0, Feed("request", b"x")) == "moved"
    assert await store.feed(mine, 0, Feed("request", b"x")) == "ok"
    assert await stage.queue_length("tokenizer", "batch") == 1


async def test_no_turn_of_a_lost_record_is_one_of_the_new_record(store: BatchStore, raw_redis: Redis) -> None:
    numbers: list[int] = []
    for _ in range(3):
        await begin(store)
        numbers.append(await revived(store))
        await raw_redis.delete(store.keys.batch(ID))
        await asyncio.sleep(0.002)  # the server's clock moves
    assert len(set(numbers)) == 3


async def test_lines_go_to_the_queue_of_batches(store: BatchStore, stage: Transport) -> None:
    await begin(store)
    await feed(store, 0)
    await stage.admit("asked by a person", "interactive", b"person")
    assert (await take_one(stage, "tokenizer")).payload == b"person"


@pytest.mark.parametrize("state", sorted(set(BATCH_STATES) - {"in_progress"}))
async def test_nothing_is_fed_unless_it_is_in_progress(store: BatchStore, stage: Transport, state: BatchState) -> None:
    await begin(store)
    await store.move(ID, ["in_progress"], state)
    assert await feed_one(store, 0, "request", b"x") == "moved"
    assert await stage.queue_length("tokenizer", "batch") == 0
    assert await store.feed(StepTurn("batch_unknown", "feed", 0, FEEDER), 0, Feed("request", b"x")) == "moved"


async def test_a_full_queue_takes_no_line(store: BatchStore) -> None:
    await begin(store)
    await feed(store, 0)
    assert await feed_one(store, 1, "request", b"x", max_queue=1) == "busy"
    assert (await store.read(ID)).cursor == 1
    assert await feed_one(store, 1, "refused", max_queue=1) == "ok"


async def test_a_wrong_line_is_done_at_once_and_a_finished_one_is_passed_over(store: BatchStore) -> None:
    await begin(store)
    assert await feed_one(store, 0, "skip") == "ok"
    assert await feed_one(store, 1, "refused") == "ok"
    record = await store.read(ID)
    assert (record.cursor, record.admitted) == (2, 1)
    assert [line.index for line in await done(store)] == [1]


async def test_a_line_that_ends_waits_to_be_collected_and_keeps_its_results_so_long(
    store: BatchStore, stage: Transport, raw_redis: Redis, leftovers: Leftovers
) -> None:
    await begin(store, total=2)
    await feed(store, 0, 1)
    await end(stage, 2)
    lines = await done(store)
    assert [line.index for line in lines] == [0, 1]
    request = line_request_id(ID, 0)
    for key in (store.keys.request(request), store.keys.results(request)):
        assert await raw_redis.ttl(key) == -1
    assert await store.results(ID, lines) == {0: [(b"1-0", TERMINAL)], 1: [(b"1-0", TERMINAL)]}
    assert await store.results(ID, []) == {}
    collected = [Collected(lines[0], "succeeded", 3, 4), Collected(lines[1], "failed", 5, 6)]
    assert await store.acknowledge(ID, collected) == "finalizing"
    for key in (store.keys.request(request), store.keys.results(request)):
        assert 0 < await raw_redis.ttl(key) <= COLLECTED_TTL_S
    record = await store.read(ID)
    assert (record.collected, record.succeeded, record.failed) == (2, 1, 1)
    assert (record.prompt_tokens, record.output_tokens, record.ending) == (8, 10, "completed")
    of_the_batch = [store.keys.batch(ID), store.keys.batch_done(ID), store.keys.batches()]
    assert sorted(await leftovers()) == [f"{key} has no TTL" for key in of_the_batch]


async def test_a_line_is_counted_once_however_often_it_is_acknowledged(store: BatchStore, stage: Transport) -> None:
    await begin(store)
    await feed(store, 0, 1)
    await end(stage, 1)
    lines = [Collected(line, "succeeded", 1, 1) for line in await done(store)]
    for _ in range(3):
        assert await store.acknowledge(ID, lines) == "in_progress"
    record = await store.read(ID)
    assert (record.collected, record.succeeded, record.output_tokens) == (1, 1, 1)
    assert await done(store) == []


async def test_results_that_went_with_the_servers_data_are_not_taken_for_empty_ones(
    store: BatchStore, stage: Transport, raw_redis: Redis
) -> None:
    await begin(store)
    await feed(store, 0, 1)
    await end(stage, 2)
    lost, kept = await done(store)
    await raw_redis.xdel(store.keys.batch_done(ID), lost.entry_id)
    await raw_redis.delete(*(store.keys.results(line_request_id(ID, index)) for index in (0, 1)))
    assert await store.results(ID, [lost, kept]) == {1: []}


async def test_waiting_ends_with_the_first_line(store: BatchStore, stage: Transport) -> None:
    await begin(store)
    await feed(store, 0)
    waiting = asyncio.create_task(store.wait_done(ID, EPOCH, 10, 5.0))
    await end(stage, 1)
    assert [line.index for line in await asyncio.wait_for(waiting, 4.0)] == [0]


@pytest.mark.parametrize(
    ("state", "fed", "ending"),
    [
        ("in_progress", 2, "completed"),
        ("in_progress", 1, None),
        ("cancelling", 1, "cancelled"),
        ("expiring", 1, "expired"),
    ],
)
async def test_it_is_finalized_when_nothing_is_missing(
    store: BatchStore, stage: Transport, state: BatchState, fed: int, ending: str | None
) -> None:
    await begin(store, total=2)
    await feed(store, *range(fed))
    await store.move(ID, ["in_progress"], state)
    assert await store.acknowledge(ID, []) == state
    await end(stage, fed)
    reply = await store.acknowledge(ID, [Collected(line, "dropped") for line in await done(store)])
    assert reply == (state if ending is None else "finalizing")
    record = await store.read(ID)
    assert (record.ending, record.num_finished, record.collected) == (ending or "", 0, fed)


async def test_with_nothing_in_flight_the_end_needs_no_line(store: BatchStore) -> None:
    await begin(store)
    await store.cancel(ID)
    assert await store.acknowledge(ID, []) == "finalizing"


async def test_a_line_that_is_cancelled_counts_as_done(store: BatchStore, stage: Transport) -> None:
    await begin(store)
    await feed(store, 0, 1)
    assert await stage.cancel(line_request_id(ID, 1), CANCELLED)
    assert [line.index for line in await done(store)] == [1]


async def test_lines_in_flight_are_bounded_and_so_are_those_that_nobody_collects(
    store: BatchStore, stage: Transport
) -> None:
    window = 3
    await begin(store, total=100)
    assert await store.room(ID, window) == 3
    await feed(store, 0, 1, 2)
    assert await store.room(ID, window) == 0
    await end(stage, 2)
    assert await store.room(ID, window) == 2
    for index in range(3, KEPT_WINDOWS * window):
        await feed_one(store, index, "refused")
    assert await store.room(ID, window) == 0
    lines = await done(store)
    await store.acknowledge(ID, [Collected(lines[0], "succeeded")])
    assert await store.room(ID, window) == 1


# After a failure


async def fail(store: BatchStore) -> None:
    assert await store.move(ID, tuple(STEPS), "failed") == "failed"


async def go_on(store: BatchStore, state: BatchState = "in_progress") -> None:
    anew = {"cursor": 0, "admitted": 0, "collected": 0}
    await store.move(ID, ["failed"], "validating", anew)
    if state != "validating":
        await store.move(ID, ["validating"], state)


async def test_results_that_nobody_collected_expire_with_a_failure_and_are_kept_when_it_goes_on(
    store: BatchStore, stage: Transport, raw_redis: Redis, leftovers: Leftovers
) -> None:
    await begin(store, total=1)
    await feed(store, 0)
    await end(stage, 1)
    await fail(store)
    names = [store.keys.request(line_request_id(ID, 0)), store.keys.results(line_request_id(ID, 0))]
    assert [0 < await raw_redis.ttl(name) <= RESULT_TTL_S for name in names] == [True, True]
    assert await leftovers() == []
    await go_on(store)
    await feed(store, 0)
    assert [await raw_redis.ttl(name) for name in names] == [-1, -1]
    assert await stage.queue_length("tokenizer", "batch") == 0  # nothing is done again
    assert [line.index for line in await done(store)] == [0]


@pytest.mark.parametrize("state", ["failed", "validating", "in_progress"])
async def test_a_line_in_flight_counts_once_whenever_it_ends(
    store: BatchStore, stage: Transport, state: BatchState
) -> None:
    await begin(store, total=2)
    await feed(store, 0, 1)
    await fail(store)
    if state != "failed":
        await go_on(store, state)
    await end(stage, 2)
    assert await done(store) == []
    if state == "failed":
        await go_on(store)
    elif state == "validating":
        await store.move(ID, ["validating"], "in_progress")
    await feed(store, 0, 1)
    lines = await done(store)
    assert sorted(line.index for line in lines) == [0, 1]
    assert await store.acknowledge(ID, [Collected(line, "succeeded") for line in lines]) == "finalizing"


async def test_a_line_that_is_still_in_flight_goes_on_as_it_is(store: BatchStore, stage: Transport) -> None:
    await begin(store, total=1)
    await feed(store, 0)
    await fail(store)
    await go_on(store)
    await feed(store, 0)
    assert await stage.queue_length("tokenizer", "batch") == 1
    assert await done(store) == []
    await end(stage, 1)
    assert [line.index for line in await done(store)] == [0]


async def test_a_line_that_was_cancelled_or_lost_its_results_begins_anew(
    store: BatchStore, stage: Transport, raw_redis: Redis
) -> None:
    await begin(store, total=2)
    await feed(store, 0, 1)
    await stage.cancel(line_request_id(ID, 0), CANCELLED)
    for delivery in await take(stage, "tokenizer", 2):
        index = int(delivery.payload.split()[-1])
        effects = (Finish(TERMINAL, "finished"),)
        await stage.commit([Transaction(delivery, line_request_id(ID, index), 0, effects, ack=True)])
    await fail(store)
    await raw_redis.delete(store.keys.results(line_request_id(ID, 1)))
    await go_on(store)
    assert await feed_one(store, 0, "request", pack_index(0)) == "busy"  # entries of this attempt may be somewhere
    await feed(store, 0, 1, attempt=1)
    assert await done(store) == []
    await end(stage, 2, attempt=1)
    assert await store.results(ID, await done(store)) == {0: [(b"1-0", TERMINAL)], 1: [(b"1-0", TERMINAL)]}


async def test_a_line_of_a_batch_that_is_gone_expires_by_itself(
    store: BatchStore, stage: Transport, raw_redis: Redis, leftovers: Leftovers
) -> None:
    await begin(store, total=1)
    await feed(store, 0)
    await raw_redis.delete(store.keys.batch(ID), store.keys.batches())
    await end(stage, 1)
    assert await leftovers() == []


async def test_lines_that_a_lost_record_left_are_not_counted_for_the_new_one(
    store: BatchStore, raw_redis: Redis
) -> None:
    await begin(store, total=2)
    await feed_one(store, 0, "refused")
    await raw_redis.delete(store.keys.batch(ID))
    await begin(store, total=2)
    assert await done(store) == []


async def test_a_cancelled_line_that_is_fed_again_has_a_larger_attempt_than_what_is_left_of_it(
    store: BatchStore, stage: Transport
) -> None:
    await begin(store, total=1)
    mine, request_id = turn(0, "feed", FEEDER), line_request_id(ID, 0)
    assert await store.feed(mine, 0, Feed("request", b"old", attempt=100)) == "ok"
    await stage.cancel(request_id, CANCELLED)
    await fail(store)
    await go_on(store)
    assert await store.feed(mine, 0, Feed("request", b"new", attempt=100)) == "busy"
    assert await store.feed(mine, 0, Feed("request", b"new", attempt=101)) == "ok"
    old, new = await take(stage, "tokenizer", 2)
    effects = (Emit(b"a", 0, 1), Finish(TERMINAL, "finished"))
    assert await stage.commit(
        [Transaction(old, request_id, 100, effects, ack=True), Transaction(new, request_id, 101, effects, ack=True)]
    ) == [Outcome.FENCED, Outcome.OK]
    assert await stage.queue_length("tokenizer", "batch") == 0
    assert [line.index for line in await done(store)] == [0]
