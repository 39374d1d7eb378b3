"""Both transports do the same: random histories, step by step, on the scripts and on their Python twin.

The contract tests say what must happen in the cases somebody thought of; this looks at the others.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import count
from typing import cast

import pytest
from redis.asyncio import Redis

from pipeline.errors import UnknownRequest
from pipeline.keys import POOLED_STAGES, PRIORITIES, STAGES, Keys, lanes_of
from pipeline.memory import MemoryTransport
from pipeline.redis_receive import START
from pipeline.redis_streams import RedisStreams
from pipeline.transport import (
    END_STATES,
    AddChunk,
    DeadLetter,
    Delivery,
    Effect,
    Emit,
    Finish,
    GiveCredit,
    Plan,
    Publish,
    Restart,
    TakeCredit,
    Transaction,
    Transport,
    TransportOptions,
)
from tests.pipeline.benches import POOL, MemoryBench, RedisBench
from tests.pipeline.pools import credits_of

NUM_STEPS = 200
NUM_RECENT = 5  # deliveries that a step may be about: older ones are mostly gone
OTHER_POOL = "pool-2"
CONSUMERS = {"a": POOL, "b": POOL, "c": OTHER_POOL}
REQUESTS = ("q", "r", "s", "t", "u", "v", "w")


class Side:
    """One implementation, its two consumers, and every delivery they ever got, in order."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.transports = transports
        self.received: list[tuple[int, Delivery]] = []

    async def expire(self, delivery: Delivery) -> None:
        raise NotImplementedError

    async def receive(self, who: int, stage: str, max_items: int) -> list[tuple[bytes, int]]:
        deliveries = await self.transports[who].receive(stage, max_items, block_s=0)
        self.received += [(who, delivery) for delivery in deliveries]
        return [(delivery.payload, delivery.tries) for delivery in deliveries]


class RedisSide(Side):
    def __init__(self, transports: Sequence[Transport], raw: Redis) -> None:
        super().__init__(transports)
        self._raw = raw

    async def expire(self, delivery: Delivery) -> None:
        pending = await self._raw.xpending_range(
            delivery.stream, delivery.stage, delivery.entry_id, delivery.entry_id, 1
        )
        for entry in pending:
            await self._raw.xclaim(
                delivery.stream, delivery.stage, entry["consumer"], 0, [delivery.entry_id], idle=60_000, justid=True
            )

    async def receive(self, who: int, stage: str, max_items: int) -> list[tuple[bytes, int]]:
        """Sweep from the start, as memory does: where a sweep goes on is tested elsewhere."""
        receiver = cast("RedisStreams", self.transports[who])._receivers.get(stage)
        if receiver is not None:
            receiver._cursors = [START for _ in receiver.streams]
        return await super().receive(who, stage, max_items)


class MemorySide(Side):
    def __init__(self, transports: Sequence[Transport], bench: MemoryBench) -> None:
        super().__init__(transports)
        self._bench = bench

    async def expire(self, delivery: Delivery) -> None:
        entry = self._bench.queues.broker.streams[delivery.stream].get(delivery.entry_id)
        if entry is not None:
            entry.renewed_at = float("-inf")


class History:
    """Draws steps; the same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def steps(self) -> list[tuple[str, float]]:
        kinds = ("admit", "receive", "commit", "renew", "hand back", "bury", "expire", "cancel")
        weights = (2, 6, 10, 1, 0.7, 0.3, 2, 0.5)
        return [(kind, self._random.random()) for kind in self._random.choices(kinds, weights, k=NUM_STEPS)]


def identity(payload: bytes) -> tuple[str, int]:
    """Request and attempt of an entry; attempt 0 is left out."""
    request_id, _, attempt = payload.decode().partition(" ")
    return request_id, int(attempt or 0)


def draw_effects(rng: random.Random, stage: str, payload: bytes) -> tuple[Effect, ...]:
    if rng.random() < 0.06:
        end = Finish(b"end", rng.choice(END_STATES))
        return (end, DeadLetter("why")) if rng.random() < 0.3 else (end,)
    first = rng.choice((0, 0, 1, 2, 3))
    publish = Publish(rng.choice((*STAGES, "prefill")), rng.choice(PRIORITIES), payload)
    choices: list[tuple[Effect, ...]] = [
        (publish,),
        (publish, publish),
        (Emit(b"d", first, rng.choice((1, 2))),),
        (Emit(b"d", first, 1), Emit(b"e", first + 1, 1), publish),
        (AddChunk(rng.randrange(3), rng.choice((b"x", b"x", b"y")), rng.random() < 0.5),),
        (AddChunk(0, b"x"), AddChunk(1, b"x")),
        (Plan(rng.choice((1, 2)), rng.choice(PRIORITIES), payload),),
        (GiveCredit(),),
    ]
    if stage == "prefill":  # whose entries credits are tied to
        credit = TakeCredit(rng.choice((1, 3, 5)), max_bytes=rng.choice((9, 9, 5)), max_requests=rng.choice((3, 3, 1)))
        choices += [(credit,)] * 3 + [(Emit(b"d", first, 1), credit), (credit, Emit(b"d", first, 1))]
    return rng.choice(choices)


def draw_transaction(rng: random.Random, delivery: Delivery) -> Transaction:
    request_id, attempt = identity(delivery.payload)
    request_id = request_id if rng.random() < 0.95 else "nobody"
    attempt = attempt + 1 if rng.random() < 0.03 else attempt
    if rng.random() < 0.05:
        later = attempt + rng.choice((1, 2))
        restart = Restart(later, b"%s %d" % (request_id.encode(), later))
        return Transaction(delivery, request_id, attempt, (restart,), ack=True)
    effects = draw_effects(rng, delivery.stage, delivery.payload)
    return Transaction(delivery, request_id, attempt, effects, ack=rng.random() < 0.15)


async def take_step(side: Side, kind: str, seed: float) -> object:
    rng = random.Random(seed)
    if kind == "admit":
        request_id = rng.choice(REQUESTS)
        return await side.transports[0].admit(request_id, rng.choice(PRIORITIES), request_id.encode())
    if kind == "cancel":
        return await cancel(side.transports[rng.randrange(len(CONSUMERS))], rng.choice((*REQUESTS, "nobody")))
    if kind == "receive":
        return await side.receive(rng.randrange(len(CONSUMERS)), rng.choice(STAGES), rng.choice((1, 2, 5)))
    if not side.received:
        return None
    recent = side.received[-NUM_RECENT:]
    holder, delivery = rng.choice(recent)
    transport = side.transports[holder]
    if kind == "commit":
        own = [delivery for who, delivery in recent if who == holder]
        drawn = rng.choices(own, k=rng.choice((1, 1, 3)))
        return await transport.commit([draw_transaction(rng, delivery) for delivery in drawn])
    if kind == "renew":
        return await transport.renew([delivery, delivery])
    if kind == "hand back":
        return await transport.hand_back([delivery])
    if kind == "bury":
        return await transport.dead_letter(delivery, "buried")
    return await side.expire(delivery)


async def cancel(transport: Transport, request_id: str) -> bool | str:
    try:
        return await transport.cancel(request_id, b"cancelled")
    except UnknownRequest as error:
        return error.request_id


async def state_of(transports: Sequence[Transport], attempts: Mapping[str, int]) -> object:
    """What two transports of two pools see: lengths of queues, and chunks of requests by their attempts."""
    lengths = [await transports[0].queue_length(stage, lane) for stage in STAGES for lane in lanes_of(stage)]
    lengths += [await transports[1].queue_length(stage, lane) for stage in POOLED_STAGES for lane in lanes_of(stage)]
    chunks = [await transports[0].chunks(request_id, attempts.get(request_id, 0)) for request_id in REQUESTS]
    return lengths, chunks


@pytest.mark.parametrize("seed", range(20))
async def test_both_transports_take_the_same_steps(
    seed: int, redis_bench: RedisBench, raw_redis: Redis, valkey_url: str, namespace: str
) -> None:
    readings = count(0, 1000)  # a sweep is due at every call, as in memory
    opened = [
        RedisStreams(
            Redis.from_url(valkey_url, protocol=2),
            Redis.from_url(valkey_url, protocol=2),
            "test",
            TransportOptions(name, pool_id, max_queue=8),
            Keys(namespace),
            lambda: float(next(readings)),
        )
        for name, pool_id in CONSUMERS.items()
    ]
    memory = MemoryBench()
    twins = [
        MemoryTransport(memory.queues, TransportOptions(name, pool_id, max_queue=8))
        for name, pool_id in CONSUMERS.items()
    ]
    sides = RedisSide(opened, raw_redis), MemorySide(twins, memory)
    try:
        for number, (kind, step_seed) in enumerate(History(seed).steps()):
            real, twin = [await take_step(side, kind, step_seed) for side in sides]
            assert real == twin, f"step {number}, {kind}"
            attempts = {name: request.attempt for name, request in memory.queues.broker.requests().items()}
            after = f"after step {number}, {kind}"
            assert await state_of(opened[1:], attempts) == await state_of(twins[1:], attempts), after
            for pool_id in (POOL, OTHER_POOL):
                assert await credits_of(redis_bench, pool_id) == await credits_of(memory, pool_id), after
        assert await opened[0].finished(NUM_STEPS) == await twins[0].finished(NUM_STEPS)
        for stage in STAGES:
            assert await redis_bench.dead_letters(stage) == await memory.dead_letters(stage)
        for request_id in REQUESTS:
            assert await redis_bench.state_of(request_id) == await memory.state_of(request_id)
            if await memory.state_of(request_id):
                assert await opened[0].read_results(request_id, 0, 0) == await twins[0].read_results(request_id, 0, 0)
    finally:
        for transport in opened:
            await transport.close()
