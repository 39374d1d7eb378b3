"""Results: of one request, and of many as they end."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from pipeline.client import Client, Completion, Failure, Stalled
from pipeline.errors import InvalidRequest
from pipeline.transport import Transport
from tests.ops.answering import FAIL_WORD
from tests.pipeline.benches import soon
from tests.pipeline.client.scripted import Work, delta, ended


async def enqueued(client: Client, *prompts: str) -> list[str]:
    return [(await client.enqueue(prompt, model="tiny")).request_id for prompt in prompts]


async def test_result_is_the_whole_output(client: Client, stage: Transport) -> None:
    request_id = await ended(client, stage, 2, 3, text="rest")
    result = await client.result(request_id)
    assert isinstance(result, Completion)
    whole = delta(0, 5)
    assert (result.token_ids, result.text, result.logprobs) == (whole.token_ids, whole.text + "rest", whole.logprobs)
    assert (result.finish_reason, result.usage.completion_tokens) == ("stop", 5)


@pytest.mark.usefixtures("answering")
async def test_result_of_a_failed_request_says_why(client: Client) -> None:
    [request_id] = await enqueued(client, FAIL_WORD)
    result = await client.result(request_id)
    assert isinstance(result, Failure)
    assert (result.stage, result.field) == ("tokenizer", "prompt")


async def test_results_come_as_they_end(client: Client, stage: Transport) -> None:
    request_ids = await enqueued(client, "a", "b", "c")
    works = [await Work.taken(stage) for _ in request_ids]
    async with aclosing(client.gather(request_ids)) as results:
        for index in (2, 0, 1):
            await works[index].emit(index + 1)
            await works[index].finish()
            request_id, result = await soon(anext(results))
            assert request_id == request_ids[index]
            assert isinstance(result, Completion)
            assert len(result.token_ids) == index + 1
        with pytest.raises(StopAsyncIteration):
            await soon(anext(results))


@pytest.mark.usefixtures("answering")
async def test_unknown_failed_and_repeated_ids_do_not_stop_the_others(client: Client) -> None:
    good, bad = await enqueued(client, "a b", FAIL_WORD)
    results = {name: result async for name, result in client.gather([bad, "req_nobody", good, good])}
    assert results.keys() == {good, bad, "req_nobody"}
    assert isinstance(results[good], Completion)
    codes = {name: result.code for name, result in results.items() if isinstance(result, Failure)}
    assert codes == {bad: "invalid_request", "req_nobody": "unknown_request"}


def own_tasks() -> set[asyncio.Task[Any]]:
    """All but reads that other callers may share: these go on to the next tick, whoever has left them."""
    return {task for task in asyncio.all_tasks() if task.get_name() != "read_results"}


async def test_requests_that_do_not_end_hold_up_no_other(client: Client, stage: Transport) -> None:
    unfinished = await enqueued(client, "a", "b", "c")
    for _ in unfinished:
        await Work.taken(stage)
    finished = {await ended(client, stage, 1) for _ in range(5)}
    seen: set[str] = set()
    before = own_tasks()
    async with aclosing(client.gather([*unfinished, *finished], num_at_a_time=2)) as results:
        while seen != finished:
            seen.add((await soon(anext(results)))[0])
    assert own_tasks() == before


@pytest.mark.usefixtures("answering")
async def test_hundreds_of_results_are_gathered(client: Client) -> None:
    request_ids = await enqueued(client, *("a b" for _ in range(300)))
    results = [name async for name, result in client.gather(request_ids) if isinstance(result, Completion)]
    assert sorted(results) == sorted(request_ids)


async def test_requests_of_which_none_ends_are_given_up(client: Client) -> None:
    request_ids = await enqueued(client, "a", "b")
    impatient = Client(client.transport, client.settings, stall_timeout_s=0.05)
    with pytest.raises(Stalled, match="does not end"):
        await soon(anext(impatient.gather(request_ids)))


async def test_nothing_to_gather_is_nothing(client: Client) -> None:
    assert [pair async for pair in client.gather([])] == []


@pytest.mark.parametrize("wrong", ["\udcff", b"req_1", "", 5])
async def test_what_is_no_id_is_refused_at_once(client: Client, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="1 to 200 letters") as refusal:
        client.gather(["req_1", wrong])
    assert refusal.value.field == "request_ids"


@pytest.mark.parametrize("num", [0, -1, 1.5, True])
async def test_a_number_at_a_time_that_is_none_is_refused_at_once(client: Client, num: Any) -> None:
    with pytest.raises(InvalidRequest, match="num_at_a_time: must be a whole number from 1 on"):
        client.gather(["req_1"], num)
