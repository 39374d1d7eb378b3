"""The checker of `sluice chaos`: what must not be is found, each kind of it, and nothing else is."""

from collections.abc import Sequence
from typing import Any

import pytest

from ops.chaos.history import History, Seen, compared, output_of, problems_of, stored_problems
from ops.outputs import Output
from pipeline.client.asks import make_ask
from pipeline.client.client import Client
from pipeline.client.errors import QueueFull
from pipeline.errors import UnknownRequest
from pipeline.keys import Keys
from pipeline.memory import MemoryQueues, MemoryTransport
from pipeline.messages import Delta, Failure, GenerateRequest, Terminal, Usage
from pipeline.settings import Settings
from pipeline.transport import Emit, Finish, Transaction, TransportOptions
from pipeline.wire import pack, unpack

ASK = make_ask("a prompt", model="m", seed=1)


def delta(first_index: int, *token_ids: int) -> Delta:
    return Delta(first_index=first_index, token_ids=token_ids, text="x" * len(token_ids))


def end(num_tokens: int, text: str = "") -> Terminal:
    return Terminal(finish_reason="length", text=text, usage=Usage(prompt_tokens=3, completion_tokens=num_tokens))


def seen(deltas: Sequence[Delta] = (), *terminals: Terminal, **changes: Any) -> Seen:
    arrived_at = changes.pop("arrived_at", [2.0 + number for number in range(len(deltas))])
    values: dict[str, Any] = {"accepted_at": 1.5, "ended_at": 10.0} | changes
    return Seen(ASK, "req_1", 1.0, deltas=list(deltas), arrived_at=arrived_at, terminals=list(terminals), **values)


def output(*token_ids: int) -> Output:
    return Output(token_ids, (), "x" * len(token_ids), "length")


GOOD = seen([delta(0, 7), delta(1, 8, 9)], end(3))


def test_right_request_has_no_problem() -> None:
    assert problems_of(GOOD) == []
    assert compared([GOOD], [output(7, 8, 9)]) == []
    assert output_of(GOOD) == output(7, 8, 9)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (seen([delta(0, 7), delta(2, 9)], end(2)), "begins at token 2, and 1 was next"),
        (seen([delta(0, 7, 8), delta(1, 8, 9)], end(3)), "begins at token 1, and 2 was next"),
        (seen([delta(0, 7)]), "0 terminal entries and not 1"),
        (seen([delta(0, 7)], end(1), end(1)), "2 terminal entries and not 1"),
        (seen(accepted_at=None, error=UnknownRequest("req_1")), "was not accepted"),
        (seen([delta(0, 7)], error=UnknownRequest("req_1")), "was given up: request req_1 is not known"),
    ],
)
def test_what_a_client_must_not_see_is_found(wrong: Seen, said: str) -> None:
    assert said in " ".join(problems_of(wrong))
    assert said in " ".join(compared([wrong], [output(7)]))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (seen([delta(0, 7), delta(1, 6)], end(2)), "token 1 is 6 and not 8"),
        (seen([delta(0, 7)], end(1)), "1 tokens and not 2"),
        (seen([delta(0, 7, 8)], end(2, "more")), "the text differs at character 2"),
        (
            seen(
                [],
                Terminal(
                    finish_reason="error", failure=Failure(stage="decode", code="c", message="m", retryable=False)
                ),
            ),
            "failed in decode: c: m",
        ),
    ],
)
def test_other_tokens_and_failures_are_found(wrong: Seen, said: str) -> None:
    assert [problem for problem in compared([wrong], [output(7, 8)]) if said in problem]


def client_of(queues: MemoryQueues) -> Client:
    return Client(MemoryTransport(queues, TransportOptions(consumer="client", max_queue=1)), Settings())


def history_of(*requests: Seen) -> History:
    history = History(client_of(MemoryQueues()))
    history.requests += requests
    return history


async def answer_one(queues: MemoryQueues, *deltas: Delta) -> None:
    """Be all stages for one request."""
    stage = MemoryTransport(queues, TransportOptions(consumer="stage"))
    [delivery] = await stage.receive("tokenizer", 1, 5.0)
    request = unpack(delivery.payload, GenerateRequest)
    emits = tuple(Emit(pack(entry), entry.first_index, len(entry.token_ids)) for entry in deltas)
    num_tokens = sum(len(entry.token_ids) for entry in deltas)
    effects = (*emits, Finish(pack(end(num_tokens)), "finished"))
    assert await stage.commit([Transaction(delivery, request.request_id, request.attempt, effects, ack=True)]) == ["ok"]


async def test_history_records_what_the_client_is_told_and_can_resume() -> None:
    queues = MemoryQueues()
    history = History(client_of(queues))
    [request] = history.send([ASK])
    await answer_one(queues, delta(0, 7), delta(1, 8, 9))
    await history.ended(timeout_s=5)
    assert request.accepted_at is not None
    assert compared([request], [output(7, 8, 9)]) == []
    later = History(client_of(queues))
    again = Seen(ASK, request.request_id, request.submitted_at, request.accepted_at)
    later.resume([again])
    await later.ended(timeout_s=5)
    assert again.deltas == request.deltas
    await history.close()
    await later.close()


async def test_history_says_who_does_not_end_and_who_is_refused() -> None:
    history = History(client_of(MemoryQueues()))
    [waiting] = history.send([ASK])
    await history.accepted([waiting], timeout_s=5)
    [refused] = history.send([ASK], door_timeout_s=0.01)
    await history.ended([refused], timeout_s=5)
    assert isinstance(refused.error, QueueFull)
    with pytest.raises(TimeoutError, match=rf"1 of 2 requests have not ended: {waiting.request_id} \(0 tokens\)"):
        await history.ended(timeout_s=0.05)
    with pytest.raises(TimeoutError, match="0 of 1 tokens arrived"):
        await history.tokens(1, timeout_s=0.05)
    await history.close()


def test_longest_gap_is_between_any_two_signs_of_life_after_the_fault() -> None:
    one = seen([delta(0, 1), delta(1, 2), delta(2, 3)], end(3), arrived_at=[2.0, 3.0, 9.0], ended_at=9.5)
    other = seen([delta(0, 1)], end(1), arrived_at=[5.0], ended_at=6.0)
    history = history_of(one, other)
    assert history.longest_gap_s(2.5) == 3.0  # from 6.0 to 9.0
    assert history.longest_gap_s(2.5, [one]) == 6.0
    assert history.longest_gap_s(9.2) == pytest.approx(0.3)
    assert history.longest_gap_s(-50.0) == 3.0  # nothing can move before it was submitted


class Stored:
    """A request's result stream and the log of ends, written as the product writes them."""

    def __init__(self, redis: Any, namespace: str) -> None:
        self.redis = redis
        self.keys = Keys(namespace)

    async def write(self, *deltas: Delta, num_ends: int = 1, num_logged: int = 1) -> None:
        position = 0
        for entry in deltas:
            position += len(entry.token_ids)
            await self.add(f"0-{position}", pack(entry))
        for number in range(num_ends):
            await self.add(f"{number + 1}-0", pack(end(position)))
        for _ in range(num_logged):
            await self.redis.xadd(self.keys.finished(), {"id": "req_1", "p": pack(end(position))})

    async def add(self, entry_id: str, payload: bytes) -> None:
        await self.redis.xadd(self.keys.results("req_1"), {"p": payload}, id=entry_id)

    async def problems(self, request: Seen = GOOD) -> str:
        return "; ".join(await stored_problems(self.redis, self.keys, [request]))


@pytest.fixture
def stored(raw_redis: Any, namespace: str) -> Stored:
    return Stored(raw_redis, namespace)


async def test_what_is_stored_as_it_was_seen_is_right(stored: Stored) -> None:
    await stored.write(delta(0, 7), delta(1, 8, 9))
    assert await stored.problems() == ""


async def test_second_end_is_found_in_stream_and_log(stored: Stored) -> None:
    await stored.write(delta(0, 7), delta(1, 8, 9), num_ends=2, num_logged=2)
    assert "2 terminal entries stored" in await stored.problems()
    assert "is 2 times in the log" in await stored.problems()


async def test_end_without_a_log_entry_is_found(stored: Stored) -> None:
    await stored.write(delta(0, 7), delta(1, 8, 9), num_logged=0)
    assert "is 0 times in the log" in await stored.problems()


async def test_other_tokens_than_were_seen_are_found(stored: Stored) -> None:
    await stored.write(delta(0, 7), delta(1, 8, 5))
    assert "not those that its client saw" in await stored.problems()


async def test_entry_under_a_wrong_number_of_tokens_is_found(stored: Stored) -> None:
    await stored.add("0-1", pack(delta(0, 7)))
    await stored.add("0-2", pack(delta(1, 8, 9)))
    await stored.add("1-0", pack(end(3)))
    assert "entry 0-2 ends with token 3" in await stored.problems()


async def test_gap_in_the_stream_is_found(stored: Stored) -> None:
    await stored.add("0-1", pack(delta(0, 7)))
    await stored.add("0-3", pack(delta(2, 9)))
    await stored.add("1-0", pack(end(3)))
    assert "entry 0-3 begins at token 2" in await stored.problems()
