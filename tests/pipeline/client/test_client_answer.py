"""An answer: enqueued, followed to its end, timed; and what an interrupted one leaves."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pipeline.client import Client, Completion, Failure, NewRequest, Stalled, make_ask
from pipeline.client.client import Client as AnyClient
from pipeline.client.patience import Patience
from pipeline.errors import ServerUnreachable
from pipeline.memory import MemoryQueues, MemoryTransport
from pipeline.settings import Settings
from pipeline.transport import Admission, Exists, ResultEntry, TransportOptions
from tests.ops.answering import FAIL_WORD, serve
from tests.ops.waiting import holds


class Clock:
    """A clock that moves when it is told to, and a little whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def join(queues: MemoryQueues, consumer: str = "client") -> MemoryTransport:
    return MemoryTransport(queues, TransportOptions(consumer=consumer))


@pytest.fixture
async def answered(queues: MemoryQueues) -> AsyncIterator[MemoryQueues]:
    stopping = asyncio.Event()
    task = asyncio.create_task(serve(join(queues, "stage"), stopping))
    yield queues
    stopping.set()
    await task


def asking(prompt: str, seed: int = 1) -> NewRequest:
    return make_ask(prompt, model="tiny", seed=seed)


async def test_answer_holds_every_token_the_held_back_text_and_the_usage(answered: MemoryQueues) -> None:
    client = Client(join(answered), Settings())
    seen: list[int] = []
    answer = await client.answer(asking("a b c", seed=7), "batch", lambda delta: seen.extend(delta.token_ids))
    assert isinstance(answer.outcome, Completion)
    assert answer.outcome.text == "A B C seed 7"
    assert answer.outcome.token_ids == (0, 1, 2)
    assert seen == [0, 1, 2]
    assert answer.terminal.text == "seed 7"
    assert answer.submitted.seed == 7
    assert client.unanswered == frozenset()


async def test_failed_request_is_an_answer_too(answered: MemoryQueues) -> None:
    client = Client(join(answered), Settings())
    answer = await client.answer(asking(FAIL_WORD))
    assert isinstance(answer.outcome, Failure)
    assert answer.timing.ttft_ms is None
    assert client.unanswered == frozenset()


async def test_results_longer_than_one_read_are_followed_to_their_end(answered: MemoryQueues) -> None:
    answer = await Client(join(answered), Settings()).answer(asking("w " * 1300))
    assert isinstance(answer.outcome, Completion)
    assert answer.outcome.token_ids == tuple(range(1300))


async def test_ttft_and_tpot_are_those_of_this_client(answered: MemoryQueues) -> None:
    clock = Clock()
    client = Client(join(answered), Settings(), monotonic=clock)

    def step(_: object) -> None:
        clock.now += 0.5

    answer = await client.answer(asking("a b c d e"), "batch", step)
    assert answer.timing.ttft_ms == 0.0
    assert answer.timing.tpot_ms == 500.0
    assert answer.ended_at == 2.5
    single = await client.answer(asking("a"))
    assert single.timing.tpot_ms is None
    assert single.submitted.started_at == 2.5


async def test_interrupted_answer_is_left_to_be_cancelled(queues: MemoryQueues) -> None:
    client = Client(join(queues), Settings())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.answer(asking("a")), 0.01)
    [request_id] = client.unanswered
    assert await client.cancel_many(client.unanswered) == {request_id: "cancelled"}
    assert client.unanswered == frozenset()


async def test_request_that_nobody_works_on_ends_the_wait(queues: MemoryQueues) -> None:
    clock = Clock()
    client = Client(join(queues), Settings(), monotonic=clock, stall_timeout_s=60, block_s=0.001)
    clock.step_s = 10
    with pytest.raises(Stalled, match=r"no token of request req_\w+ arrived"):
        await client.answer(asking("a"))
    assert len(client.unanswered) == 1


async def test_where_one_request_moves_the_others_are_not_stalled(queues: MemoryQueues) -> None:
    clock = Clock()
    patience = Patience(outage_s=60, stall_s=60, monotonic=clock)
    clock.now = 59
    patience.moved()
    clock.now = 118
    patience.check(0, "nothing came")
    clock.now = 119
    with pytest.raises(Stalled, match="nothing moved for 60 s: nothing came"):
        patience.check(0, "nothing came")


class Flaky(MemoryTransport):
    """Loses the reply to the first call of each kind."""

    lost = 0

    async def admit(
        self, request_id: str, priority: object, payload: bytes, attempt: int = 0, timeout_s: float | None = None
    ) -> Admission:
        reply = await super().admit(request_id, "batch", payload, attempt, timeout_s)
        if self.lost == 0:
            self.lost += 1
            raise ServerUnreachable("memory", "no answer")
        assert isinstance(reply, Exists)
        return reply

    async def read_results(self, request_id: str, after: int, block_s: float) -> list[ResultEntry]:
        if self.lost == 1:
            self.lost += 1
            raise ServerUnreachable("memory", "no answer")
        return await super().read_results(request_id, after, block_s)


async def test_server_that_is_away_for_a_moment_is_waited_for(
    answered: MemoryQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.client.patience.RETRY_S", 0.001)
    transport = Flaky(answered, TransportOptions(consumer="client"))
    answer = await Client(transport, Settings()).answer(asking("a b"))
    assert isinstance(answer.outcome, Completion)
    assert transport.lost == 2
    assert await transport.queue_length("tokenizer", "batch") == 0


class Swallowing(MemoryTransport):
    """Returns instead of being cancelled, as the client library may."""

    async def read_results(self, request_id: str, after: int, block_s: float) -> list[ResultEntry]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return []
        raise AssertionError


async def test_swallowed_cancellation_ends_the_wait_all_the_same(queues: MemoryQueues) -> None:
    client = Client(Swallowing(queues, TransportOptions(consumer="client")), Settings())
    waiting = asyncio.create_task(client.answer(asking("a")))
    await holds(lambda: bool(client.unanswered))
    waiting.cancel()
    done, _ = await asyncio.wait({waiting}, timeout=10)
    assert done
    assert waiting.cancelled()


def test_public_name_is_the_class() -> None:
    assert Client is AnyClient
