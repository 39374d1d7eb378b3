"""Upkeep on a real server: what goes, what must stay, and that nothing happens twice."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pipeline.keys import HANDBACK, POOLS_TTL_S, Keys
from pipeline.settings import Settings
from pipeline.transport import (
    Accepted,
    DeadLetter,
    Delivery,
    Emit,
    Finish,
    GiveCredit,
    Outcome,
    Publish,
    Restart,
    ResultEntry,
    TakeCredit,
    Transaction,
    Transport,
)
from pipeline.upkeep import MAX_AUDITED, Upkeep, open_upkeep
from tests.pipeline.benches import DEADLINE_S, POOL, Bench, RedisBench, soon, take_one

TERMINAL = b"the terminal entry"
LATER_S, NEVER_S = 0.001, 3600.0


@pytest.fixture
def keys(namespace: str) -> Keys:
    return Keys(namespace)


@pytest.fixture
async def transport(redis_bench: RedisBench) -> Transport:
    return await redis_bench.join("a")


@pytest.fixture
async def upkeep(valkey_url: str, namespace: str) -> AsyncIterator[Upkeep]:
    async with open_upkeep(Settings(redis_url=valkey_url, namespace=namespace)) as upkeep:
        yield upkeep


async def admitted(transport: Transport, request_id: str, timeout_s: float | None = None) -> Delivery:
    """A request that the tokenizer has in hand."""
    assert await transport.admit(request_id, "batch", b"payload", timeout_s=timeout_s) == Accepted()
    return await take_one(transport, "tokenizer")


async def with_credit(transport: Transport, request_id: str) -> Delivery:
    """A request that has a credit."""
    delivery = await admitted(transport, request_id)
    credit = Transaction(delivery, request_id, 0, (TakeCredit(100, 10_000, 100),), ack=False)
    assert await transport.commit([credit]) == [Outcome.OK]
    return delivery


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.002)


async def expired(upkeep: Upkeep, num: int, limit: int = 100) -> list[str]:
    """The ids of so many requests that come due."""
    found: list[str] = []

    async def all_are() -> bool:
        found.extend(await upkeep.expire(TERMINAL, limit))
        return len(found) >= num

    await until(all_are)
    return found


async def results(transport: Transport, request_id: str) -> list[ResultEntry]:
    return await soon(transport.read_results(request_id, 0, 0))


async def test_a_request_ends_at_its_deadline_wherever_it_is(
    transport: Transport, upkeep: Upkeep, redis_bench: RedisBench, raw_redis: Any, keys: Keys
) -> None:
    held = await admitted(transport, "held", LATER_S)
    await admitted(transport, "open", NEVER_S)
    await transport.admit("waiting", "interactive", b"payload", timeout_s=LATER_S)
    assert sorted(await expired(upkeep, 2)) == ["held", "waiting"]
    for request_id in ("held", "waiting"):
        assert await results(transport, request_id) == [ResultEntry(None, TERMINAL)]
        assert await redis_bench.state_of(request_id) == "failed"
        assert await raw_redis.ttl(keys.request(request_id)) > 0
    assert [entry.request_id for entry in await transport.finished(9)] == ["held", "waiting"]
    assert await transport.commit([Transaction(held, "held", 0, (Emit(b"d", 0, 1),), ack=True)]) == [Outcome.GONE]
    assert await redis_bench.state_of("open") == "queued"
    assert await raw_redis.zrange(keys.deadlines(), 0, -1) == [b"open"]


async def test_an_end_at_the_deadline_gives_the_credit_back(transport: Transport, upkeep: Upkeep) -> None:
    delivery = await admitted(transport, "r", LATER_S)
    credit = Transaction(delivery, "r", 0, (TakeCredit(100, 10_000, 100),), ack=False)
    assert await transport.commit([credit]) == [Outcome.OK]
    assert await upkeep.credits(POOL) == {"r": 0}
    await expired(upkeep, 1)
    assert await upkeep.credits(POOL) == {}


async def test_only_so_many_end_in_one_call(transport: Transport, upkeep: Upkeep) -> None:
    for number in range(3):
        await admitted(transport, f"r{number}", LATER_S)
    await asyncio.sleep(2 * LATER_S)  # all of them are due
    assert [len(await upkeep.expire(TERMINAL, 2)) for _ in range(3)] == [2, 1, 0]


async def test_deadlines_of_requests_that_have_ended_or_are_not_known_just_go(
    transport: Transport, upkeep: Upkeep, raw_redis: Any, keys: Keys
) -> None:
    ended = await admitted(transport, "ended")
    await transport.commit([Transaction(ended, "ended", 0, (Finish(b"its own end", "finished"),), ack=True)])
    await raw_redis.zadd(keys.deadlines(), {"ended": 1, "unknown": 2})
    assert await upkeep.expire(TERMINAL, 100) == []
    assert await raw_redis.exists(keys.deadlines()) == 0
    assert await results(transport, "ended") == [ResultEntry(None, b"its own end")]
    assert await raw_redis.exists(keys.request("unknown"), keys.results("unknown")) == 0


async def test_a_foreign_key_does_not_keep_others_from_their_end(
    transport: Transport, upkeep: Upkeep, raw_redis: Any, keys: Keys
) -> None:
    await raw_redis.set(keys.request("foreign"), "no hash", ex=60)
    await raw_redis.zadd(keys.deadlines(), {"foreign": 1})
    await admitted(transport, "r", LATER_S)
    assert await expired(upkeep, 1) == ["r"]
    assert await raw_redis.exists(keys.deadlines()) == 0


async def test_credits_are_kept_by_requests_that_go_on(
    transport: Transport, upkeep: Upkeep, raw_redis: Any, keys: Keys
) -> None:
    for name in ("open", "unknown", "ended", "given", "elsewhere"):
        delivery = await with_credit(transport, name)
    again = await with_credit(transport, "again")
    await transport.commit([Transaction(again, "again", 0, (Restart(1, b"payload"),), ack=True)])
    await transport.commit([Transaction(delivery, "elsewhere", 0, (GiveCredit(),), ack=False)])
    stale = keys.credits(POOL)
    assert await upkeep.credits(POOL) == {"open": 0, "unknown": 0, "ended": 0, "given": 0, "again": 1}
    # What a server has after it lost its last second.
    await raw_redis.hset(stale, mapping={"elsewhere": "0:100", "unreadable": "?"})
    await raw_redis.delete(keys.request("unknown"))
    await raw_redis.hset(keys.request("ended"), "state", "finished")
    await raw_redis.hset(keys.request("given"), "attempt", "7")
    assert await upkeep.audit_credits(POOL) == 5
    assert await upkeep.credits(POOL) == {"open": 0, "again": 1}
    assert await upkeep.audit_credits(POOL) == 0


async def test_many_credits_are_audited_over_several_calls(upkeep: Upkeep, raw_redis: Any, keys: Keys) -> None:
    num = 5 * MAX_AUDITED
    await raw_redis.hset(keys.credits(POOL), mapping={f"r{number}": "0:100" for number in range(num)})
    taken = [await upkeep.audit_credits(POOL) for _ in range(num)]
    assert sum(taken) == num
    assert max(taken) < 2 * MAX_AUDITED


async def test_where_a_request_has_its_credit(transport: Transport, upkeep: Upkeep) -> None:
    await with_credit(transport, "r")
    await admitted(transport, "s")
    assert [await upkeep.home_of(name) for name in ("r", "s", "unknown")] == [POOL, None, None]


# Consumers


async def consumers(raw_redis: Any, stream: str, group: str) -> set[str]:
    return {consumer["name"].decode() for consumer in await raw_redis.xinfo_consumers(stream, group)}


async def test_names_of_dead_consumers_go_and_what_they_hold_does_not(
    redis_bench: RedisBench, upkeep: Upkeep, raw_redis: Any, keys: Keys
) -> None:
    stream = keys.stream("tokenizer", "batch")
    holds, gives_back, dead, lives = [await redis_bench.join(name) for name in ("holds", "gives-back", "dead", "lives")]
    for name in ("x", "y"):
        await holds.admit(name, "batch", b"payload")
    held = await take_one(holds, "tokenizer")
    await gives_back.hand_back([await take_one(gives_back, "tokenizer")])
    for transport in (dead, lives):
        await raw_redis.xgroup_createconsumer(stream, "tokenizer", transport.consumer)
    assert await upkeep.tidy("tokenizer", None, {"lives"}, NEVER_S) == 0

    async def are_gone() -> bool:
        await upkeep.tidy("tokenizer", None, {"lives"}, 0.001)
        return await consumers(raw_redis, stream, "tokenizer") == {"holds", "lives", HANDBACK}

    await until(are_gone)
    assert [delivery.entry_id for delivery in await lives.receive("tokenizer", 9, 0)] != [held.entry_id]
    assert await holds.renew([held]) == [True]


async def test_a_consumer_that_was_only_quiet_gets_its_name_back(
    transport: Transport, upkeep: Upkeep, raw_redis: Any, keys: Keys
) -> None:
    assert await transport.receive("tokenizer", 1, 0) == []
    await raw_redis.xgroup_createconsumer(keys.stream("tokenizer", "batch"), "tokenizer", "a")

    async def is_gone() -> bool:
        return await upkeep.tidy("tokenizer", None, (), 0.001) > 0

    await until(is_gone)
    delivery = await admitted(transport, "r")
    assert await consumers(raw_redis, keys.stream("tokenizer", "batch"), "tokenizer") == {"a"}
    assert await transport.renew([delivery]) == [True]


async def test_streams_that_nobody_has_read_have_no_consumers(upkeep: Upkeep, transport: Transport) -> None:
    await transport.admit("r", "batch", b"payload")
    assert await upkeep.tidy("tokenizer", None, (), 0) == 0
    assert await upkeep.tidy("decode", POOL, (), 0) == 0


# Pools


async def test_a_registration_is_a_sign_of_life_of_its_pool(
    transport: Transport, upkeep: Upkeep, raw_redis: Any, keys: Keys
) -> None:
    before_ms, seen = await upkeep.pools()
    assert seen == {}
    await transport.register("decode", b"info", 15)
    now_ms, seen = await upkeep.pools()
    assert list(seen) == [POOL]
    assert before_ms <= seen[POOL] <= now_ms
    assert 0 < await raw_redis.ttl(keys.pools()) <= POOLS_TTL_S
    await raw_redis.zadd(keys.pools(), {POOL: 1})
    await transport.register("decode", b"info", 15)
    assert (await upkeep.pools())[1][POOL] >= before_ms


async def test_a_pool_that_only_its_queues_know_is_found(
    transport: Transport, upkeep: Upkeep, raw_redis: Any, keys: Keys
) -> None:
    assert await upkeep.find_pools() == 0
    await raw_redis.zadd(keys.pools(), {"known": 1})
    for pool_id in ("known", "forgotten"):
        await raw_redis.xadd(keys.stream("decode", "batch", pool_id), {"p": b""})
    await transport.admit("r", "batch", b"payload")  # not of a pool
    assert await upkeep.find_pools() == 1
    now_ms, seen = await upkeep.pools()
    assert seen["known"] == 1
    assert now_ms - 1000 * DEADLINE_S < seen["forgotten"] <= now_ms
    assert set(seen) == {"known", "forgotten"}
    await raw_redis.delete(*(keys.stream("decode", "batch", pool_id) for pool_id in seen))


async def test_a_pool_is_forgotten_with_all_that_is_left_of_it(
    transport: Transport, upkeep: Upkeep, raw_redis: Any, keys: Keys, namespace: str
) -> None:
    delivery = await with_credit(transport, "r")
    publish = Publish("compressor", "batch", b"payload")
    assert await transport.commit([Transaction(delivery, "r", 0, (publish,), ack=True)]) == [Outcome.OK]
    chunk = await take_one(transport, "compressor")
    await raw_redis.zadd(keys.pools(), {POOL: 17})
    assert not await upkeep.forget_pool(POOL, 17)  # it holds something
    assert await transport.renew([chunk]) == [True]
    await transport.commit([Transaction(chunk, "r", 0, (DeadLetter("of this test"),), ack=True)])
    assert not await upkeep.forget_pool(POOL, 16)  # it was seen since
    assert await upkeep.credits(POOL) == {"r": 0}
    assert await upkeep.forget_pool(POOL, 17)
    assert await upkeep.pools() == (pytest.approx((await upkeep.pools())[0], abs=1000 * DEADLINE_S), {})
    assert [key async for key in raw_redis.scan_iter(match=f"{namespace}:*{POOL}*")] == []
    assert await transport.receive("decode", 1, 0) == []  # somebody who comes too late makes its queues again
    assert await upkeep.forget_pool(POOL, 17)
    assert [key async for key in raw_redis.scan_iter(match=f"{namespace}:*{POOL}*")] == []
    assert await transport.cancel("r", b"terminal")  # its credit's name leads nowhere now


# Counters


async def test_counts_add_up_and_each_call_counts_once(upkeep: Upkeep, raw_redis: Any, keys: Keys) -> None:
    assert await upkeep.counters() == {}
    for ticket in ("one", "two", "one", "one"):
        await upkeep.count({"kv_missing": 2, "dead_letters": 1}, ticket)
    assert await upkeep.counters() == {"kv_missing": 4, "dead_letters": 2}
    assert await raw_redis.ttl(keys.counters()) > 0
    assert await raw_redis.ttl(keys.counted("one")) > 0


@pytest.mark.parametrize("bench", ["server", "narrow"], indirect=True)
async def test_a_user_with_no_more_rights_than_are_needed_can_do_all_of_it(bench: Bench) -> None:
    assert isinstance(bench, RedisBench)
    transport = await bench.join("a")
    await transport.register("decode", b"info", 15)
    await with_credit(transport, "open")
    await admitted(transport, "r", LATER_S)
    await transport.receive("decode", 1, 0)
    async with open_upkeep(bench._settings) as upkeep:
        assert await expired(upkeep, 1) == ["r"]
        assert await upkeep.audit_credits(POOL) == 0
        assert await upkeep.home_of("open") == POOL
        assert await upkeep.find_pools() == 0
        assert await upkeep.tidy("decode", POOL, (), NEVER_S) == 0
        await upkeep.count({"kv_missing": 1}, "ticket")
        assert await upkeep.counters() == {"kv_missing": 1}
        seen = (await upkeep.pools())[1]
        assert await upkeep.forget_pool(POOL, seen[POOL])
