"""Samples on a real server: what queues look like, who may sample, and what is kept."""

import pytest
from redis.asyncio import Redis

from kv_store.pool import PoolUsage
from pipeline.errors import StateDamaged
from pipeline.keys import Keys
from pipeline.queue_state import QUEUES, QueueState, read_queues
from pipeline.redis_calls import RedisCalls
from pipeline.samples import SampleLog
from pipeline.transport import Publish, Transaction, Transport
from tests.pipeline.benches import POOL, RedisBench, take

USAGE = PoolUsage(num_blobs=3, used_bytes=1_000, quota_bytes=5_000)
LONG_AGO = "1000-0"
ALWAYS = (0, 2**55)


@pytest.fixture
def log(raw_redis: Redis, namespace: str) -> SampleLog:
    return SampleLog(raw_redis, "test", Keys(namespace))


@pytest.fixture
async def transport(redis_bench: RedisBench) -> Transport:
    return await redis_bench.join()


async def admit(transport: Transport, num: int) -> None:
    for number in range(num):
        await transport.admit(f"r{number}", "batch", b"payload")


async def test_a_sample_holds_what_waits_and_what_is_worked_on(
    log: SampleLog, transport: Transport, redis_bench: RedisBench
) -> None:
    await admit(transport, 5)
    other = await redis_bench.join("b")
    await take(transport, "tokenizer", 2)
    await take(other, "tokenizer", 1)
    assert await log.take("s", POOL, USAGE) == 5
    [sample] = await log.read(*ALWAYS)
    assert (sample.pool_id, sample.kv_used_bytes, sample.kv_quota_bytes, sample.num_blobs) == (POOL, 1_000, 5_000, 3)
    [queue] = sample.queues
    assert (queue.stage, queue.priority) == ("tokenizer", "batch")
    assert (queue.num_entries, queue.num_held, queue.num_holders, queue.num_waiting) == (5, 3, 2, 2)
    assert (sample.num_waiting("tokenizer"), sample.num_held("tokenizer")) == (2, 3)
    assert sample.num_waiting("decode") == 0


async def test_entries_that_were_handed_back_wait(log: SampleLog, transport: Transport) -> None:
    await admit(transport, 2)
    await transport.hand_back(await take(transport, "tokenizer", 2))
    await log.take("s", POOL, USAGE)
    [sample] = await log.read(*ALWAYS)
    assert (sample.queues[0].num_held, sample.queues[0].num_holders) == (0, 0)


async def test_the_age_is_that_of_the_oldest_entry(raw_redis: Redis, log: SampleLog, namespace: str) -> None:
    stream = Keys(namespace).stream("decode", "interactive", POOL)
    seconds, _ = await raw_redis.time()
    await raw_redis.xadd(stream, {"p": b""}, id=f"{1000 * (seconds - 100)}-0")
    await raw_redis.xadd(stream, {"p": b""})
    await log.take("s", POOL, USAGE)
    [sample] = await log.read(*ALWAYS)
    assert 99 <= sample.queues[0].oldest_s < 160
    await raw_redis.delete(stream)


async def test_every_queue_of_the_pool_is_sampled(log: SampleLog, transport: Transport) -> None:
    await admit(transport, 1)
    [delivery] = await take(transport, "tokenizer")
    effects = tuple(Publish(stage, "interactive", b"") for stage in ("prefill", "compressor", "decode"))
    await transport.commit([Transaction(delivery, "r0", 0, effects, ack=True)])
    assert await log.take("s", POOL, USAGE) == 3
    [sample] = await log.read(*ALWAYS)
    assert [queue.stage for queue in sample.queues] == ["prefill", "compressor", "decode"]
    for stage in ("prefill", "compressor", "decode"):
        [left] = await take(transport, stage)
        await transport.dead_letter(left, "the test is over")


async def test_one_samples_at_a_time_and_another_takes_over(raw_redis: Redis, log: SampleLog, namespace: str) -> None:
    assert await log.take("first", POOL, USAGE) == 0
    assert await log.take("second", POOL, USAGE) is None
    assert await log.take("first", POOL, USAGE) == 0
    assert await log.take("second", "another-pool", USAGE) == 0
    lock = Keys(namespace).sampler(POOL)
    assert 0 < await raw_redis.pttl(lock) <= 3_000
    await raw_redis.delete(lock)  # as time does
    assert await log.take("second", POOL, USAGE) == 0
    assert await log.take("first", POOL, USAGE) is None
    assert len(await log.read(*ALWAYS)) == 4


async def test_samples_are_read_by_time_and_expire(raw_redis: Redis, log: SampleLog, namespace: str) -> None:
    assert await log.last() is None
    assert await log.read(*ALWAYS) == []
    await raw_redis.xadd(Keys(namespace).samples(), {"pool": "p", "kv": "1 2 3"}, id=LONG_AGO)
    await log.take("s", POOL, USAGE)
    old, new = await log.read(*ALWAYS)
    assert old.at_us == 1_000_000
    assert await log.read(999_999, 1_000_000) == [old]
    assert await log.read(1_000_001, 2_000_000) == [old]  # to the millisecond
    assert await log.read(2_000_000, 3_000_000) == []
    assert await log.last() == new
    assert 0 < await raw_redis.ttl(Keys(namespace).samples()) <= 3_600


@pytest.mark.parametrize("fields", [{"kv": "1 2 3"}, {"pool": "p", "kv": "1 2"}, {"pool": "p", "kv": "a b c"}])
async def test_a_foreign_entry_is_reported(
    raw_redis: Redis, log: SampleLog, namespace: str, fields: dict[str, str]
) -> None:
    await raw_redis.xadd(Keys(namespace).samples(), fields)  # pyright: ignore[reportArgumentType] - str is enough
    with pytest.raises(StateDamaged, match="sample"):
        await log.last()
    await raw_redis.delete(Keys(namespace).samples())


async def test_queues_can_be_looked_at_without_leaving_a_sample(
    raw_redis: Redis, log: SampleLog, transport: Transport, namespace: str
) -> None:
    await admit(transport, 3)
    await take(transport, "tokenizer", 1)
    queues = await read_queues(RedisCalls(raw_redis, "test", 0), Keys(namespace), POOL)
    assert len(queues) == len(QUEUES)
    assert queues[0] == QueueState("tokenizer", "interactive")
    assert (queues[1].num_entries, queues[1].num_held, queues[1].num_holders) == (3, 1, 1)
    without_pool = await read_queues(RedisCalls(raw_redis, "test", 0), Keys(namespace), None)
    assert {queue.stage for queue in without_pool} == {"tokenizer", "prefill"}
    assert await log.last() is None
