"""Cancelling: the end is written at once, once, and told truly."""

import asyncio
from typing import Any

import pytest

from pipeline.client import Client, Failure, Terminal
from pipeline.errors import InvalidRequest, ServerUnreachable, UnknownRequest
from pipeline.memory import MemoryQueues, MemoryTransport
from pipeline.settings import Settings
from pipeline.transport import Outcome, Transport, TransportOptions
from pipeline.wire import unpack
from tests.pipeline.benches import DEADLINE_S, soon
from tests.pipeline.client.scripted import Work, ended, tokens_of


async def test_readers_of_a_cancelled_request_see_its_end_at_once(client: Client, stage: Transport) -> None:
    submitted = await client.enqueue("hello", model="tiny")
    work = await Work.taken(stage)
    await work.emit(2)
    reading = asyncio.create_task(client.result(submitted.request_id))
    assert await client.cancel(submitted.request_id) is True
    result = await soon(reading)
    assert isinstance(result, Failure)
    assert (result.code, result.retryable) == ("cancelled", False)
    entries = [entry async for entry in client.stream(submitted.request_id)]
    assert len(tokens_of(entries)) == 2
    assert isinstance(entries[-1], Terminal)
    assert (entries[-1].finish_reason, entries[-1].failure) == ("cancelled", None)
    assert [(stamp.boundary, stamp.by) for stamp in entries[-1].stamps] == [("finished", client.transport.consumer)]
    assert await work.emit(1) is Outcome.GONE


async def test_second_cancel_and_cancel_after_the_end_change_nothing(client: Client, stage: Transport) -> None:
    submitted = await client.enqueue("hello", model="tiny")
    assert await client.cancel(submitted.request_id) is True
    assert await client.cancel(submitted.request_id) is False
    await Work.taken(stage)
    request_id = await ended(client, stage, 1)
    assert await client.cancel(request_id) is False
    assert not isinstance(await client.result(request_id), Failure)


async def test_unknown_request_cannot_be_cancelled(client: Client) -> None:
    with pytest.raises(UnknownRequest, match="req_nobody"):
        await client.cancel("req_nobody")


async def test_many_are_cancelled_and_each_is_told(client: Client, stage: Transport) -> None:
    over = await ended(client, stage, 1)
    running = [(await client.enqueue("hello", model="tiny")).request_id for _ in range(40)]
    outcomes = await client.cancel_many([*running, over, "req_nobody", *running])
    assert outcomes == {**dict.fromkeys(running, "cancelled"), over: "ended", "req_nobody": "unknown"}
    assert {entry.request_id for entry in await stage.finished(40)} == set(running)
    terminals = [unpack(entry.terminal, Terminal) for entry in await stage.finished(40)]
    assert {terminal.finish_reason for terminal in terminals} == {"cancelled"}


class LosesAnAnswer(MemoryTransport):
    """Does what it is asked, and loses the answer to the first cancel."""

    lost = False

    async def cancel(self, request_id: str, terminal: bytes) -> bool:
        cancelled = await super().cancel(request_id, terminal)
        if not self.lost:
            self.lost = True
            raise ServerUnreachable("memory", "no answer")
        return cancelled


async def test_cancel_whose_answer_is_lost_is_still_this_one(queues: MemoryQueues) -> None:
    transport = LosesAnAnswer(queues, TransportOptions("client"))
    client = Client(transport, Settings())
    submitted = await client.enqueue("hello", model="tiny")
    assert await client.cancel(submitted.request_id) is True
    assert transport.lost
    assert await client.cancel(submitted.request_id) is False


async def test_a_cancelled_task_clears_up_with_calls_that_succeed(client: Client) -> None:
    submitted = await client.enqueue("hello", model="tiny")
    cleared_up: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleared_up.append(await client.cancel(submitted.request_id))
            cleared_up.append(await client.cancel(submitted.request_id))

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=DEADLINE_S)
    assert task.cancelled()
    assert cleared_up == [True, False]


@pytest.mark.parametrize("wrong", ["\udcff", "", "a b", b"req_1", None, "a" * 201])
async def test_what_is_no_id_is_refused_before_anything_is_cancelled(client: Client, wrong: Any) -> None:
    submitted = await client.enqueue("hello", model="tiny")
    for call in (client.cancel(wrong), client.result(wrong)):
        with pytest.raises(InvalidRequest, match="1 to 200 letters") as refusal:
            await call
        assert refusal.value.field == "request_id"
    with pytest.raises(InvalidRequest) as refusal:
        await client.cancel_many([submitted.request_id, wrong])
    assert refusal.value.field == "request_ids"
    assert await client.cancel(submitted.request_id) is True


async def test_a_cancellation_that_is_asked_for_while_the_task_runs_is_not_lost(client: Client) -> None:
    num_calls = 0

    async def work() -> None:
        nonlocal num_calls
        submitted = await client.enqueue("hello", model="tiny")
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # as Ctrl-C does, wherever the task is
        while True:
            await client.cancel(submitted.request_id)
            num_calls += 1

    task = asyncio.create_task(work())
    await asyncio.wait({task}, timeout=DEADLINE_S)
    assert task.cancelled()
    assert num_calls == 0
