"""A client's session: what it submits, what it sees of the results, and when it stops waiting."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from ops.session import NewRequest, Session, Stalled, new_request_id
from pipeline.batch.results import Completion
from pipeline.errors import ServerUnreachable, UnknownRequest
from pipeline.memory import MemoryQueues, MemoryTransport
from pipeline.messages import Failure, GenerateRequest, Terminal
from pipeline.params import SamplingParams
from pipeline.transport import Admission, Exists, ResultEntry, TransportOptions
from pipeline.wire import unpack
from tests.ops.answering import answer_one, serve
from tests.ops.waiting import holds


class Clock:
    """A clock that moves when it is told to, and a little whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


@pytest.fixture
def queues() -> MemoryQueues:
    return MemoryQueues()


def join(queues: MemoryQueues, consumer: str = "client", max_queue: int = 100) -> MemoryTransport:
    return MemoryTransport(queues, TransportOptions(consumer=consumer, max_queue=max_queue))


@pytest.fixture
async def answering(queues: MemoryQueues) -> AsyncIterator[None]:
    stopping = asyncio.Event()
    task = asyncio.create_task(serve(join(queues, "stage"), stopping))
    yield
    stopping.set()
    await task


def asking(prompt: str, **params: object) -> NewRequest:
    return NewRequest("tiny", prompt, None, SamplingParams.model_validate(params))


async def one_delivery(queues: MemoryQueues) -> GenerateRequest:
    [delivery] = await join(queues, "stage").receive("tokenizer", 10, block_s=5)
    return unpack(delivery.payload, GenerateRequest)


async def test_answer_holds_every_token_the_held_back_text_and_the_usage(queues: MemoryQueues, answering: None) -> None:
    session = Session(join(queues))
    seen: list[int] = []
    answer = await session.answer(asking("a b c", seed=7), "batch", lambda delta: seen.extend(delta.token_ids))
    assert isinstance(answer.outcome, Completion)
    assert answer.outcome.text == "A B C seed 7"
    assert answer.outcome.token_ids == (0, 1, 2)
    assert seen == [0, 1, 2]
    assert answer.held_back == "seed 7"
    assert answer.submitted.seed == 7
    assert session.unfinished == frozenset()


async def test_missing_seed_is_drawn_and_told(queues: MemoryQueues) -> None:
    session = Session(join(queues))
    first = await session.submit(asking("a"), "interactive")
    second = await session.submit(asking("a"), "batch")
    requests = [unpack(d.payload, GenerateRequest) for d in await join(queues, "s").receive("tokenizer", 9, 1)]
    assert [request.params.seed for request in requests] == [first.seed, second.seed]
    assert first.seed != second.seed
    assert [request.priority for request in requests] == ["interactive", "batch"]
    assert session.unfinished == {first.request_id, second.request_id}


async def test_failed_request_is_an_answer_too(queues: MemoryQueues, answering: None) -> None:
    answer = await Session(join(queues)).answer(asking("please FAIL"), "batch")
    assert isinstance(answer.outcome, Failure)
    assert answer.outcome.field == "prompt"
    assert answer.timing.ttft_ms is None


async def test_results_longer_than_one_read_are_followed_to_their_end(queues: MemoryQueues, answering: None) -> None:
    answer = await Session(join(queues)).answer(asking("w " * 1300), "batch")
    assert isinstance(answer.outcome, Completion)
    assert answer.outcome.token_ids == tuple(range(1300))


async def test_timing_counts_from_the_submission(queues: MemoryQueues) -> None:
    clock = Clock()
    session = Session(join(queues), monotonic=clock)
    submitted = await session.submit(asking("a b c"), "batch")
    clock.now = 2.0
    [delivery] = await join(queues, "stage").receive("tokenizer", 1, 5)
    await answer_one(join(queues, "stage"), delivery)
    times: list[float] = []
    async for _ in session.follow(submitted.request_id):
        times.append(clock.now)
        clock.now += 0.25
    assert (submitted.started_at, times[0]) == (0.0, 2.0)


async def test_ttft_and_tpot_are_per_request(queues: MemoryQueues, answering: None) -> None:
    clock = Clock()
    session = Session(join(queues), monotonic=clock)

    def step(_: object) -> None:
        clock.now += 0.5

    answer = await session.answer(asking("a b c d e"), "batch", step)
    assert answer.timing.ttft_ms == 0.0
    assert answer.timing.tpot_ms == 500.0
    single = await session.answer(asking("a"), "batch")
    assert single.timing.tpot_ms is None


async def test_full_queue_is_waited_for(queues: MemoryQueues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.memory.ADMIT_RETRY_S", 0.01)
    session = Session(join(queues, max_queue=1))
    first = await session.submit(asking("a"), "batch")
    second = asyncio.create_task(session.submit(asking("b"), "batch"))
    done, _ = await asyncio.wait({second}, timeout=0.05)
    assert not done
    stage = join(queues, "stage")
    [delivery] = await stage.receive("tokenizer", 1, 5)
    await answer_one(stage, delivery)
    assert (await asyncio.wait_for(second, 10)).request_id != first.request_id


async def test_queue_that_stays_full_ends_the_wait(queues: MemoryQueues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.memory.ADMIT_RETRY_S", 0.001)
    clock = Clock()
    session = Session(join(queues, max_queue=1), monotonic=clock, stall_timeout_s=60)
    await session.submit(asking("a"), "batch")
    clock.step_s = 10
    with pytest.raises(Stalled, match="the queue is full; 2 unfinished"):
        await session.submit(asking("b"), "batch")


async def test_request_that_nobody_works_on_ends_the_wait(queues: MemoryQueues) -> None:
    clock = Clock()
    session = Session(join(queues), monotonic=clock, stall_timeout_s=60, block_s=0.001)
    clock.step_s = 10
    with pytest.raises(Stalled, match="no token arrived"):
        await session.answer(asking("a"), "batch")
    assert len(session.unfinished) == 1


async def test_unknown_request_is_an_error_and_not_a_wait(queues: MemoryQueues) -> None:
    with pytest.raises(UnknownRequest):
        async for _ in Session(join(queues)).follow("req_nobody"):
            pass


class Flaky(MemoryTransport):
    """Loses the reply to the first call of each kind."""

    lost = 0

    async def admit(self, request_id: str, priority: object, payload: bytes) -> Admission:
        reply = await super().admit(request_id, "batch", payload)
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
    queues: MemoryQueues, answering: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.session.RETRY_S", 0.001)
    transport = Flaky(queues, TransportOptions(consumer="client"))
    answer = await Session(transport).answer(asking("a b"), "batch")
    assert isinstance(answer.outcome, Completion)
    assert transport.lost == 2
    assert transport._broker.length("tokenizer", "batch", None) == 0


class Swallowing(MemoryTransport):
    """Returns instead of being cancelled, as the client library may."""

    async def read_results(self, request_id: str, after: int, block_s: float) -> list[ResultEntry]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return []
        raise AssertionError


async def test_swallowed_cancellation_ends_the_wait_all_the_same(queues: MemoryQueues) -> None:
    session = Session(Swallowing(queues, TransportOptions(consumer="client")))
    waiting = asyncio.create_task(session.answer(asking("a"), "batch"))
    await holds(lambda: bool(session.unfinished))
    waiting.cancel()
    done, _ = await asyncio.wait({waiting}, timeout=10)
    assert done
    assert waiting.cancelled()


def test_request_ids_are_long_lowercase_and_new() -> None:
    ids = {new_request_id() for _ in range(100)}
    assert len(ids) == 100
    for request_id in ids:
        assert len(request_id) == 30
        assert request_id.removeprefix("req_").isalnum()
        assert request_id == request_id.lower()


async def test_terminal_is_the_last_thing_that_is_followed(queues: MemoryQueues, answering: None) -> None:
    session = Session(join(queues))
    submitted = await session.submit(asking("a b"), "batch")
    entries = [entry async for entry in session.follow(submitted.request_id)]
    assert [isinstance(entry, Terminal) for entry in entries] == [False, False, True]
