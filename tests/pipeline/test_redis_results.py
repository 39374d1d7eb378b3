"""Many readers, few reads: who waits at the same moment shares one, and nobody waits for another."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline import redis_results
from pipeline.errors import ServerRefused, TransportClosed
from pipeline.keys import Keys
from pipeline.redis_calls import read_stream
from pipeline.redis_results import MIN_PAGE
from pipeline.transport import AFTER_ALL, Accepted, Delivery, Emit, Finish, Outcome, ResultEntry, Transaction, Transport
from tests.ops.waiting import holds
from tests.pipeline.benches import DEADLINE_S, RedisBench, soon, take

Reading = asyncio.Task[list[ResultEntry]]
LONG_S = 3 * DEADLINE_S  # longer than `soon` waits: who gets something only when this is over is too late


class Work:
    """Requests that are being worked on, by id."""

    def __init__(self, transport: Transport, deliveries: dict[str, Delivery]) -> None:
        self._transport = transport
        self._deliveries = deliveries
        self.ids = list(deliveries)

    @classmethod
    async def of(cls, transport: Transport, num: int) -> "Work":
        for number in range(num):
            assert await transport.admit(f"r{number}", "interactive", f"r{number}".encode()) == Accepted()
        deliveries = {d.payload.decode(): d for d in await take(transport, "tokenizer", num)}
        return cls(transport, dict(sorted(deliveries.items(), key=lambda item: int(item[0][1:]))))

    async def emit(self, *ids: str, first_index: int = 0) -> None:
        """Commit one token of each, in one call."""
        effect = Emit(b"token", first_index, 1)
        steps = [Transaction(self._deliveries[name], name, 0, (effect,), ack=False) for name in ids]
        assert await self._transport.commit(steps) == [Outcome.OK] * len(steps)

    async def finish(self, name: str, *effects: Emit) -> None:
        """Commit the end of one, and what comes before it."""
        step = Transaction(self._deliveries[name], name, 0, (*effects, Finish(b"end", "finished")), ack=True)
        assert await self._transport.commit([step]) == [Outcome.OK]


def reading(transport: Transport, name: str, after: int = 0) -> Reading:
    return asyncio.create_task(transport.read_results(name, after, LONG_S))


async def blocked(raw: Any, num: int) -> None:
    """Wait until so many clients wait on the server."""
    while (await raw.info("clients"))["blocked_clients"] != num:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0.001)


async def offsets(readers: list[Reading]) -> list[list[int | None]]:
    return [[entry.offset for entry in entries] for entries in await soon(asyncio.gather(*readers))]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many streams each read had so far."""
    made: list[int] = []

    async def counted(readers: Redis, after: Mapping[str, str | bytes], *rest: Any) -> list[Any]:
        made.append(len(after))
        return await read_stream(readers, after, *rest)

    monkeypatch.setattr(redis_results, "read_stream", counted)
    return made


async def test_who_waits_at_the_same_moment_shares_a_read(
    redis_bench: RedisBench, raw_redis: Any, reads: list[int]
) -> None:
    transport = await redis_bench.join()
    work = await Work.of(transport, 40)
    readers = [reading(transport, name) for name in work.ids]
    await soon(blocked(raw_redis, 1))
    await work.emit(*work.ids)
    assert await offsets(readers) == [[1]] * 40
    assert min(reads) >= 39, "older servers wake a reader for the first stream, and the others are in its next read"


async def test_a_newcomer_waits_for_nobody(redis_bench: RedisBench, raw_redis: Any) -> None:
    transport = await redis_bench.join()
    work = await Work.of(transport, 2)
    quiet = reading(transport, "r0")
    await soon(blocked(raw_redis, 1))
    newcomer = reading(transport, "r1")
    await work.emit("r1")
    assert await offsets([newcomer]) == [[1]]
    assert not quiet.done()
    await work.emit("r0")
    assert await offsets([quiet]) == [[1]]


async def test_reads_of_different_moments_become_one(redis_bench: RedisBench, reads: list[int]) -> None:
    transport = await redis_bench.join()
    work = await Work.of(transport, 8)
    readers: list[Reading] = []
    for name in work.ids:
        readers.append(reading(transport, name))
        num_reads = len(reads)
        await soon(holds(lambda before=num_reads: len(reads) > before))
    await soon(holds(lambda: 8 in reads))
    await work.emit(*work.ids)
    assert await offsets(readers) == [[1]] * 8


async def test_two_readers_of_one_request_each_get_what_is_behind_them(redis_bench: RedisBench) -> None:
    transport = await redis_bench.join()
    work = await Work.of(transport, 1)
    await work.emit("r0")
    ahead, behind = reading(transport, "r0", after=1), reading(transport, "r0", after=0)
    assert await offsets([behind]) == [[1]]
    await work.emit("r0", first_index=1)
    assert await offsets([ahead]) == [[2]]


async def test_readers_at_the_same_place_are_one_stream_of_a_read(redis_bench: RedisBench, reads: list[int]) -> None:
    transport = await redis_bench.join()
    work = await Work.of(transport, 1)
    readers = [reading(transport, "r0") for _ in range(100)]
    await soon(holds(lambda: bool(reads)))
    await work.emit("r0")
    assert await offsets(readers) == [[1]] * 100
    assert set(reads) == {1}


async def test_tokens_of_one_do_not_cost_a_read_of_all_who_wait(
    redis_bench: RedisBench, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    monkeypatch.setattr(redis_results, "TICK_S", 1000.0)
    transport = await redis_bench.join()
    work = await Work.of(transport, 20)
    quiet = [reading(transport, name) for name in work.ids[1:]]
    await soon(holds(lambda: reads == [19]))
    for index in range(3):
        reader = reading(transport, "r0", after=index)
        await work.emit("r0", first_index=index)
        assert await offsets([reader]) == [[index + 1]]
    assert reads == [19, 1, 1, 1]
    await work.emit("r1")  # one of the quiet ones is answered, and the others go on without it
    assert await offsets(quiet[:1]) == [[1]]
    await soon(holds(lambda: reads[4:] == [18]))


async def test_who_waits_for_the_end_only_is_no_burden_on_each_token(
    redis_bench: RedisBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[float | None] = []

    async def seen(readers: Redis, after: Mapping[str, str | bytes], count: int, block_s: float | None) -> list[Any]:
        blocks.append(block_s)
        return await read_stream(readers, after, count, block_s)

    monkeypatch.setattr(redis_results, "read_stream", seen)
    transport = await redis_bench.join()
    work = await Work.of(transport, 2)
    readers = [reading(transport, name, after=AFTER_ALL) for name in work.ids]
    await soon(holds(lambda: bool(blocks)))
    for name in work.ids:
        await work.finish(name, Emit(b"token", 0, 1))
    assert await offsets(readers) == [[None]] * 2
    assert set(blocks) == {None}


@pytest.mark.parametrize(("num_reads", "num_streams"), [(1, 1), (1, 3), (2, 2)])
async def test_more_readers_than_reads_take_turns(
    redis_bench: RedisBench, raw_redis: Any, monkeypatch: pytest.MonkeyPatch, num_reads: int, num_streams: int
) -> None:
    monkeypatch.setattr(redis_results, "MAX_READS", num_reads)
    monkeypatch.setattr(redis_results, "STREAMS_PER_READ", num_streams)
    monkeypatch.setattr(redis_results, "TICK_S", 0.01)
    transport = await redis_bench.join()
    work = await Work.of(transport, 7)
    readers = [reading(transport, name) for name in work.ids]
    await soon(blocked(raw_redis, num_reads))
    for name in work.ids:
        await work.emit(name)
    assert await offsets(readers) == [[1]] * 7


async def test_a_key_that_is_no_stream_is_refused_to_its_reader_alone(
    redis_bench: RedisBench, raw_redis: Any, namespace: str
) -> None:
    transport = await redis_bench.join()
    work = await Work.of(transport, 4)
    await raw_redis.set(Keys(namespace).results("r1"), "not a stream")
    readers = {name: reading(transport, name) for name in work.ids}
    with pytest.raises(ServerRefused, match="WRONGTYPE"):
        await soon(readers.pop("r1"))
    await work.emit(*readers)
    assert await offsets(list(readers.values())) == [[1]] * 3


async def test_a_refusal_is_not_taken_for_that_of_a_neighbour_who_has_left(
    redis_bench: RedisBench, raw_redis: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, left = asyncio.Event(), asyncio.Event()

    async def slow(*words: Any) -> list[Any]:
        sent.set()
        await left.wait()
        return await read_stream(*words)

    monkeypatch.setattr(redis_results, "read_stream", slow)
    transport = await redis_bench.join()
    work = await Work.of(transport, 2)
    await raw_redis.set(Keys(namespace).results("r1"), "not a stream")
    good, bad = reading(transport, "r0"), reading(transport, "r1")
    await soon(sent.wait())
    bad.cancel()
    left.set()
    await work.emit("r0")
    assert await offsets([good]) == [[1]]


async def test_long_results_that_are_read_together_come_in_pages(redis_bench: RedisBench) -> None:
    transport = await redis_bench.join()
    work = await Work.of(transport, 40)
    num_tokens = 10 * MIN_PAGE
    for name in work.ids:
        await work.finish(name, *(Emit(str(index).encode(), index, 1) for index in range(num_tokens)))

    async def read_all(name: str) -> list[int | None]:
        read: list[int | None] = []
        while not read or read[-1] is not None:
            entries = await transport.read_results(name, read[-1] or 0 if read else 0, LONG_S)
            assert len(entries) < num_tokens
            read += [entry.offset for entry in entries]
        return read

    whole = [*range(1, num_tokens + 1), None]
    assert await soon(asyncio.gather(*(read_all(name) for name in work.ids))) == [whole] * 40


async def test_a_reader_that_is_cancelled_takes_nobody_along(redis_bench: RedisBench, raw_redis: Any) -> None:
    transport = await redis_bench.join()
    work = await Work.of(transport, 3)
    readers = [reading(transport, name) for name in work.ids]
    await soon(blocked(raw_redis, 1))
    readers[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await readers[1]
    await work.emit(*work.ids)
    assert await offsets([readers[0], readers[2]]) == [[1], [1]]


async def test_closing_ends_all_who_wait(
    redis_bench: RedisBench, raw_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_results, "MAX_READS", 1)
    monkeypatch.setattr(redis_results, "STREAMS_PER_READ", 2)
    transport = await redis_bench.join()
    work = await Work.of(transport, 5)
    readers = [reading(transport, name) for name in work.ids]
    await soon(blocked(raw_redis, 1))
    await soon(transport.close())
    errors = await soon(asyncio.gather(*readers, return_exceptions=True))
    assert {type(error) for error in errors} == {TransportClosed}
    assert len({id(error) for error in errors}) == 5, "one that is raised in five places has the frames of all"
    with pytest.raises(TransportClosed):
        await soon(transport.read_results("r0", 0, LONG_S))
