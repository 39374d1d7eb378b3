"""Streaming: exactly the tokens from any offset on, as often as wanted, whatever happens to the server meanwhile."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline.client import Client, Delta, Stalled, Terminal
from pipeline.connect import open_transport
from pipeline.errors import InvalidRequest, ServerUnreachable, StateDamaged, UnknownRequest
from pipeline.memory import MemoryQueues, MemoryTransport
from pipeline.redis_results import RESULT_PAGE
from pipeline.settings import Settings
from pipeline.transport import ResultEntry, Transport, TransportOptions
from pipeline.wire import pack
from tests.ops.waiting import holds
from tests.pipeline.benches import soon
from tests.pipeline.client.scripted import Work, delta, ended, text_of, tokens_of
from tests.servers import ServerOptions, running_server

SIZES = (1, 2, 47, 4, 6)  # a delta begins at 50 - 2, and ends behind it
NUM_TOKENS = sum(SIZES)
STARTS = (0, 1, 3, 50, 54)


async def entries_of(client: Client, request_id: str, after: int = 0) -> list[Delta | Terminal]:
    return [entry async for entry in client.stream(request_id, after)]


async def test_every_offset_gives_exactly_the_tokens_behind_it(client: Client, stage: Transport) -> None:
    request_id = await ended(client, stage, *SIZES, text="rest")
    whole = tokens_of(await entries_of(client, request_id))
    assert whole == [1000 + index for index in range(NUM_TOKENS)]
    for after in range(NUM_TOKENS + 3):
        entries = await entries_of(client, request_id, after)
        assert tokens_of(entries) == whole[after:]
        assert isinstance(entries[-1], Terminal)
        assert entries[-1].text == "rest"
        assert not any(isinstance(entry, Terminal) for entry in entries[:-1])


@pytest.mark.parametrize("after", STARTS)
async def test_text_goes_on_where_a_delta_ended(client: Client, stage: Transport, after: int) -> None:
    request_id = await ended(client, stage, *SIZES, text="rest")
    whole = text_of(await entries_of(client, request_id))
    assert whole.endswith(text_of(await entries_of(client, request_id, after)))


async def test_offset_inside_a_delta_cuts_tokens_and_logprobs_but_not_its_text(
    client: Client, stage: Transport
) -> None:
    request_id = await ended(client, stage, *SIZES)
    [first, *_] = await entries_of(client, request_id, 52)
    assert isinstance(first, Delta)
    whole = delta(50, 4)
    assert whole.logprobs is not None
    assert (first.first_index, first.token_ids, first.text) == (52, whole.token_ids[2:], whole.text)
    assert first.logprobs == whole.logprobs[2:]


async def test_readers_of_a_running_request_see_the_same_from_different_offsets(
    client: Client, stage: Transport
) -> None:
    submitted = await client.enqueue("hello", model="tiny")
    readers = [asyncio.create_task(entries_of(client, submitted.request_id, after)) for after in (0, 50, 51)]
    work = await Work.taken(stage)
    for size in SIZES:
        await work.emit(size)
    await work.finish()
    from_0, from_50, from_51 = [tokens_of(entries) for entries in await soon(asyncio.gather(*readers))]
    assert (from_0[50:], from_0[51:]) == (from_50, from_51)
    assert len(from_0) == NUM_TOKENS


async def test_tokens_come_as_they_are_emitted(client: Client, stage: Transport) -> None:
    submitted = await client.enqueue("hello", model="tiny")
    work = await Work.taken(stage)
    async with aclosing(client.stream(submitted.request_id)) as stream:
        for size in (1, 3, 2):
            await work.emit(size)
            entry = await soon(anext(stream))
            assert isinstance(entry, Delta)
            assert len(entry.token_ids) == size


class Counting:
    """Counts the reads of a transport that are under way."""

    def __init__(self, transport: Transport) -> None:
        self.num_reads = self.num_under_way = self.most_under_way = 0
        self._read = transport.read_results
        transport.read_results = self._counted  # pyright: ignore[reportAttributeAccessIssue]

    async def _counted(self, *arguments: Any) -> list[ResultEntry]:
        self.num_reads += 1
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        try:
            return await self._read(*arguments)
        finally:
            self.num_under_way -= 1


async def test_slow_reader_costs_a_page_and_no_more(client: Client, stage: Transport) -> None:
    request_id = await ended(client, stage, *[1] * (RESULT_PAGE + 10))
    counting = Counting(client.transport)
    async with aclosing(client.stream(request_id)) as stream:
        for _ in range(RESULT_PAGE):
            await anext(stream)
        assert counting.num_reads == 1
        await anext(stream)
        assert counting.num_reads == 2


async def test_unknown_request_is_an_error_and_not_a_wait(client: Client) -> None:
    with pytest.raises(UnknownRequest, match="req_nobody is not known: never accepted"):
        await entries_of(client, "req_nobody")


@pytest.mark.parametrize("after", [-1, True, 1.5, 2**64, "1", float("nan")])
def test_offset_that_is_none_is_refused_at_once(after: Any) -> None:
    client = Client(MemoryTransport(MemoryQueues(), TransportOptions("client")), Settings())
    with pytest.raises(InvalidRequest, match="after: must be a number of tokens from 0 on"):
        client.stream("r", after)


async def test_missing_tokens_are_found(client: Client, stage: Transport, raw_redis: Redis) -> None:
    submitted = await client.enqueue("hello", model="tiny")
    work = await Work.taken(stage)
    await work.emit(2, 2)
    await raw_redis.xdel(client.keys.results(submitted.request_id), "0-2")
    with pytest.raises(StateDamaged, match="token 0 expected in the results, got 2 tokens from 2"):
        await soon(entries_of(client, submitted.request_id))


async def test_request_in_which_nothing_moves_ends_the_wait(client: Client, stage: Transport) -> None:
    impatient = Client(client.transport, client.settings, stall_timeout_s=0.05, block_s=0.01)
    submitted = await client.enqueue("hello", model="tiny")
    with pytest.raises(Stalled, match="nothing moved for 0 s: no token of request"):
        await entries_of(impatient, submitted.request_id)


async def test_time_that_a_reader_takes_is_no_stall(client: Client, stage: Transport) -> None:
    now = 0.0
    patient = Client(client.transport, client.settings, stall_timeout_s=60, block_s=0.01, monotonic=lambda: now)
    submitted = await client.enqueue("hello", model="tiny")
    work = await Work.taken(stage)
    await work.emit(1)
    stream = patient.stream(submitted.request_id)
    await anext(stream)
    now = 1000.0
    following, counting = asyncio.create_task(anext(stream)), Counting(client.transport)
    await holds(lambda: counting.num_reads > 1)  # so the patience was looked at
    await work.emit(1)
    assert isinstance(await soon(following), Delta)
    await stream.aclose()


async def test_server_that_restarts_in_mid_stream_costs_no_token(short_directory: Path) -> None:
    options = ServerOptions(appendonly="yes", appendfsync="always")
    with running_server(short_directory, options=options) as server:
        client = await Client.connect(server.url)
        stage = await open_transport(Settings(redis_url=server.url))
        submitted = await client.enqueue("hello", model="tiny")
        work = await Work.taken(stage)
        await work.emit(3, 2)
        seen: list[Delta | Terminal] = []
        reading = asyncio.create_task(read_into(seen, client, submitted.request_id))
        await holds(lambda: len(seen) == 2)
        server.kill()
    with running_server(short_directory, options=options):
        await work.emit(1, 4)
        await work.finish("rest")
        await soon(reading)
        assert text_of(seen) == "".join(f"<{index}>" for index in range(10)) + "rest"
        assert tokens_of(seen) == tokens_of(await entries_of(client, submitted.request_id))
        await stage.close()
        await client.close()


async def read_into(seen: list[Delta | Terminal], client: Client, request_id: str) -> None:
    async for entry in client.stream(request_id):
        seen.append(entry)  # noqa: PERF401 - others look at it meanwhile


async def test_server_that_stays_away_is_an_error_of_its_own(short_directory: Path) -> None:
    with running_server(short_directory) as server:
        transport = await open_transport(Settings(redis_url=server.url, lease_s=0.05))
        client = Client(transport, Settings(), patience_s=0.2)
        submitted = await client.enqueue("hello", model="tiny")
    with pytest.raises(ServerUnreachable) as failure:
        await soon(client.result(submitted.request_id))
    assert failure.value.retryable
    await transport.close()


async def test_tokens_that_come_again_after_the_server_lost_its_last_second_are_not_doubled(
    queues: MemoryQueues,
) -> None:
    client = Client(MemoryTransport(queues, TransportOptions("client")), Settings())
    submitted = await client.enqueue("hello", model="tiny")
    work = await Work.taken(MemoryTransport(queues, TransportOptions("stage")))
    await work.emit(2, 3)
    async with aclosing(client.stream(submitted.request_id)) as stream:
        seen = [await anext(stream), await anext(stream)]
        request = queues.broker.request(submitted.request_id)
        assert request is not None
        # The second delta is lost; its tokens come again, two and five at a time instead of three.
        again = [(4, delta(2, 2)), (9, delta(4, 5))]
        request.results[1:] = [ResultEntry(offset, pack(one)) for offset, one in again]
        request.results.append(ResultEntry(None, pack(Terminal(finish_reason="stop", text="rest"))))
        seen += [entry async for entry in stream]
    assert tokens_of(seen) == [1000 + index for index in range(9)]
    assert text_of(seen) == "".join(f"<{index}>" for index in range(9)) + "rest"


async def test_no_text_is_lost_where_a_reader_began_inside_a_delta_and_tokens_come_again(queues: MemoryQueues) -> None:
    client = Client(MemoryTransport(queues, TransportOptions("client")), Settings())
    submitted = await client.enqueue("hello", model="tiny")
    work = await Work.taken(MemoryTransport(queues, TransportOptions("stage")))
    await work.emit(5, 3)
    async with aclosing(client.stream(submitted.request_id, 2)) as stream:
        seen = [await anext(stream), await anext(stream)]
        request = queues.broker.request(submitted.request_id)
        assert request is not None
        # All of it is lost and comes again: its first deltas end before and behind where the reader began.
        again = [(1, delta(0, 1)), (7, delta(1, 6)), (10, delta(7, 3))]
        request.results[:] = [ResultEntry(offset, pack(one)) for offset, one in again]
        request.results.append(ResultEntry(None, pack(Terminal(finish_reason="stop", text="rest"))))
        seen += [entry async for entry in stream]
    assert tokens_of(seen) == [1000 + index for index in range(2, 10)]
    assert text_of(seen) == "".join(f"<{index}>" for index in range(10)) + "rest"


@pytest.mark.parametrize("request_id", ["\ud800", b"\xff", "", "a b"])
def test_what_is_no_id_is_refused_at_once(request_id: Any) -> None:
    client = Client(MemoryTransport(MemoryQueues(), TransportOptions("client")), Settings())
    with pytest.raises(InvalidRequest, match="request_id: must have 1 to 200 letters"):
        client.stream(request_id)
