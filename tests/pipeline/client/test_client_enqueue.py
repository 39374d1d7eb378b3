"""Enqueueing: what reaches the queue, once, and what a wrong argument gets."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline.client import Client, NewRequest, QueueFull, make_ask
from pipeline.client.asks import Sampling, new_request_id
from pipeline.client.client import NUM_CALLS
from pipeline.errors import InvalidRequest
from pipeline.keys import PRIORITIES
from pipeline.messages import ChatMessage, GenerateRequest
from pipeline.params import MAX_SEED, SamplingParams
from pipeline.settings import Settings
from pipeline.transport import Outcome, Transport
from pipeline.wire import MAX_BYTES, unpack
from tests.pipeline.benches import RedisBench, soon, take, take_one
from tests.pipeline.client.scripted import Work


async def requests(stage: Transport, num_requests: int) -> list[GenerateRequest]:
    return [unpack(delivery.payload, GenerateRequest) for delivery in await take(stage, "tokenizer", num_requests)]


async def num_queued(stage: Transport) -> int:
    return sum([await stage.queue_length("tokenizer", priority) for priority in PRIORITIES])


async def test_prompt_and_parameters_reach_the_queue(client: Client, stage: Transport) -> None:
    submitted = await client.enqueue("hello", model="tiny", temperature=0.5, stop="\n", seed=7, speculate=False)
    [request] = await requests(stage, 1)
    assert (request.request_id, request.model, request.prompt) == (submitted.request_id, "tiny", "hello")
    assert request.params == SamplingParams(temperature=0.5, stop=("\n",), seed=7)
    assert (request.priority, request.speculate, submitted.seed) == ("interactive", False, 7)
    assert [stamp.boundary for stamp in request.stamps] == ["submitted"]
    assert submitted.created_s == request.stamps[0].at_us // 1_000_000


async def test_chat_of_plain_dictionaries_reaches_the_queue(client: Client, stage: Transport) -> None:
    turns = [{"role": "system", "content": ""}, ChatMessage(role="user", content="hi")]
    await client.enqueue(messages=turns, model="tiny", priority="batch")
    [request] = await requests(stage, 1)
    assert request.messages == (ChatMessage(role="system", content=""), ChatMessage(role="user", content="hi"))
    assert request.priority == "batch"


async def test_time_limit_begins_when_the_queue_has_the_request(client: Client, raw_redis: Redis) -> None:
    await client.enqueue("hello", model="tiny", request_id="limited", time_limit_s=60, timeout_s=1)
    await client.enqueue("hello", model="tiny", request_id="unlimited", timeout_s=1)
    asks = [make_ask("hello", model="tiny", request_id="of-many", time_limit_s=600)]
    assert [submitted.request_id async for submitted in client.enqueue_many(asks)] == ["of-many"]
    seconds, micros = await raw_redis.time()
    deadlines = dict(await raw_redis.zrange(client.keys.deadlines(), 0, -1, withscores=True))
    left_s = {name.decode(): deadline / 1000 - seconds - micros / 1e6 for name, deadline in deadlines.items()}
    assert left_s.keys() == {"limited", "of-many"}
    assert 30 < left_s["limited"] <= 60
    assert 570 < left_s["of-many"] <= 600


async def test_missing_seeds_are_drawn_and_told(client: Client, stage: Transport) -> None:
    submitted = [await client.enqueue("hello", model="tiny") for _ in range(3)]
    assert [request.params.seed for request in await requests(stage, 3)] == [one.seed for one in submitted]
    assert len({one.seed for one in submitted}) == 3
    assert all(0 <= one.seed <= MAX_SEED for one in submitted)


async def test_call_repeated_with_its_own_id_is_one_request_with_one_seed(client: Client, stage: Transport) -> None:
    first = await client.enqueue("hello", model="tiny", request_id="mine:1")
    again = await client.enqueue("hello", model="tiny", request_id="mine:1")
    assert (first.existed, again.existed) == (False, True)
    assert (again.request_id, again.seed) == ("mine:1", first.seed)
    [request] = await requests(stage, 1)
    assert request.params.seed == first.seed
    assert await num_queued(stage) == 1
    assert (await client.enqueue("hello", model="tiny", request_id="mine:2")).seed != first.seed


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ({"prompt": "a", "temperature": 3}, "temperature", "between 0 and 2"),
        ({"prompt": "a", "temprature": 1}, "temprature", "did you mean temperature"),
        ({"prompt": "a", "seed": -1}, "seed", "between 0 and"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": 5}, "prompt", "must be a string, got 5"),
        ({"prompt": "\ud800"}, "prompt", "not Unicode"),
        ({"prompt": "a" * (MAX_BYTES + 1)}, "prompt", "bytes, at most"),
        ({}, "prompt", "is missing"),
        ({"prompt": "a", "messages": CHAT}, "prompt", "exclude each other"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages", "no text"),
        ({"messages": [*CHAT, {"role": "tool", "content": "x"}]}, "messages[1].role", "user"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": ["hi"]}, "messages[0]", "must have role and content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "Unicode|unicode"),
        ({"prompt": "a", "model": ""}, "model", "name of a model"),
        ({"prompt": "a", "model": "\udcff"}, "model", "not Unicode"),
        ({"prompt": "a", "request_id": "\udcff"}, "request_id", "1 to 200 letters"),
        ({"prompt": "a", "timeout_s": float("nan")}, "timeout_s", "number of seconds from 0 on, got nan"),
        ({"prompt": "a", "timeout_s": -1}, "timeout_s", "number of seconds from 0 on, got -1"),
        ({"prompt": "a", "timeout_s": "5"}, "timeout_s", "number of seconds from 0 on, got '5'"),
        ({"prompt": "a", "time_limit_s": 0}, "time_limit_s", "above 0, at most 86400, got 0"),
        ({"prompt": "a", "time_limit_s": float("nan")}, "time_limit_s", "above 0, at most 86400, got nan"),
        ({"prompt": "a", "time_limit_s": 1e9}, "time_limit_s", "above 0, at most 86400, got 1000000000"),
        ({"prompt": "a", "time_limit_s": "5"}, "time_limit_s", "above 0, at most 86400, got '5'"),
        ({"prompt": "a", "priority": "urgent"}, "priority", "interactive or batch"),
        ({"prompt": "a", "request_id": "a b"}, "request_id", "1 to 200 letters"),
        ({"prompt": "a", "request_id": "batch_1"}, "request_id", "ids of batches"),
        ({"prompt": "a", "speculate": "no"}, "speculate", "true or false"),
    ],
)
async def test_wrong_arguments_are_refused_at_once_and_named(
    client: Client, stage: Transport, arguments: dict[str, Any], field: str, message: str
) -> None:
    given: dict[str, Any] = {"model": "tiny"} | arguments
    with pytest.raises(InvalidRequest, match=message) as refusal:
        await client.enqueue(**given)
    assert refusal.value.field == field
    assert await num_queued(stage) == 0


def test_every_sampling_parameter_is_an_argument_of_enqueue() -> None:
    assert Sampling.__optional_keys__ == SamplingParams.model_fields.keys()


@pytest.fixture
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.redis_streams.ADMIT_RETRY_S", 0.01)


async def limited(redis_bench: RedisBench) -> Client:
    return Client(await redis_bench.join("client", max_queue=1), Settings())


@pytest.mark.usefixtures("_quick_retries")
async def test_full_queue_is_waited_for(redis_bench: RedisBench, stage: Transport) -> None:
    client = await limited(redis_bench)
    await client.enqueue("a", model="tiny")
    second = asyncio.create_task(client.enqueue("b", model="tiny"))
    done, _ = await asyncio.wait({second}, timeout=0.05)
    assert not done
    await (await Work.taken(stage)).finish()
    assert (await soon(second)).existed is False


@pytest.mark.usefixtures("_quick_retries")
async def test_queue_that_stays_full_is_an_error_that_says_so(redis_bench: RedisBench, stage: Transport) -> None:
    client = await limited(redis_bench)
    await client.enqueue("a", model="tiny")
    with pytest.raises(QueueFull, match="full for 0 s; request mine was not accepted") as refusal:
        await client.enqueue("b", model="tiny", request_id="mine", timeout_s=0.03)
    assert refusal.value.retryable
    assert await num_queued(stage) == 1


async def test_many_are_enqueued_in_order_and_taken_as_there_is_room(client: Client, stage: Transport) -> None:
    num_taken = 0

    def asks() -> Iterator[NewRequest]:
        nonlocal num_taken
        for number in range(100):
            num_taken += 1
            yield make_ask(f"number {number}", model="tiny", request_id=f"r{number}")

    submitted = client.enqueue_many(asks())
    assert (await anext(submitted)).request_id == "r0"
    assert num_taken == NUM_CALLS
    rest = [one.request_id async for one in submitted]
    assert rest == [f"r{number}" for number in range(1, 100)]
    assert await stage.queue_length("tokenizer", "batch") == 100


async def test_one_that_fails_ends_the_many_and_those_before_are_in(client: Client, stage: Transport) -> None:
    asks = [make_ask("a", model="tiny"), NewRequest("tiny", "b", None, SamplingParams(), request_id="not an id")]
    submitted = client.enqueue_many(asks)
    assert (await anext(submitted)).request_id == unpack(
        (await take_one(stage, "tokenizer")).payload, GenerateRequest
    ).request_id
    with pytest.raises(InvalidRequest, match="request_id"):
        await anext(submitted)


async def test_many_that_are_given_up_leave_no_task(client: Client) -> None:
    before = asyncio.all_tasks()
    submitted = client.enqueue_many(make_ask("a", model="tiny") for _ in range(100))
    await anext(submitted)
    await submitted.aclose()
    assert asyncio.all_tasks() == before


def test_ids_are_long_lowercase_and_new() -> None:
    ids = {new_request_id() for _ in range(100)}
    assert len(ids) == 100
    for request_id in ids:
        assert len(request_id) == 30
        assert request_id.removeprefix("req_").isalnum()
        assert request_id == request_id.lower()


async def test_an_id_that_comes_again_is_not_mixed_up_with_what_is_left_of_the_request_before(
    client: Client, stage: Transport, raw_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_us = 1_764_470_000_000_000
    monkeypatch.setattr("pipeline.client.asks.now_us", lambda: now_us)
    await client.enqueue("old", model="tiny", request_id="mine")
    await client.cancel("mine")
    await raw_redis.delete(client.keys.request("mine"), client.keys.results("mine"))  # both have expired
    now_us += 1_000_000
    assert not (await client.enqueue("new", model="tiny", request_id="mine")).existed
    old, new = await Work.taken(stage), await Work.taken(stage)
    assert (old.request.attempt, new.request.attempt) == (1_764_470_000, 1_764_470_001)
    assert await old.emit(1) is Outcome.FENCED
    assert await num_queued(stage) == 1
    assert [await new.emit(2), await new.finish()] == [Outcome.OK, Outcome.OK]
