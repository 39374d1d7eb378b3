"""The harness: what becomes of messages, good and bad, and of work in hand when it stops."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kv_store.errors import BlobTooLarge, PoolFull
from pipeline import worker as worker_module
from pipeline.errors import InvalidRequest, ServerRefused, ServerUnreachable, SluiceError
from pipeline.keys import MAX_DELIVERIES
from pipeline.leases import LeaseKeeper
from pipeline.messages import Failure, GenerateRequest, Terminal
from pipeline.params import SamplingParams
from pipeline.transport import Delivery, Outcome, Publish, Transaction, Transport
from pipeline.wire import pack, unpack
from pipeline.worker import bury, is_poison, run_worker
from tests.pipeline.benches import Bench, soon, take_one

LONG_LEASE_S, SHORT_LEASE_S = 10.0, 0.05
Handler = Callable[[GenerateRequest], Awaitable[None]]


def work(request_id: str) -> bytes:
    request = GenerateRequest(
        request_id=request_id, priority="batch", model="m", prompt="p", params=SamplingParams(seed=1)
    )
    return pack(request)


class EchoStage:
    """Publishes each request to prefill, after doing what a test says."""

    name = "tokenizer"

    def __init__(self, handler: Handler | None = None) -> None:
        self._handler = handler
        self.handled: list[str] = []
        self.outcomes: list[Outcome] = []
        self.settled_one = asyncio.Event()

    async def handle(self, delivery: Delivery) -> Transaction:
        request = unpack(delivery.payload, GenerateRequest)
        self.handled.append(request.request_id)
        if self._handler is not None:
            await self._handler(request)
        effect = Publish("prefill", request.priority, b"tokenized")
        return Transaction(delivery, request.request_id, request.attempt, (effect,), ack=True)

    async def settled(self, transaction: Transaction, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.settled_one.set()


@asynccontextmanager
async def working(
    stage: EchoStage, transport: Transport, lease_s: float = LONG_LEASE_S
) -> AsyncIterator[asyncio.Event]:
    leases, stopping = LeaseKeeper(transport, lease_s), asyncio.Event()
    tasks = [
        asyncio.create_task(leases.run()),
        asyncio.create_task(run_worker(stage, transport, leases, stopping)),
    ]
    try:
        yield stopping
        stopping.set()
        await soon(tasks[1])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def end_of(transport: Transport, request_id: str) -> Terminal:
    async def read() -> Terminal:
        while True:
            for entry in await transport.read_results(request_id, 0, block_s=1):
                if entry.offset is None:
                    return unpack(entry.data, Terminal)

    return await soon(read())


async def failure_of(transport: Transport, request_id: str) -> Failure:
    terminal = await end_of(transport, request_id)
    assert terminal.finish_reason == "error"
    assert terminal.failure is not None
    return terminal.failure


def raising(error: Exception) -> Handler:
    async def handler(_request: GenerateRequest) -> None:
        raise error

    return handler


@pytest.fixture(autouse=True)
def _short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "BLOCK_S", 0.05)


async def test_messages_are_handled_in_order(bench: Bench) -> None:
    transport, stage = await bench.join(), EchoStage()
    for number in range(20):
        await transport.admit(f"r{number}", "batch", work(f"r{number}"))
    async with working(stage, transport):
        for _ in range(20):
            delivery = await take_one(transport, "prefill")
            assert delivery.payload == b"tokenized"
    assert stage.handled == [f"r{number}" for number in range(20)]
    assert stage.outcomes == [Outcome.OK] * 20


async def test_an_unreadable_message_becomes_a_dead_letter_at_once(bench: Bench) -> None:
    transport, stage = await bench.join(), EchoStage()
    await transport.admit("r", "batch", b"junk")
    await transport.admit("s", "batch", work("s"))
    async with working(stage, transport):
        await take_one(transport, "prefill")
    [(payload, reason)] = await bench.dead_letters("tokenizer")
    assert payload == b"junk"
    assert reason.startswith("unreadable_message: not_msgpack")
    assert await transport.queue_length("tokenizer", "batch") == 0


async def test_a_message_of_another_kind_also_ends_its_request(bench: Bench) -> None:
    transport, stage = await bench.join(), EchoStage()
    await transport.admit("r", "batch", work("r").replace(b"generate_request", b"generate_reqvest"))
    async with working(stage, transport):
        failure = await failure_of(transport, "r")
    assert (failure.stage, failure.code, failure.retryable) == ("tokenizer", "unreadable_message", False)
    assert len(await bench.dead_letters("tokenizer")) == 1
    assert await bench.leftovers() == []


async def test_a_wrong_request_fails_without_a_dead_letter(bench: Bench) -> None:
    transport, stage = await bench.join(), EchoStage(raising(InvalidRequest("prompt", "is too long")))
    await transport.admit("r", "batch", work("r"))
    async with working(stage, transport):
        failure = await failure_of(transport, "r")
    assert (failure.code, failure.field, failure.message) == ("invalid_request", "prompt", "prompt: is too long")
    assert await bench.dead_letters("tokenizer") == []
    assert stage.outcomes == [Outcome.OK]


@pytest.mark.parametrize("error", [SluiceError("no way"), BlobTooLarge(3, 2, 2)], ids=lambda e: type(e).__name__)
async def test_what_no_retry_can_help_fails_at_once(bench: Bench, error: Exception) -> None:
    transport, stage = await bench.join(), EchoStage(raising(error))
    await transport.admit("r", "batch", work("r"))
    async with working(stage, transport):
        failure = await failure_of(transport, "r")
    assert failure.message == str(error)
    assert stage.handled == ["r"]
    assert len(await bench.dead_letters("tokenizer")) == 1


@pytest.mark.parametrize("error", [RuntimeError("secret prompt"), PoolFull(3, 2, 1)], ids=lambda e: type(e).__name__)
async def test_a_message_that_fails_every_time_is_given_up(bench: Bench, error: Exception) -> None:
    transport, stage = await bench.join(lease_s=SHORT_LEASE_S), EchoStage(raising(error))
    await transport.admit("r", "batch", work("r"))
    async with working(stage, transport, SHORT_LEASE_S):
        failure = await failure_of(transport, "r")
    assert failure.code == "stage_failed"
    assert type(error).__name__ in failure.message
    assert "secret" not in failure.message
    assert stage.handled == ["r"] * MAX_DELIVERIES
    assert len(await bench.dead_letters("tokenizer")) == 1
    assert await bench.leftovers() == []


async def test_a_message_that_fails_once_is_tried_again(bench: Bench) -> None:
    async def fail_first(_request: GenerateRequest) -> None:
        if len(stage.handled) == 1:
            raise RuntimeError

    transport, stage = await bench.join(lease_s=SHORT_LEASE_S), EchoStage(fail_first)
    await transport.admit("r", "batch", work("r"))
    async with working(stage, transport, SHORT_LEASE_S):
        await take_one(transport, "prefill")
    assert stage.handled == ["r", "r"]
    assert await bench.dead_letters("tokenizer") == []


async def test_a_message_that_took_down_its_holders_is_not_touched_again(bench: Bench) -> None:
    transport, stage = await bench.join(lease_s=SHORT_LEASE_S), EchoStage()
    await transport.admit("r", "batch", work("r"))
    for _ in range(MAX_DELIVERIES):
        assert not is_poison(await take_one(transport, "tokenizer"))
    async with working(stage, transport, SHORT_LEASE_S):
        failure = await failure_of(transport, "r")
    assert failure.code == "too_many_tries"
    assert stage.handled == []
    assert len(await bench.dead_letters("tokenizer")) == 1


async def test_a_slow_message_keeps_its_lease(bench: Bench) -> None:
    other = await bench.join("other", lease_s=SHORT_LEASE_S)

    async def slow(_request: GenerateRequest) -> None:
        await asyncio.sleep(3 * SHORT_LEASE_S)  # the work itself, not a wait for a state

    transport, stage = await bench.join("mine", lease_s=SHORT_LEASE_S), EchoStage(slow)
    await transport.admit("r", "batch", work("r"))
    async with working(stage, transport, SHORT_LEASE_S / 5):
        await soon(stage.settled_one.wait())
    assert stage.outcomes == [Outcome.OK]
    assert await other.receive("tokenizer", 1, block_s=0) == []


async def test_a_refused_commit_is_told_to_the_stage(bench: Bench) -> None:
    thief = await bench.join("thief", lease_s=SHORT_LEASE_S)

    async def stolen(_request: GenerateRequest) -> None:
        await take_one(thief, "tokenizer")

    transport, stage = await bench.join("mine"), EchoStage(stolen)
    await transport.admit("r", "batch", work("r"))
    async with working(stage, transport):
        await soon(stage.settled_one.wait())
    assert stage.outcomes == [Outcome.FENCED]


async def test_stopping_finishes_the_message_in_work_and_hands_the_others_back(bench: Bench) -> None:
    started = asyncio.Event()
    may_finish = asyncio.Event()

    async def wait(_request: GenerateRequest) -> None:
        started.set()
        await may_finish.wait()

    transport, stage = await bench.join("mine"), EchoStage(wait)
    for request_id in ("r", "s", "t"):
        await transport.admit(request_id, "batch", work(request_id))
    async with working(stage, transport) as stopping:
        await soon(started.wait())
        stopping.set()
        may_finish.set()
    assert stage.handled == ["r"]
    assert stage.outcomes == [Outcome.OK]
    other = await bench.join("other")
    assert [d.tries for d in await other.receive("tokenizer", 5, block_s=0)] == [1, 1]


async def test_a_lost_server_is_waited_for(bench: Bench) -> None:
    transport, echo = await bench.join(), EchoStage()
    await transport.admit("r", "batch", work("r"))
    receive, num_calls = transport.receive, 0

    async def receive_later(stage: str, max_items: int, block_s: float) -> list[Delivery]:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 3:
            raise ServerUnreachable("redis://host", "is down")
        return await receive(stage, max_items, block_s)

    transport.receive = receive_later
    async with working(echo, transport):
        await soon(echo.settled_one.wait())
    assert echo.outcomes == [Outcome.OK]


async def test_a_server_that_refuses_us_ends_the_worker(bench: Bench) -> None:
    transport, stopping = await bench.join(), asyncio.Event()

    async def refused(stage: str, max_items: int, block_s: float) -> list[Delivery]:
        raise ServerRefused("redis://host", "NOPERM")

    transport.receive = refused
    with pytest.raises(ServerRefused, match="NOPERM"):
        await soon(run_worker(EchoStage(), transport, LeaseKeeper(transport, 1), stopping))


async def test_burying_what_somebody_else_holds_changes_nothing(bench: Bench) -> None:
    mine, other = await bench.join("mine"), await bench.join("other", lease_s=SHORT_LEASE_S)
    await mine.admit("r", "batch", work("r"))
    lost = await take_one(mine, "tokenizer")
    await take_one(other, "tokenizer")
    failure = Failure(stage="tokenizer", code="x", message="y", retryable=False)
    assert await bury(mine, lost, failure) is Outcome.FENCED
    assert await bench.dead_letters("tokenizer") == []
    assert await bench.state_of("r") == "queued"
