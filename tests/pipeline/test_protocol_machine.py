"""Whatever consumers do in whatever order, the scripts on a real server do what the protocol promises.

A state machine draws the steps: requests that come, are worked on, sent back and cancelled; consumers that are slow, die,
speak too late or about what is another's; calls that are sent again; groups and databases that vanish. After each step
everything on the server is compared with the model (protocol_model.py), key by key. What the server and the model might
have in common is looked at apart: results without gap or duplicate, one end, bounded credits.

A protocol that lacks one of its rules must not pass: the last test takes rules away.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from pipeline import redis_calls
from pipeline.errors import ServerUnreachable, UnknownRequest
from pipeline.keys import HANDBACK, PRIORITIES, STAGES, Keys, Priority
from pipeline.redis_receive import START
from pipeline.redis_streams import RedisStreams
from pipeline.transport import (
    END_STATES,
    Accepted,
    AddChunk,
    Busy,
    DeadLetter,
    Delivery,
    Effect,
    Emit,
    Exists,
    Finish,
    GiveCredit,
    Outcome,
    Plan,
    Publish,
    Restart,
    TakeCredit,
    Transaction,
    TransportOptions,
)
from tests.leftovers import delete_keys, keys_that_stay
from tests.pipeline.protocol_model import Entry, Picture, ProtocolModel, Queue, Who
from tests.pipeline.protocol_view import LEASE_MS, SCRIPT, read_picture

POOLS = ("pool-1", "pool-2")
SLOTS = {"a": POOLS[0], "b": POOLS[0], "c": POOLS[1]}
"""Places for consumers; one that dies is followed by another of the same pool."""
REQUESTS = ("q", "r", "s", "t")
MAX_QUEUE = 4
MAX_BYTES, MAX_REQUESTS = 9, 2  # of a pool
LEASE_S = LEASE_MS / 1000  # none ends by itself: the machine says when
LONG_AGO_MS = 10 * LEASE_MS
NUM_REMEMBERED = 24  # deliveries that somebody may still speak about
NUM_STALE = 4
NUM_CALLS = 4  # commits that may be sent again
MAX_AT_ONCE = 100

T = TypeVar("T")


class RecordingRedis(Redis):
    """Remembers what it sent last; carries a command out, and pretends that its reply was lost, where it is told to."""

    last_words: tuple[Any, ...] = ()
    loses_reply = False

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        reply = await super().execute_command(*words, **options)
        self.last_words = words
        if self.loses_reply:
            self.loses_reply = False
            raise RedisConnectionError("the connection was reset")
        return reply

    def last_args(self) -> tuple[Any, ...]:
        """The arguments of the script that it ran last."""
        return self.last_words[3 + int(self.last_words[2]) :]


class Ground:
    """A server's clients and their event loop, for many machines one after the other."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.commands = RecordingRedis.from_url(url, protocol=2)
        self.readers = Redis.from_url(url, protocol=2)
        self.raw: Any = Redis.from_url(url, protocol=2)
        self._numbers = count()
        self._script = self.run(self.raw.script_load(SCRIPT))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def new_namespace(self) -> str:
        return f"machine{next(self._numbers)}"

    async def look_at(self, keys: Keys) -> Picture:
        return read_picture(await self.raw.evalsha(self._script, 0, f"{keys.namespace}:*"), keys)

    def close(self) -> None:
        for client in (self.commands, self.readers, self.raw):
            self.run(client.aclose())
        self._loop.close()


@dataclass(eq=False, slots=True)
class Worker:
    """One consumer."""

    who: Who
    transport: RedisStreams
    lost_nonces: dict[str, str] = field(default_factory=dict[str, str])
    """By stage: under which nonce it may have been given what it has not seen."""


@dataclass(eq=False, slots=True, repr=False)
class Held:
    """A delivery as its consumer got it, and the entry that it is in the model."""

    worker: Worker
    delivery: Delivery
    entry: Entry

    def __repr__(self) -> str:
        return f"{self.entry.payload!r}, had by {self.worker.who.name}"


@dataclass(eq=False, slots=True, repr=False)
class Call:
    """A commit that was sent."""

    worker: Worker
    words: tuple[Any, ...]
    name: str
    pairs: list[tuple[Entry, Transaction]]

    def __repr__(self) -> str:
        steps = [(entry.payload, transaction.effects, transaction.ack) for entry, transaction in self.pairs]
        return f"by {self.worker.who.name}: {steps}"


def identity(payload: bytes) -> tuple[str, int]:
    """Request and attempt of an entry."""
    request_id, attempt, _ = payload.decode().split(" ")
    return request_id, int(attempt)


lanes = st.sampled_from(PRIORITIES)
WORK = (
    *("publish",) * 4,
    *("emit",) * 4,
    *("chunk",) * 2,
    "plan",
    *("chunks and plan",) * 2,
    *("credit",) * 4,
    *("credit and work",) * 2,
    *("give",) * 2,
    *("restart",) * 3,
    "finish",
    "nothing",
    "bury",
)

MISFORTUNES = (
    *("cancel",) * 4,
    *("results expire",) * 6,
    *("unreadable",) * 3,
    *("death",) * 3,
    "goodbye",
    *("no group",) * 2,
    "no data",
)


class ProtocolMachine(RuleBasedStateMachine):
    """Takes each step on the server and on the model."""

    def __init__(self, ground: Ground) -> None:
        super().__init__()
        self._ground = ground
        self._namespace = ground.new_namespace()
        self._keys = Keys(self._namespace)
        self._model = ProtocolModel(POOLS, MAX_QUEUE)
        self._readings = count(0, 1000)  # a clock on which a sweep is always due, and patience always at its end
        self._serials = count(1)
        self._attempts = dict.fromkeys(REQUESTS, 0)
        self._workers = {slot: self._new_worker(slot) for slot in SLOTS}
        self._helds: deque[Held] = deque(maxlen=NUM_REMEMBERED)
        self._calls: deque[Call] = deque(maxlen=NUM_CALLS)
        self._agrees = True

    def _new_worker(self, slot: str) -> Worker:
        who = Who(f"{slot}{next(self._serials)}", SLOTS[slot])
        options = TransportOptions(who.name, who.pool, lease_s=LEASE_S, max_queue=MAX_QUEUE)
        clock = lambda: float(next(self._readings))  # noqa: E731
        commands, readers = self._ground.commands, self._ground.readers
        return Worker(who, RedisStreams(commands, readers, "test", options, self._keys, clock))

    def _payload(self, request_id: str, attempt: int) -> bytes:
        """No two entries look the same."""
        return b"%s %d %d" % (request_id.encode(), attempt, next(self._serials))

    def _current(self) -> list[Held]:
        return [held for held in self._helds if self._model.holds(held.worker.who, held.entry, held.delivery.nonce)]

    # Requests

    @initialize(first=lanes, second=lanes)
    def begin(self, first: Priority, second: Priority) -> None:
        """Without work there is little to see: two requests are in somebody's hands."""
        self._admit(REQUESTS[0], first)
        self._admit(REQUESTS[1], second)
        self._helds += self._ground.run(self._receive(self._workers["a"], "tokenizer", 2))

    @rule(
        request_id=st.sampled_from(REQUESTS),
        priority=lanes,
        reply=st.sampled_from(("comes", "comes", "is lost", "comes twice")),
    )
    def admit(self, request_id: str, priority: Priority, reply: str) -> None:
        self._admit(request_id, priority, reply)

    def _admit(self, request_id: str, priority: Priority, reply: str = "comes") -> None:
        attempt = self._attempts[request_id] + 1
        payload = self._payload(request_id, attempt)
        commands, transport = self._ground.commands, self._workers["a"].transport
        call = transport.admit(request_id, priority, payload, attempt)
        real = self._ground.run(self._lost(call) if reply == "is lost" else call)
        ticket = commands.last_args()[0]
        expected = self._model.admit(request_id, priority, payload, attempt, ticket)
        if expected == "accepted":
            self._attempts[request_id] = attempt
        if reply != "is lost":
            assert real == {"accepted": Accepted(), "exists": Exists()}.get(expected, real)
            assert isinstance(real, Busy) == (expected == "busy")
        if reply == "comes twice":
            again = self._ground.run(commands.execute_command(*commands.last_words))
            assert again.decode() == self._model.admit(request_id, priority, payload, attempt, ticket)

    async def _cancel(self, request_id: str) -> None:
        try:
            real = "cancelled" if await self._workers["a"].transport.cancel(request_id, b"cancelled") else "ended"
        except UnknownRequest:
            real = "unknown"
        assert real == self._model.cancel(request_id, b"cancelled")

    # Entries

    @rule(
        slot=st.sampled_from(sorted(SLOTS)),
        stage=st.sampled_from(STAGES),
        max_items=st.sampled_from((1, 1, 2, 4)),
        is_lost=st.sampled_from((False, False, False, True)),
    )
    def receive(self, slot: str, stage: str, max_items: int, is_lost: bool) -> None:
        self._helds += self._ground.run(self._receive(self._workers[slot], stage, max_items, is_lost=is_lost))

    @precondition(lambda self: any(entry.state != "held" or entry.lease_ended for entry in self._model.entries()))
    @rule(data=st.data(), max_items=st.sampled_from((1, 2)))
    def receive_what_is_there(self, data: st.DataObject, max_items: int) -> None:
        free = [entry for entry in self._model.entries() if entry.state != "held" or entry.lease_ended]
        stage, _, pool = data.draw(st.sampled_from(free)).queue
        slot = data.draw(st.sampled_from([slot for slot in sorted(SLOTS) if pool in (None, SLOTS[slot])]))
        self._helds += self._ground.run(self._receive(self._workers[slot], stage, max_items))

    async def _receive(self, worker: Worker, stage: str, max_items: int, *, is_lost: bool = False) -> list[Held]:
        receiver = worker.transport._receivers.get(stage)
        if receiver is not None:  # a sweep from the start, each time: where one goes on is tested elsewhere
            receiver._cursors = [START for _ in receiver.streams]
        call = worker.transport.receive(stage, max_items, block_s=0)
        deliveries = await (self._lost(call) if is_lost else call)
        nonce = self._ground.commands.last_args()[3]
        lost_nonce = worker.lost_nonces.pop(stage, None)
        assert lost_nonce in (None, nonce), "a reply was lost, and nobody asked for what it held"
        entries = self._model.receive(worker.who, stage, max_items, nonce, sent_again=lost_nonce is not None)
        if deliveries is None:
            worker.lost_nonces[stage] = nonce
            return []
        assert [(d.payload, d.tries) for d in deliveries] == [(entry.payload, entry.tries) for entry in entries]
        for delivery in deliveries:
            assert (delivery.nonce, delivery.consumer, delivery.stage) == (nonce, worker.who.name, stage)
        return [Held(worker, delivery, entry) for delivery, entry in zip(deliveries, entries, strict=True)]

    async def _lost(self, call: Coroutine[Any, Any, Any]) -> None:
        """Make a call whose reply is lost."""
        self._ground.commands.loses_reply = True
        with pytest.raises(ServerUnreachable):
            await call

    @precondition(lambda self: self._helds)
    @rule(data=st.data(), what=st.sampled_from(("renew", "end", "end", "hand back")))
    def change_lease(self, data: st.DataObject, what: str) -> None:
        held = self._draw_held(data)
        worker = self._speaker(data, held)
        match what:
            case "renew":
                expected = self._model.renew(worker.who, held.entry, held.delivery.nonce)
                assert self._ground.run(worker.transport.renew([held.delivery] * 2)) == [expected] * 2
            case "hand back":
                self._ground.run(worker.transport.hand_back([held.delivery] * 2))
                self._model.hand_back(worker.who, held.entry, held.delivery.nonce)
            case _:
                entries = [entry for entry in self._model.entries() if entry.state == "held"]
                if entries:
                    self._ground.run(self._end_lease(data.draw(st.sampled_from(entries))))

    def _draw_held(self, data: st.DataObject) -> Held:
        """Mostly what its consumer still holds."""
        current = self._current()
        stale = [held for held in self._helds if held not in current][-NUM_STALE:]
        return data.draw(st.sampled_from(current * 3 + stale))

    def _speaker(self, data: st.DataObject, held: Held) -> Worker:
        """Mostly the consumer of a delivery, sometimes one that has nothing to do with it."""
        others = [worker for worker in self._workers.values() if worker is not held.worker]
        return data.draw(st.sampled_from((held.worker, held.worker, held.worker, *others)))

    async def _end_lease(self, entry: Entry) -> None:
        stream, stage = self._keys.stream(*entry.queue), entry.queue[0]
        for entry_id, fields in await self._ground.raw.xrange(stream):
            if fields[b"p"] == entry.payload:
                await self._ground.raw.xclaim(stream, stage, entry.holder, 0, [entry_id], idle=LONG_AGO_MS, justid=True)
        entry.lease_ended = True

    # Transactions

    @precondition(lambda self: self._current())
    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        """A holder goes on with what it holds."""
        held = data.draw(st.sampled_from(self._current()))
        self._commit(held.worker, [(held.entry, self._draw_transaction(data, held))])

    @precondition(lambda self: self._current())
    @rule(data=st.data())
    def work_on(self, data: st.DataObject) -> None:
        """Once more: it should be the most frequent step, also where a run leaves out some kinds of steps."""
        self.work(data)

    @precondition(lambda self: self._helds)
    @rule(data=st.data(), num=st.sampled_from((1, 2, 3)))
    def work_on_many(self, data: st.DataObject, num: int) -> None:
        """Somebody commits what need not be its own, in one call."""
        helds = [self._draw_held(data) for _ in range(num)]
        pairs = [(held.entry, self._draw_transaction(data, held, is_strict=False)) for held in helds]
        self._commit(self._speaker(data, helds[0]), pairs)

    @precondition(lambda self: self._calls_to_repeat())
    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        """What the caller does whose reply was lost, and what the network does with a late packet."""
        call = data.draw(st.sampled_from(self._calls_to_repeat()))
        reply = self._ground.run(self._ground.commands.execute_command(*call.words))
        expected = self._model.commit(call.worker.who, call.name, call.pairs)
        assert [Outcome(word.decode()) for word in reply] == expected

    def _calls_to_repeat(self) -> list[Call]:
        """All but those behind which there is another commit under the same claim: a holder makes one at a time."""
        repeatable = [call for call in self._calls if all(_may_be_repeated(call, *pair) for pair in call.pairs)]
        entries = self._model.entries()
        return [call for call in repeatable if any(entry in entries for entry, _ in call.pairs)] or repeatable[-1:]

    def _commit(self, worker: Worker, pairs: list[tuple[Entry, Transaction]]) -> None:
        real = self._ground.run(worker.transport.commit([transaction for _, transaction in pairs]))
        name = self._ground.commands.last_args()[1]
        self._calls.append(Call(worker, self._ground.commands.last_words, name, pairs))
        assert real == self._model.commit(worker.who, name, pairs)
        for _, transaction in pairs:
            for effect in transaction.effects:
                if isinstance(effect, Restart) and transaction.request_id in self._attempts:
                    attempts = self._attempts
                    attempts[transaction.request_id] = max(attempts[transaction.request_id], effect.attempt)

    def _draw_transaction(self, data: st.DataObject, held: Held, *, is_strict: bool = True) -> Transaction:
        request_id, attempt = identity(held.delivery.payload)
        if not is_strict:
            request_id = data.draw(st.sampled_from((*[request_id] * 7, "nobody")))
            attempt += data.draw(st.sampled_from((*[0] * 7, 1)))
        kind = data.draw(st.sampled_from(WORK))
        ack = kind == "restart" or data.draw(st.sampled_from((False, False, False, True)))
        effects = self._draw_effects(data, kind, request_id, attempt)
        return Transaction(held.delivery, request_id, attempt, effects, ack)

    def _draw_effects(self, data: st.DataObject, kind: str, request_id: str, attempt: int) -> tuple[Effect, ...]:
        def payload() -> bytes:
            return self._payload(request_id, attempt)

        def publish() -> Publish:
            return Publish(data.draw(st.sampled_from(STAGES)), data.draw(lanes), payload())

        def emit() -> Emit:
            request = self._model.requests.get(request_id)
            num_tokens = request.num_tokens if request else 0
            first = max(0, num_tokens + data.draw(st.sampled_from((0, 0, 0, 0, 1, -1))))
            num = data.draw(st.sampled_from((1, 1, 3)))
            return Emit(b"%d+%d" % (first, num), first, num)

        def chunk(index: int | None = None) -> AddChunk:
            chosen = data.draw(st.sampled_from((0, 1, 2))) if index is None else index
            return AddChunk(chosen, data.draw(st.sampled_from((b"x", b"x", b"y"))))

        def plan() -> Plan:
            return Plan(data.draw(st.sampled_from((1, 2))), data.draw(lanes), payload())

        def credit() -> TakeCredit:
            return TakeCredit(data.draw(st.sampled_from((1, 3, 5, 9))), MAX_BYTES, MAX_REQUESTS)

        def finish() -> Finish:
            return Finish(b"end", data.draw(st.sampled_from(END_STATES)))

        match kind:
            case "publish":
                return (publish(), publish()) if data.draw(st.booleans()) else (publish(),)
            case "emit":
                one = emit()
                first = one.first_index + one.num_tokens
                return (one, Emit(b"%d+1" % first, first, 1)) if data.draw(st.booleans()) else (one,)
            case "chunk":
                return (chunk(),)
            case "plan":
                return (plan(),)
            case "chunks and plan":
                return (chunk(0), chunk(1), plan())
            case "credit":
                return (credit(),)
            case (
                "credit and work"
            ):  # not with a delta: whether no room or a wrong index is named first is nobody's rule
                return (publish(), credit(), chunk())
            case "give":
                return (GiveCredit(),)
            case "restart":
                later = attempt + data.draw(st.sampled_from((1, 2)))
                return (Restart(later, self._payload(request_id, later)),)
            case "finish":
                return data.draw(st.sampled_from(((finish(),), (emit(), finish()), (finish(), DeadLetter("given up")))))
            case "bury":
                return (DeadLetter("set aside"),)
            case _:
                return ()

    # Misfortunes

    @rule(data=st.data(), what=st.sampled_from(MISFORTUNES))
    def misfortune(self, data: st.DataObject, what: str) -> None:
        """What is rarer than work."""
        run = self._ground.run
        match what:
            case "cancel":
                run(self._cancel(data.draw(st.sampled_from((*REQUESTS, "nobody")))))
            case "results expire":
                ended = [name for name, request in self._model.requests.items() if request.has_ended]
                if ended:
                    run(self._expire_results(data.draw(st.sampled_from(ended))))
            case "unreadable":
                if self._helds:
                    held = self._draw_held(data)
                    run(self._dead_letter(self._speaker(data, held), held))
            case "death" | "goodbye":
                run(self._replace(data.draw(st.sampled_from(sorted(SLOTS))), is_told=what == "goodbye"))
            case "no group":
                run(self._lose_group(data.draw(st.sampled_from(list(self._model.queues)))))
            case _:
                run(self._lose_everything())

    async def _expire_results(self, request_id: str) -> None:
        keys = (self._keys.request(request_id), self._keys.results(request_id))
        assert await self._ground.raw.delete(*keys) == 2
        self._model.forget_results(request_id)

    async def _dead_letter(self, worker: Worker, held: Held) -> None:
        await worker.transport.dead_letter(held.delivery, "unreadable")
        self._model.dead_letter(worker.who, held.entry, held.delivery.nonce, "unreadable")

    async def _replace(self, slot: str, *, is_told: bool) -> None:
        """A consumer is no more, with or without a goodbye; what it held is held until its lease ends."""
        dead = self._workers[slot]
        if is_told:
            await dead.transport._take_leave()
        self._workers[slot] = self._new_worker(slot)
        self._helds = deque((held for held in self._helds if held.worker is not dead), NUM_REMEMBERED)

    async def _lose_group(self, queue: Queue) -> None:
        stream = self._keys.stream(*queue)
        if await self._ground.raw.exists(stream):
            await self._ground.raw.xgroup_destroy(stream, queue[0])
        self._model.lose_group(queue)

    async def _lose_everything(self) -> None:
        raw = self._ground.raw
        await delete_keys(raw, self._namespace)
        self._model.lose_everything()
        lost_at = await raw.time()
        while (await raw.time())[1] // 1000 == lost_at[1] // 1000:  # noqa: ASYNC110 - an entry's id must not come again
            pass

    # What must hold after each step

    @invariant()
    def server_and_model_agree(self) -> None:
        self._agrees = False
        found = self._ground.run(self._ground.look_at(self._keys))
        assert found == self._model.picture()
        for request_id, entries in found.results.items():
            check_results(request_id, entries)
        for pool, owned in found.credits.items():
            assert len(owned) <= MAX_REQUESTS, f"{len(owned)} credits of {pool}"
            assert sum(num_bytes for _, num_bytes in owned.values()) <= MAX_BYTES, f"too many bytes of {pool}"
        self._agrees = True

    def teardown(self) -> None:
        try:
            if self._agrees:
                self._ground.run(self._drain())
        finally:
            self._ground.run(delete_keys(self._ground.raw, self._namespace))

    async def _drain(self) -> None:
        """Cancel all requests and serve all entries: nothing is left that stays for ever."""
        for request_id in list(self._model.requests):
            await self._cancel(request_id)
        for slot in ("a", "c"):  # one of each pool
            await self._serve_all(self._workers[slot])
        assert self._model.entries() == []
        assert await keys_that_stay(self._ground.raw, self._namespace) == []

    async def _serve_all(self, worker: Worker) -> None:
        entries = self._model.entries()
        for entry in entries:
            if entry.state == "held":
                await self._end_lease(entry)
        for stage in dict.fromkeys(entry.queue[0] for entry in entries):
            helds = await self._receive(worker, stage, MAX_AT_ONCE)
            done = [Transaction(held.delivery, *identity(held.delivery.payload), (), ack=True) for held in helds]
            outcomes = await worker.transport.commit(done)
            name = self._ground.commands.last_args()[1]
            pairs = [(held.entry, transaction) for held, transaction in zip(helds, done, strict=True)]
            assert outcomes == self._model.commit(worker.who, name, pairs) == [Outcome.GONE] * len(done)


def _may_be_repeated(call: Call, entry: Entry, transaction: Transaction) -> bool:
    is_lost = entry.nonce != transaction.delivery.nonce
    return is_lost or call.name not in entry.made or entry.last_commit == call.name


def check_results(request_id: str, entries: list[tuple[int | None, bytes]]) -> None:
    """Deltas without gap or duplicate, then at most one end, and nothing behind it."""
    num_tokens = 0
    for place, (offset, data) in enumerate(entries):
        if offset is None:
            assert place == len(entries) - 1, f"{request_id} goes on after its end"
            return
        first, num = (int(number) for number in data.split(b"+"))
        assert (first, offset) == (num_tokens, num_tokens + num), (
            f"{request_id}: {data!r} at {offset} after {num_tokens}"
        )
        num_tokens = offset


@pytest.fixture
def ground(valkey_url: str) -> Iterator[Ground]:
    ground = Ground(valkey_url)
    yield ground
    ground.close()


DEFAULT = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    stateful_step_count=50,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def run_machine(ground: Ground, chosen: settings) -> None:
    def machine() -> ProtocolMachine:
        return ProtocolMachine(ground)

    run_state_machine_as_test(machine, settings=chosen)


def test_the_server_does_what_the_protocol_promises(ground: Ground) -> None:
    run_machine(ground, DEFAULT)
