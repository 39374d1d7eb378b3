"""The harness: what becomes of messages, good and bad, and of work in hand when it stops."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_store.errors import BlobTooLarge, PoolFull
from pipeline import faults
from pipeline import worker as worker_module
from pipeline.errors import InvalidRequest, ServerRefused, ServerUnreachable, SluiceError, StateDamaged
from pipeline.keys import MAX_DELIVERIES
from pipeline.leases import LeaseKeeper
from pipeline.messages import Failure, GenerateRequest, Terminal
from pipeline.params import SamplingParams
from pipeline.transport import Delivery, Outcome, Publish, Transaction, Transport
from pipeline.wire import pack, unpack
from pipeline.worker import bury, is_poison, run_worker
from tests.pipeline.benches import Bench, soon, take, take_one

LONG_LEASE_S, SHORT_LEASE_S = 10.0, 0.05
Handler = Callable[[GenerateRequest], Awaitable[None]]


def work(request_id: str) -> bytes:
    request = GenerateRequest(
        request_id=request_id, priority="batch", model="m", prompt="p", params=SamplingParams(seed=1)
    )
    return pack(request)


class EchoStage:
    """Publishes each request to prefill, after doing what a test says; gives none up without failing it."""

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

    async def give_up(self, delivery: Delivery) -> Transaction | None:
        return None

    async def settled(self, transaction: Transaction, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.settled_one.set()


class PassingStage(EchoStage):
    """Publishes what it has given up as it came."""

    async def give_up(self, delivery: Delivery) -> Transaction | None:
        request = unpack(delivery.payload, GenerateRequest)
        effect = Publish("prefill", request.priority, b"as it came")
        return Transaction(delivery, request.request_id, request.attempt, (effect,), ack=True)


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
def _disarm() -> Iterator[None]:
    yield
    faults.configure(None, None)


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


async def test_a_message_that_ends_every_process_takes_none_that_came_with_it_along(bench: Bench) -> None:
    names = ["a", "b", "poison", "c", "d"]
    client = await bench.join("client", lease_s=SHORT_LEASE_S)
    for name in names:
        await client.admit(name, "batch", work(name))
    num_deaths, is_reached = 0, asyncio.Event()

    async def dies_of_poison(request: GenerateRequest) -> None:
        if request.request_id == "poison":
            is_reached.set()
            await asyncio.sleep(60)  # until it is killed

    handled: list[str] = []
    while not await bench.dead_letters("tokenizer"):
        is_reached.clear()
        transport = await bench.join(f"process-{num_deaths}", lease_s=SHORT_LEASE_S)
        stage = EchoStage(dies_of_poison)
        leases = LeaseKeeper(transport, SHORT_LEASE_S)
        keeping = asyncio.create_task(leases.run())
        running = asyncio.create_task(run_worker(stage, transport, leases, asyncio.Event()))
        died = asyncio.create_task(is_reached.wait())

        async def is_buried() -> None:
            while not await bench.dead_letters("tokenizer"):  # noqa: ASYNC110 - a bench tells nobody
                await asyncio.sleep(0.01)

        buried = asyncio.create_task(is_buried())
        await soon(asyncio.wait({died, buried}, return_when=asyncio.FIRST_COMPLETED))
        num_deaths += died.done()
        if buried.done():
            while len(handled) + len([name for name in stage.handled if name != "poison"]) < 4:
                await soon(asyncio.wait_for(stage.settled_one.wait(), 1))
                stage.settled_one.clear()
        for task in (keeping, running, died, buried):
            task.cancel()
        await asyncio.gather(keeping, running, died, buried, return_exceptions=True)
        handled += [name for name in stage.handled if name != "poison"]
    assert num_deaths == MAX_DELIVERIES
    assert sorted(handled) == ["a", "b", "c", "d"]
    assert (await failure_of(client, "poison")).code == "too_many_tries"
    assert len(await take(client, "prefill", 4)) == 4


@pytest.mark.parametrize(
    ("error", "num_handled"),
    [(SluiceError("no way"), 1), (RuntimeError("secret"), MAX_DELIVERIES), (PoolFull(3, 2, 1), MAX_DELIVERIES)],
    ids=lambda value: type(value).__name__,
)
async def test_what_a_stage_can_give_up_costs_its_request_nothing(
    bench: Bench, error: Exception, num_handled: int
) -> None:
    transport, stage = await bench.join(lease_s=SHORT_LEASE_S), PassingStage(raising(error))
    await transport.admit("r", "batch", work("r"))
    async with working(stage, transport, SHORT_LEASE_S):
        delivery = await take_one(transport, "prefill")
        await soon(stage.settled_one.wait())
    assert delivery.payload == b"as it came"
    assert stage.handled == ["r"] * num_handled
    assert stage.outcomes == [Outcome.OK]
    assert await bench.dead_letters("tokenizer") == []
    assert await transport.queue_length("tokenizer", "batch") == 0


async def test_poison_that_a_stage_can_give_up_is_not_handled_again(bench: Bench) -> None:
    transport, stage = await bench.join(lease_s=SHORT_LEASE_S), PassingStage()
    await transport.admit("r", "batch", work("r"))
    for _ in range(MAX_DELIVERIES):
        await take_one(transport, "tokenizer")
    async with working(stage, transport, SHORT_LEASE_S):
        assert (await take_one(transport, "prefill")).payload == b"as it came"
    assert stage.handled == []
    assert await bench.dead_letters("tokenizer") == []


async def test_a_wrong_or_unreadable_message_is_not_given_up_but_ended(bench: Bench) -> None:
    transport, stage = await bench.join(), PassingStage(raising(InvalidRequest("prompt", "is too long")))
    await transport.admit("r", "batch", work("r"))
    await transport.admit("s", "batch", work("s").replace(b"generate_request", b"generate_reqvest"))
    async with working(stage, transport):
        assert (await failure_of(transport, "r")).code == "invalid_request"
        assert (await failure_of(transport, "s")).code == "unreadable_message"
    assert await transport.queue_length("prefill", "batch") == 0


async def test_giving_up_what_cannot_be_committed_buries_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, stage = await bench.join(), PassingStage(raising(SluiceError("no way")))
    await transport.admit("r", "batch", work("r"))

    async def damaged(transactions: object) -> list[Outcome]:
        raise StateDamaged(("key holds a list",))

    monkeypatch.setattr(transport, "commit", damaged)
    async with working(stage, transport):
        await _until_dead(bench)
    [(_, reason)] = await bench.dead_letters("tokenizer")
    assert reason == "internal_error: no way; key holds a list; key holds a list"


@pytest.mark.parametrize(
    ("point", "num_handled", "outcomes"),
    [("claimed", 1, [Outcome.OK]), ("handled", 2, [Outcome.OK]), ("committed", 1, [])],
)
async def test_a_failure_at_any_point_of_a_message_has_its_effect_once(
    bench: Bench, tmp_path: Path, point: str, num_handled: int, outcomes: list[Outcome]
) -> None:
    faults.configure(f"tokenizer.{point}=fail", tmp_path)
    transport, stage = await bench.join(lease_s=SHORT_LEASE_S), EchoStage()
    reader = await bench.join("reader", lease_s=LONG_LEASE_S)
    for request_id in ("r", "s"):
        await transport.admit(request_id, "batch", work(request_id))
    async with working(stage, transport, SHORT_LEASE_S):
        for delivery in await take(reader, "prefill", 2):
            assert delivery.payload == b"tokenized"
        await _until(lambda: len(stage.outcomes) == len(outcomes) + 1)
    assert len(faults.struck(tmp_path, f"tokenizer.{point}")) == 1
    assert stage.handled.count("r") == num_handled
    assert stage.outcomes == [*outcomes, Outcome.OK]
    assert await reader.queue_length("prefill", "batch") == 2
    assert await reader.queue_length("tokenizer", "batch") == 0


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


async def _until(condition: Callable[[], bool]) -> None:
    async def holds() -> None:
        while not condition():  # noqa: ASYNC110 - the stage's lists set no event
            await asyncio.sleep(0.005)

    await soon(holds())


async def _until_dead(bench: Bench) -> None:
    async def holds() -> None:
        while not await bench.dead_letters("tokenizer"):  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.005)

    await soon(holds())
