"""What only shows on a real server: lost replies, groups, TTLs, memory limits, and what lies in which key."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from pipeline import redis_calls, redis_streams
from pipeline.connect import open_transport
from pipeline.errors import ServerRefused, ServerUnreachable, StateDamaged, TransportClosed
from pipeline.keys import LEASE_S, MAX_DEAD, RESULT_TTL_S, Keys
from pipeline.redis_streams import RedisStreams
from pipeline.settings import Settings
from pipeline.transport import (
    Accepted,
    AddChunk,
    Delivery,
    Effect,
    Emit,
    Exists,
    Finish,
    Outcome,
    Plan,
    Publish,
    Transaction,
    Transport,
    TransportOptions,
)
from pipeline.wire import MAX_BYTES
from tests.pipeline.benches import BRIEF_LEASE_S, DEADLINE_S, POOL, RedisBench, take, take_one
from tests.servers import ServerKind, ServerOptions, running_server

DURABLE = ServerOptions(appendonly="yes", appendfsync="always")


class ForgetfulRedis(Redis):
    """Carries commands out, and then pretends that the reply was lost."""

    replies_to_lose = 0
    on_lost_reply: Callable[[], Awaitable[None]] | None = None

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        reply = await super().execute_command(*words, **options)
        if self.replies_to_lose:
            self.replies_to_lose -= 1
            if self.on_lost_reply:
                await self.on_lost_reply()
            raise RedisConnectionError("the connection was reset")
        return reply


class Forgetful:
    """A transport on such a client."""

    def __init__(self, url: str, namespace: str, patience_s: float) -> None:
        self.commands = ForgetfulRedis.from_url(url, protocol=2)
        readers = Redis.from_url(url, protocol=2)
        options = TransportOptions("forgetful", POOL, lease_s=patience_s)
        self.transport = RedisStreams(self.commands, readers, "test", options, Keys(namespace))

    def lose(self, num_replies: int = 1) -> None:
        self.commands.replies_to_lose = num_replies


@asynccontextmanager
async def forgetful(url: str, namespace: str, patience_s: float = LEASE_S):
    made = Forgetful(url, namespace, patience_s)
    try:
        yield made
    finally:
        made.lose(0)
        await made.transport.close()


def transaction(delivery: Delivery, *effects: Effect, ack: bool = False) -> Transaction:
    return Transaction(delivery, "r", 0, effects, ack)


async def running(transport: Transport) -> Delivery:
    assert await transport.admit("r", "interactive", b"work") == Accepted()
    return await take_one(transport, "tokenizer")


PUBLISH = Publish("prefill", "interactive", b"next")
END = Finish(b"end", "finished")


# Lost replies


async def test_a_lost_admission_is_not_taken_for_a_second_request(valkey_url: str, namespace: str) -> None:
    async with forgetful(valkey_url, namespace) as broken:
        broken.lose()
        assert await broken.transport.admit("r", "interactive", b"work") == Accepted()
        assert await broken.transport.queue_length("tokenizer", "interactive") == 1


async def test_a_commit_whose_reply_is_lost_happens_once(valkey_url: str, namespace: str) -> None:
    async with forgetful(valkey_url, namespace) as broken:
        delivery = await running(broken.transport)
        broken.lose(2)
        steps = [transaction(delivery, Emit(b"a", 0, 1)), transaction(delivery, PUBLISH), transaction(delivery)]
        assert await broken.transport.commit(steps) == [Outcome.OK] * 3
        assert len(await broken.transport.read_results("r", 0, block_s=0)) == 1
        assert await broken.transport.queue_length("prefill", "interactive") == 1

        broken.lose()
        assert await broken.transport.commit([transaction(delivery, PUBLISH)]) == [Outcome.OK]
        assert await broken.transport.queue_length("prefill", "interactive") == 2

        broken.lose()
        last = transaction(delivery, Emit(b"b", 1, 1), END, ack=True)
        assert await broken.transport.commit([last]) == [Outcome.ALREADY]
        assert len(await broken.transport.read_results("r", 0, block_s=0)) == 3


async def test_entries_of_a_lost_reply_are_delivered_by_the_same_call(valkey_url: str, namespace: str) -> None:
    async with forgetful(valkey_url, namespace) as broken:
        await broken.transport.admit("r", "interactive", b"work")
        broken.lose()
        (delivery,) = await broken.transport.receive("tokenizer", 2, block_s=0)
        assert (delivery.payload, delivery.tries) == (b"work", 1)
        assert await broken.transport.renew([delivery]) == [True]


async def test_entries_of_a_failed_call_are_delivered_by_the_next(valkey_url: str, namespace: str) -> None:
    async with forgetful(valkey_url, namespace, patience_s=0.0) as broken:
        for request_id in ("r", "s"):
            await broken.transport.admit(request_id, "interactive", request_id.encode())
        broken.lose()
        with pytest.raises(ServerUnreachable, match="receive"):
            await broken.transport.receive("tokenizer", 2, block_s=0)
        (first,) = await broken.transport.receive("tokenizer", 1, block_s=0)
        (second,) = await broken.transport.receive("tokenizer", 1, block_s=0)
        assert [(d.payload, d.tries) for d in (first, second)] == [(b"r", 1), (b"s", 1)]
        assert await broken.transport.renew([first, second]) == [True, True]


async def test_work_in_hand_is_not_delivered_again_after_an_error(valkey_url: str, namespace: str) -> None:
    async with forgetful(valkey_url, namespace) as broken:
        held = await running(broken.transport)
        await broken.transport.admit("s", "interactive", b"new")
        broken.lose()
        assert [d.payload for d in await broken.transport.receive("tokenizer", 5, block_s=0)] == [b"new"]
        assert await broken.transport.renew([held]) == [True]


async def test_renewing_and_handing_back_survive_a_lost_reply(valkey_url: str, namespace: str) -> None:
    async with forgetful(valkey_url, namespace) as broken:
        delivery = await running(broken.transport)
        broken.lose()
        assert await broken.transport.renew([delivery]) == [True]
        broken.lose()
        await broken.transport.hand_back([delivery])
        assert (await take_one(broken.transport, "tokenizer")).tries == 1


# Groups and scripts


async def test_a_destroyed_group_is_made_again_and_old_claims_are_void(redis_bench: RedisBench, raw_redis: Any) -> None:
    transport = await redis_bench.join()
    old = await running(transport)
    await raw_redis.xgroup_destroy(old.stream, "tokenizer")
    assert await transport.renew([old]) == [False]
    assert await transport.commit([transaction(old, PUBLISH, ack=True)]) == [Outcome.FENCED]
    await transport.hand_back([old])
    new = await take_one(transport, "tokenizer")
    assert (new.entry_id, new.payload, new.tries) == (old.entry_id, b"work", 2)
    assert await transport.commit([transaction(old, PUBLISH, ack=True)]) == [Outcome.FENCED]
    assert await transport.commit([transaction(new, END, ack=True)]) == [Outcome.OK]


async def test_an_emptied_server_is_used_again(redis_bench: RedisBench, raw_redis: Any, namespace: str) -> None:
    transport = await redis_bench.join()
    delivery = await running(transport)
    await raw_redis.delete(*[key async for key in raw_redis.scan_iter(match=f"{namespace}:*")])
    assert await transport.commit([transaction(delivery, PUBLISH)]) == [Outcome.ALREADY]
    await running(transport)


async def test_forgotten_scripts_are_sent_again(redis_bench: RedisBench, raw_redis: Any) -> None:
    transport = await redis_bench.join()
    await running(transport)
    await raw_redis.script_flush()
    await transport.admit("s", "interactive", b"work")
    assert len(await transport.receive("tokenizer", 1, block_s=0)) == 1


async def admit_many(transport: Transport, raw_redis: Any, number: int) -> Delivery:
    """Claim so many entries, of which only the last one's lease has ended; return that one."""
    for index in range(number):
        await transport.admit(f"r{index}", "batch", b"work")
    last = (await take(transport, "tokenizer", number))[-1]
    await raw_redis.xclaim(last.stream, "tokenizer", "a", 0, [last.entry_id], idle=60_000, justid=True)
    return last


async def test_one_call_sweeps_past_dozens_of_busy_entries(redis_bench: RedisBench, raw_redis: Any) -> None:
    last = await admit_many(await redis_bench.join("a"), raw_redis, 60)
    b = await redis_bench.join("b")
    assert [d.entry_id for d in await b.receive("tokenizer", 1, block_s=0)] == [last.entry_id]


async def test_a_sweep_goes_on_in_the_next_call(redis_bench: RedisBench, raw_redis: Any) -> None:
    last = await admit_many(await redis_bench.join("a"), raw_redis, 250)
    b = await redis_bench.join("b")
    assert (await take_one(b, "tokenizer")).entry_id == last.entry_id
    assert await b.receive("tokenizer", 1, block_s=0) == []


async def test_a_sweep_that_is_slower_than_its_interval_gets_to_the_end(
    redis_bench: RedisBench, raw_redis: Any, namespace: str, valkey_url: str
) -> None:
    last = await admit_many(await redis_bench.join("a"), raw_redis, 250)
    readings = count(0, 1000)  # a clock on which a new sweep is due at every call
    commands, readers = (Redis.from_url(valkey_url, protocol=2) for _ in range(2))
    options, keys = TransportOptions("b"), Keys(namespace)
    b = RedisStreams(commands, readers, "test", options, keys, monotonic=lambda: float(next(readings)))
    received = [await b.receive("tokenizer", 1, block_s=0) for _ in range(3)]
    await b.close()
    assert [d.entry_id for deliveries in received for d in deliveries] == [last.entry_id]


async def test_renewing_starts_the_lease_again(redis_bench: RedisBench, raw_redis: Any) -> None:
    transport = await redis_bench.join()
    delivery = await running(transport)
    await raw_redis.xclaim(delivery.stream, "tokenizer", "a", 0, [delivery.entry_id], idle=60_000, justid=True)
    assert await transport.renew([delivery]) == [True]
    (pending,) = await raw_redis.xpending_range(delivery.stream, "tokenizer", "-", "+", 10)
    assert pending["time_since_delivered"] < 30_000


async def test_closing_removes_a_consumer_that_holds_nothing(redis_bench: RedisBench, raw_redis: Any) -> None:
    idle, busy = await redis_bench.join("idle"), await redis_bench.join("busy")
    delivery = await running(busy)
    await idle.receive("tokenizer", 1, block_s=0)
    await idle.close()
    await busy.close()
    names = [consumer["name"] for consumer in await raw_redis.xinfo_consumers(delivery.stream, "tokenizer")]
    assert names == [b"busy"]


async def test_two_waiting_receivers_share_what_comes(redis_bench: RedisBench) -> None:
    a, b = await redis_bench.join("a"), await redis_bench.join("b")
    waiting = [asyncio.create_task(t.receive("tokenizer", 1, block_s=DEADLINE_S)) for t in (a, b)]
    for request_id in ("r", "s"):
        await a.admit(request_id, "interactive", request_id.encode())
    received = await asyncio.wait_for(asyncio.gather(*waiting), DEADLINE_S)
    assert sorted(d.payload for deliveries in received for d in deliveries) == [b"r", b"s"]


# Cancelling


async def test_a_cancelled_call_ends_wherever_it_is(redis_bench: RedisBench) -> None:
    transport = await redis_bench.join()
    delivery = await running(transport)

    async def call_for_ever() -> None:
        while True:
            await transport.renew([delivery])
            await transport.receive("tokenizer", 1, block_s=0.001)
            await transport.read_results("r", 0, block_s=0)

    for num_turns in range(200):
        task = asyncio.create_task(call_for_ever())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 1)
    assert await transport.renew([delivery]) == [True]


# A server that comes back


async def test_a_restarted_server_is_found_again_with_its_work(short_directory: Path, server_kind: ServerKind) -> None:
    with running_server(short_directory, server_kind, DURABLE) as first:
        transport = await open_transport(Settings(redis_url=first.url), consumer="a", pool_id=POOL)
        delivery = await running(transport)
        assert await transport.commit([transaction(delivery, Emit(b"a", 0, 1))]) == [Outcome.OK]
        reading = asyncio.create_task(transport.read_results("r", 1, block_s=DEADLINE_S))
        first.kill()
        committing = asyncio.create_task(transport.commit([transaction(delivery, Emit(b"b", 1, 1))]))
        receiving = asyncio.create_task(transport.receive("tokenizer", 1, block_s=DEADLINE_S))
        with running_server(short_directory, server_kind, DURABLE):
            assert await asyncio.wait_for(committing, DEADLINE_S) == [Outcome.OK]
            assert [entry.offset for entry in await asyncio.wait_for(reading, DEADLINE_S)] == [2]
            await transport.admit("s", "batch", b"new")
            assert [d.payload for d in await asyncio.wait_for(receiving, DEADLINE_S)] == [b"new"]
            assert await transport.renew([delivery]) == [True]
            await transport.close()


async def test_a_frozen_server_is_unreachable_and_then_used_again(
    short_directory: Path, server_kind: ServerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(short_directory, server_kind) as server:
        settings = Settings(redis_url=server.url, lease_s=0.1)
        transport = await open_transport(settings, consumer="a")
        delivery = await running(transport)
        with monkeypatch.context() as patched:
            patched.setattr(redis_calls, "ANSWER_TIMEOUT_S", 0.1)
            server.freeze()
            with pytest.raises(ServerUnreachable, match="no answer to commit"):
                await transport.commit([transaction(delivery, Emit(b"a", 0, 1))])
            with pytest.raises(ServerUnreachable, match="no answer to receive"):
                await transport.receive("tokenizer", 1, block_s=0)
            server.thaw()
        again = await take_one(transport, "tokenizer")
        assert again.entry_id == delivery.entry_id
        assert await transport.commit([transaction(delivery, Emit(b"a", 0, 1))]) == [Outcome.FENCED]
        # What a frozen server was sent may have happened when it woke up; whoever goes on looks first.
        num_tokens = len(await transport.read_results("r", 0, block_s=0))
        assert num_tokens in (0, 1)
        assert await transport.commit([transaction(again, Emit(b"b", num_tokens, 1))]) == [Outcome.OK]
        await transport.close()


async def test_leaving_a_dead_server_does_not_wait_for_it(short_directory: Path, server_kind: ServerKind) -> None:
    with running_server(short_directory, server_kind) as server:
        transport = await open_transport(Settings(redis_url=server.url))
        await transport.receive("tokenizer", 1, block_s=0)
        server.kill()
        await asyncio.wait_for(transport.close(), LEASE_S / 2)


# What lies in which key


async def test_state_has_a_ttl_from_its_end_on(redis_bench: RedisBench, raw_redis: Any, namespace: str) -> None:
    keys = Keys(namespace)
    transport = await redis_bench.join()
    delivery = await running(transport)
    effects = (Emit(b"a", 0, 1), AddChunk(0, b"ref"), Plan(2, "batch", b"prefilled"))
    await transport.commit([transaction(delivery, *effects)])
    owned = [keys.request("r"), keys.results("r"), keys.chunks("r", 0)]
    assert [await raw_redis.ttl(key) for key in owned] == [-1, -1, -1]

    await transport.commit([transaction(delivery, END, ack=True)])
    for key in owned[:2]:
        assert 0 < await raw_redis.ttl(key) <= RESULT_TTL_S
    assert not await raw_redis.exists(owned[2])
    state = await raw_redis.hgetall(keys.request("r"))
    assert b"prefilled" not in state.values()


@pytest.mark.parametrize("end", ["ack", "gone", "dead letter"])
async def test_claims_and_tries_go_with_the_entry(redis_bench: RedisBench, raw_redis: Any, end: str) -> None:
    transport = await redis_bench.join()
    delivery = await running(transport)
    names = (Keys.claims(delivery.stream), Keys.tries(delivery.stream))
    assert [await raw_redis.hlen(name) for name in names] == [1, 1]
    if end == "ack":
        await transport.commit([transaction(delivery, PUBLISH, ack=True)])
    elif end == "gone":
        await transport.commit([Transaction(delivery, "nobody", 0, (), ack=False)])
    else:
        await transport.dead_letter(delivery, "reason")
    assert await raw_redis.exists(*names) == 0
    assert await raw_redis.xlen(delivery.stream) == 0


async def test_claims_of_entries_that_somebody_deleted_are_swept(redis_bench: RedisBench, raw_redis: Any) -> None:
    transport = await redis_bench.join(lease_s=BRIEF_LEASE_S)
    delivery = await running(transport)
    await raw_redis.xdel(delivery.stream, delivery.entry_id)
    assert await transport.receive("tokenizer", 1, block_s=0) == []
    deadline = time.monotonic() + DEADLINE_S
    while await raw_redis.exists(Keys.claims(delivery.stream), Keys.tries(delivery.stream)):
        assert await transport.receive("tokenizer", 1, block_s=0.01) == []
        assert time.monotonic() < deadline


async def test_an_entry_of_an_older_attempt_is_refused_and_removed(
    redis_bench: RedisBench, raw_redis: Any, namespace: str
) -> None:
    transport = await redis_bench.join()
    delivery = await running(transport)
    await raw_redis.hset(Keys(namespace).request("r"), "attempt", "1")
    assert await transport.commit([transaction(delivery, PUBLISH)]) == [Outcome.FENCED]
    assert await transport.queue_length("tokenizer", "interactive") == 0
    assert await transport.queue_length("prefill", "interactive") == 0


async def test_dead_letters_are_bounded_and_expire(
    redis_bench: RedisBench, raw_redis: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_streams, "MAX_DEAD", 3)
    transport = await redis_bench.join()
    dead = Keys(namespace).dead("tokenizer")
    for number in range(200):
        await transport.admit(f"r{number}", "batch", b"work")
    for delivery in await take(transport, "tokenizer", 200):
        await transport.dead_letter(delivery, "reason")
    assert 3 <= await raw_redis.xlen(dead) < 200  # the server trims whole nodes of a hundred
    assert await raw_redis.ttl(dead) > 0
    assert MAX_DEAD > 100


async def test_work_streams_are_named_after_the_pool(
    redis_bench: RedisBench, raw_redis: Any, namespace: str, valkey_url: str
) -> None:
    transport = await redis_bench.join()
    delivery = await running(transport)
    raw = Publish("compressor", "batch", b"raw")
    await transport.commit([transaction(delivery, raw)])
    assert await raw_redis.xlen(f"{namespace}:stream:compressor:{POOL}:batch") == 1

    options = TransportOptions("poolless")
    commands, readers = Redis.from_url(valkey_url), Redis.from_url(valkey_url)
    poolless = RedisStreams(commands, readers, "test", options, Keys(namespace))
    with pytest.raises(ValueError, match="pool"):
        await poolless.commit([transaction(delivery, raw)])
    await poolless.close()


async def test_a_foreign_key_stops_one_transaction_only(
    redis_bench: RedisBench, raw_redis: Any, namespace: str
) -> None:
    transport = await redis_bench.join()
    delivery = await running(transport)
    await transport.admit("s", "interactive", b"work")
    other = await take_one(transport, "tokenizer")
    await raw_redis.set(Keys(namespace).results("r"), "not a stream")
    fine = Transaction(other, "s", 0, (PUBLISH,), ack=True)
    with pytest.raises(StateDamaged, match=r"request r.*WRONGTYPE"):
        await transport.commit([transaction(delivery, Emit(b"a", 0, 1)), fine])
    assert await transport.queue_length("prefill", "interactive") == 1
    with pytest.raises(ServerRefused, match="WRONGTYPE"):
        await transport.read_results("r", 0, block_s=0)


@pytest.mark.parametrize("is_ours", [True, False])
async def test_an_admission_whose_reply_is_lost_before_the_server_is_full_is_known(
    valkey_url: str, namespace: str, raw_redis: Any, is_ours: bool
) -> None:
    async with forgetful(valkey_url, namespace) as broken:

        async def fill() -> None:
            if not is_ours:
                await raw_redis.hset(Keys(namespace).request("r"), "ticket", "another call's")
            await raw_redis.config_set("maxmemory", "1mb")

        broken.commands.on_lost_reply = fill
        broken.lose()
        try:
            reply = await broken.transport.admit("r", "interactive", b"work")
        finally:
            await raw_redis.config_set("maxmemory", "0")
        assert reply == (Accepted() if is_ours else Exists())
        assert await broken.transport.queue_length("tokenizer", "interactive") == 1


@pytest.mark.parametrize("end", ["finish", "cancel"])
async def test_a_foreign_key_in_place_of_the_log_keeps_nothing_for_ever(
    redis_bench: RedisBench, raw_redis: Any, namespace: str, end: str
) -> None:
    keys = Keys(namespace)
    transport = await redis_bench.join()
    delivery = await running(transport)
    await raw_redis.set(keys.finished(), "not a stream", ex=60)
    commit = [transaction(delivery, END, ack=True)]
    ending = transport.cancel("r", b"cancelled") if end == "cancel" else transport.commit(commit)
    with pytest.raises((StateDamaged, ServerRefused), match="WRONGTYPE"):
        await ending
    for key in (keys.request("r"), keys.results("r")):
        assert 0 < await raw_redis.ttl(key) <= RESULT_TTL_S
    assert await transport.commit(commit) == [Outcome.GONE]


async def test_a_request_whose_state_has_no_attempt_can_be_cancelled(
    redis_bench: RedisBench, raw_redis: Any, namespace: str
) -> None:
    transport = await redis_bench.join()
    await running(transport)
    await raw_redis.hdel(Keys(namespace).request("r"), "attempt")
    assert await transport.cancel("r", b"cancelled") is True


async def test_a_caller_that_gives_no_attempt_is_admitted_under_0(raw_redis: Any, namespace: str) -> None:
    keys = Keys(namespace)
    names = [keys.request("r"), keys.stream("tokenizer", "batch"), keys.stream("prefill", "batch")]
    assert await raw_redis.eval(redis_calls.script_source("admit"), 3, *names, "ticket", 10, b"work") == b"accepted"
    assert await raw_redis.hget(names[0], "attempt") == b"0"


async def test_a_closed_transport_sends_nothing_more(valkey_url: str, namespace: str, raw_redis: Any) -> None:
    num_before = len(await raw_redis.client_list())
    transport = await open_transport(Settings(redis_url=valkey_url, namespace=namespace))
    await running(transport)
    await transport.close()
    for call in (
        transport.admit("s", "batch", b"work"),
        transport.receive("tokenizer", 1, 0),
        transport.read_results("r", 0, 0),
        transport.queue_length("tokenizer", "batch"),
    ):
        with pytest.raises(TransportClosed):
            await call
    assert len(await raw_redis.client_list()) == num_before
    await transport.close()


async def test_of_an_entry_that_nobody_could_read_only_the_beginning_is_sent(
    redis_bench: RedisBench, raw_redis: Any, namespace: str
) -> None:
    transport = await redis_bench.join()
    await raw_redis.xadd(Keys(namespace).stream("tokenizer", "batch"), {"p": b"x" * (MAX_BYTES + 1)})
    delivery = await take_one(transport, "tokenizer")
    assert delivery.payload == b"x" * 1024
    await transport.dead_letter(delivery, "too large")
    assert await redis_bench.dead_letters("tokenizer") == [(b"x" * 1024, "too large")]
