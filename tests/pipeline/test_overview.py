"""Looking at a stack on a real server: everything that is there is seen, and nothing else."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kv_store.blob import BlobKind, BlobMeta
from kv_store.pool import FilePool, PoolUsage
from pipeline import wire
from pipeline.boundaries import FIRST_TOKEN, SUBMITTED
from pipeline.counters import DIVERGENCES, KV_MISSING
from pipeline.finished_log import EndedRequest, output_tokens_per_s
from pipeline.keys import Keys
from pipeline.messages import Failure, FinishReason, Stamp, Terminal, Usage
from pipeline.overview import Observer
from pipeline.queue_state import QUEUES
from pipeline.transport import Delivery, Emit, Finish, Transaction, Transport
from pipeline.upkeep import Upkeep
from tests.pipeline.benches import POOL, RedisBench, take, take_one

META = BlobMeta(
    kind=BlobKind.PACKED,
    codec_id=1,
    fingerprint=bytes(32),
    content_address=bytes(32),
    start_token=0,
    num_tokens=1,
    attempt=0,
)


@pytest.fixture
def observer(raw_redis: Redis, namespace: str) -> Observer:
    return Observer(raw_redis, "unix:///somewhere", Keys(namespace))


@pytest.fixture
async def transport(redis_bench: RedisBench) -> Transport:
    return await redis_bench.join("host-a:4711:abcd")


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[FilePool]:
    with FilePool.open(tmp_path / "pool", 1 << 20) as pool:
        yield pool


def finish(reason: FinishReason, num_tokens: int = 0, stamps: tuple[Stamp, ...] = ()) -> Finish:
    usage = Usage(prompt_tokens=1, completion_tokens=num_tokens) if num_tokens else None
    failure = Failure(stage="prefill", code="c", message="m", retryable=False) if reason == "error" else None
    terminal = Terminal(finish_reason=reason, usage=usage, failure=failure, stamps=stamps)
    return Finish(wire.pack(terminal), "failed" if reason == "error" else "finished")


async def end(transport: Transport, delivery: Delivery, request_id: str, finish: Finish) -> None:
    effects = (Emit(b"delta", 0, 1), finish)
    await transport.commit([Transaction(delivery, request_id, 0, effects, ack=True)])


async def test_a_server_without_a_stack_has_nothing(observer: Observer, namespace: str) -> None:
    overview = await observer.look()
    assert overview.namespace == namespace
    assert overview.server.address == "unix:///somewhere"
    assert overview.server.version.startswith(("Valkey ", "Redis "))
    assert overview.server.used_memory_bytes > 0
    assert overview.server.max_memory_bytes is None
    assert (overview.processes, overview.kv, overview.dead, overview.ended) == ((), None, {}, ())
    assert {queue.stage for queue in overview.queues} == {"tokenizer", "prefill"}


async def test_processes_are_those_whose_registration_lives(
    observer: Observer, transport: Transport, redis_bench: RedisBench, raw_redis: Redis, namespace: str
) -> None:
    await transport.register("prefill", b"info", 15)
    chosen = await redis_bench.join("by-hand")
    await chosen.register("decode", b"info", 15)
    gone = await redis_bench.join("host-a:1:gone")
    await gone.register("decode", b"info", 15)
    await raw_redis.delete(Keys(namespace).process("decode", "host-a:1:gone"))  # as time does
    first, second = (await observer.look()).processes
    assert (first.stage, first.consumer, first.host, first.pid) == ("decode", "by-hand", None, None)
    assert (second.stage, second.host, second.pid) == ("prefill", "host-a", 4711)
    assert 0 < first.expires_in_s <= 15


async def test_queues_and_dead_letters(observer: Observer, transport: Transport) -> None:
    for number in range(3):
        await transport.admit(f"r{number}", "interactive", b"payload")
    waiting, *_ = await take(transport, "tokenizer", 2)
    await transport.dead_letter(waiting, "it cannot be read")
    overview = await observer.look()
    assert (overview.num_waiting("tokenizer"), overview.num_held("tokenizer")) == (1, 1)
    assert overview.dead == {"tokenizer": 1}


async def test_the_pool_says_what_it_holds_and_the_sampler_what_it_may(
    raw_redis: Redis, observer: Observer, pool: FilePool, namespace: str
) -> None:
    pool.write("blob_of_this_test", META, [b"bytes"])
    local = Observer(raw_redis, "x", Keys(namespace), pool)
    before = (await local.look()).kv
    assert before is not None
    assert (before.pool_id, before.num_blobs, before.quota_bytes) == (pool.pool_id, 1, 1 << 20)
    assert before.used_bytes == pool.usage().used_bytes
    assert len((await local.look()).queues) == len(QUEUES)
    await observer.samples.take("s", pool.pool_id, PoolUsage(num_blobs=7, used_bytes=1, quota_bytes=5_000))
    after = (await local.look()).kv
    assert after is not None
    assert (after.num_blobs, after.quota_bytes) == (1, 5_000)
    from_afar = (await observer.look()).kv
    assert from_afar is not None
    assert (from_afar.pool_id, from_afar.num_blobs, from_afar.quota_bytes) == (pool.pool_id, 7, 5_000)


async def test_a_pool_that_is_not_the_stacks_is_not_taken_for_it(
    raw_redis: Redis, observer: Observer, pool: FilePool, namespace: str
) -> None:
    await observer.samples.take("s", POOL, PoolUsage(num_blobs=7, used_bytes=1, quota_bytes=5_000))
    kv = (await Observer(raw_redis, "x", Keys(namespace), pool).look()).kv
    assert kv is not None
    assert kv.pool_id == POOL


async def test_old_samples_say_nothing_about_now(raw_redis: Redis, observer: Observer, namespace: str) -> None:
    await raw_redis.xadd(Keys(namespace).samples(), {"pool": "p", "kv": "1 2 3"}, id="1000-0")
    assert (await observer.look()).kv is None
    await raw_redis.delete(Keys(namespace).samples())


async def test_requests_that_ended_are_seen_once_each(
    observer: Observer, transport: Transport, raw_redis: Redis, namespace: str
) -> None:
    stamps = (Stamp(boundary=SUBMITTED, at_us=1_000), Stamp(boundary=FIRST_TOKEN, at_us=6_000))
    for request_id, ending in (("a", finish("stop", 9, stamps)), ("b", finish("error"))):
        await transport.admit(request_id, "batch", b"payload")
        await end(transport, await take_one(transport, "tokenizer"), request_id, ending)
    await transport.admit("c", "batch", b"payload")
    await transport.cancel("c", wire.pack(Terminal(finish_reason="cancelled")))
    await raw_redis.xadd(Keys(namespace).finished(), {"id": "z", "p": b"of another version"})
    overview = await observer.look()
    assert [(one.request_id, one.state) for one in overview.ended] == [
        ("a", "finished"),
        ("b", "failed"),
        ("c", "cancelled"),
    ]
    first = overview.ended[0]
    assert (first.num_output_tokens, first.first_token_us, first.ttft_ms) == (9, 6_000, 5.0)
    assert (overview.num_ended("finished"), overview.num_ended("failed"), overview.num_ended("cancelled")) == (1, 1, 1)
    assert (await observer.look()).ended == overview.ended
    await take_one(transport, "tokenizer")  # that of c, which nobody has taken yet
    await raw_redis.delete(Keys(namespace).finished())
    assert (await observer.look()).ended == overview.ended


async def test_counters_that_are_not_zero(observer: Observer, raw_redis: Redis, namespace: str) -> None:
    upkeep = Upkeep(raw_redis, "x", Keys(namespace))
    await upkeep.count({KV_MISSING: 2, DIVERGENCES: 0}, "ticket")
    assert (await observer.look()).counters == {KV_MISSING: 2}


@pytest.mark.parametrize(
    ("began_s", "ended_s", "tokens"),
    [
        (95, 99, 40),  # all of it within the window
        (80, 100, 20),  # half of it
        (70, 90, 0),  # none
        (None, 99, 40),  # nobody knows when it began
        (120, 99, 40),  # a clock that is ahead
    ],
)
def test_tokens_count_evenly_from_the_first_one_to_the_end(began_s: int | None, ended_s: int, tokens: int) -> None:
    first_us = None if began_s is None else 1_000_000 * began_s
    request = EndedRequest("r", 1_000_000 * ended_s, "finished", 40, first_us)
    assert output_tokens_per_s([request], 100_000_000, 10) == pytest.approx(tokens / 10)


async def test_what_is_promised_of_the_pool_is_the_sum_of_its_credits(
    raw_redis: Redis, observer: Observer, namespace: str
) -> None:
    await observer.samples.take("s", POOL, PoolUsage(num_blobs=7, used_bytes=1, quota_bytes=5_000))
    await raw_redis.execute_command("HSET", Keys(namespace).credits(POOL), "a", "0:1000", "b:c", "17:234")
    kv = (await observer.look()).kv
    assert kv is not None
    assert (kv.promised_bytes, kv.num_promised) == (1_234, 2)
    await raw_redis.delete(Keys(namespace).credits(POOL))
