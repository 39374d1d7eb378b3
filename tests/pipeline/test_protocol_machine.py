"""Whatever consumers do in whatever order, the scripts on a real server do what the protocol promises.

A state machine draws the steps: requests that come, are worked on, sent back and cancelled; consumers that are slow,
die, speak too late or about what is another's; calls that are sent again; groups and databases that vanish. After each
step everything on the server is compared with the model (protocol_model.py), key by key. What both might get wrong
together is looked at apart: results without gap or duplicate, one end, bounded credits.

A protocol that lacks one of its rules must not pass: the last test takes rules away.
"""

from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pipeline import redis_calls
from pipeline.errors import UnknownRequest
from pipeline.keys import PRIORITIES, STAGES, Priority
from pipeline.redis_receive import START
from pipeline.redis_streams import RedisStreams
from pipeline.transport import (
    Accepted,
    AddChunk,
    Busy,
    Delivery,
    Emit,
    Exists,
    Outcome,
    Publish,
    Restart,
    TakeCredit,
    Transaction,
)
from tests.leftovers import delete_keys, keys_that_stay
from tests.pipeline.protocol_draws import (
    MAX_BYTES,
    MAX_REQUESTS,
    TransactionDraws,
    any_of,
    check_results,
    identity,
    payload_of,
)
from tests.pipeline.protocol_ground import Ground
from tests.pipeline.protocol_model import Entry, ProtocolModel, Who

POOLS = ("pool-1", "pool-2")
SLOTS = {"a": POOLS[0], "b": POOLS[0], "c": POOLS[1]}
"""Places for consumers; one that dies is followed by another of the same pool."""
REQUESTS = ("q", "r", "s", "t")
MAX_QUEUE = 2
NUM_REMEMBERED = 24  # deliveries that somebody may still speak about
NUM_STALE = 4  # of those that are not held any more, as many may be drawn
NUM_CALLS = 4  # commits that may be sent again
MAX_AT_ONCE = 100  # more than a machine ever has in a stage

CALM = (*("work",) * 8, *("take",) * 4, *("work on many",) * 2, "admit", "commit again", "change lease")
TROUBLED = (*CALM, *("receive", "work on many", "change lease") * 3, *("commit again",) * 2)
STORMY = (*TROUBLED, *("misfortune",) * 6)
"""What a run is made of, in these parts."""

MISFORTUNES = (
    *("cancel",) * 3,
    *("unreadable",) * 3,
    *("death",) * 3,
    *("goodbye",) * 3,
    *("no group",) * 3,
    "no data",
)

lanes = st.sampled_from(PRIORITIES)
slots = st.sampled_from(sorted(SLOTS))


@dataclass(eq=False, slots=True)
class Worker:
    """One consumer."""

    who: Who
    transport: RedisStreams
    lost_nonces: dict[str, str] = field(default_factory=dict[str, str])
    """By stage: under which nonce it may have been given what it has not seen."""


class Held:
    """A delivery as its consumer got it, and the entry that it is in the model."""

    def __init__(self, worker: Worker, delivery: Delivery, entry: Entry) -> None:
        self.worker = worker
        self.delivery = delivery
        self.entry = entry

    def __repr__(self) -> str:
        return f"<{self.entry.payload!r} of {self.entry.queue}, delivered to {self.worker.who.name}>"


class Call:
    """A commit that was sent: its words, its name, and the entries with what was asked for them."""

    def __init__(
        self, worker: Worker, words: tuple[Any, ...], name: str, pairs: list[tuple[Entry, Transaction]]
    ) -> None:
        self.worker = worker
        self.words = words
        self.name = name
        self.pairs = pairs

    def __repr__(self) -> str:
        return f"<by {self.worker.who.name}: {[_shown(transaction) for _, transaction in self.pairs]}>"


class ProtocolMachine(RuleBasedStateMachine):
    """Takes each step on the server and on the model."""

    def __init__(self, ground: Ground) -> None:
        super().__init__()
        self._ground = ground
        self._keys = ground.new_keys()
        self._model = ProtocolModel(POOLS, MAX_QUEUE)
        self._serials = count(1)
        self._attempts: dict[str, int] = dict.fromkeys(REQUESTS, 0)
        self._workers = {slot: self._new_worker(slot) for slot in SLOTS}
        self._helds: deque[Held] = deque(maxlen=NUM_REMEMBERED)
        self._calls: deque[Call] = deque(maxlen=NUM_CALLS)
        self._agrees = True
        self._mix: tuple[str, ...] = CALM

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._ground.run(coroutine)

    def _next_serial(self) -> int:
        return next(self._serials)

    def _new_worker(self, slot: str) -> Worker:
        who = Who(f"{slot}{self._next_serial()}", SLOTS[slot])
        return Worker(who, self._ground.transport(who, self._keys, MAX_QUEUE))

    def _current(self) -> list[Held]:
        """What its consumer still holds."""
        return [held for held in self._helds if self._model.holds(held.worker.who, held.entry, held.delivery.nonce)]

    def _draw_held(self, data: st.DataObject) -> Held:
        """Mostly what its consumer still holds."""
        current = self._current()
        stale = [held for held in self._helds if held not in current][-NUM_STALE:]
        return data.draw(st.sampled_from(current * 3 + stale))

    def _draw_speaker(self, data: st.DataObject, held: Held) -> Worker:
        """Mostly the consumer of a delivery, sometimes one that has nothing to do with it."""
        slots_of_others = [slot for slot, worker in self._workers.items() if worker is not held.worker]
        slot = data.draw(any_of(*["its own"] * 6, *slots_of_others))
        return held.worker if slot == "its own" else self._workers[slot]

    # Steps

    @initialize(priorities=st.tuples(lanes, lanes, lanes), mix=st.sampled_from(("calm", "troubled", "stormy")))
    def begin(self, priorities: tuple[Priority, ...], mix: str) -> None:
        """Without work there is little to see: some requests have come to prefill."""
        self._mix = {"calm": CALM, "troubled": TROUBLED, "stormy": STORMY}[mix]
        worker = self._workers["a"]
        for request_id, priority in zip(REQUESTS, priorities, strict=False):
            self._admit(request_id, priority, "comes")
        for held in self._run(self._receive(worker, "tokenizer", len(priorities))):
            request_id, attempt = identity(held.delivery.payload)
            tokenized = payload_of(request_id, attempt, self._next_serial())
            effects = (Publish("prefill", priorities[0], tokenized),)
            self._commit(worker, [(held.entry, Transaction(held.delivery, request_id, attempt, effects, ack=True))])
        self._helds += self._run(self._receive(worker, "prefill", len(priorities)))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One rule: of several, a run would leave some out, and without one of these most of the others do nothing."""
        match data.draw(any_of(*self._mix)):
            case "admit":
                self.admit(data)
            case "receive":
                self.receive(data)
            case "change lease" if self._helds:
                self.change_lease(data)
            case "commit again" if self._calls_to_repeat():
                self.commit_again(data)
            case "misfortune":
                self.misfortune(data)
            case "work on many" if self._current():
                self.work_on_many(data)
            case "work" if self._current():
                self.work(data)
            case _ if self._model.entries():
                self.take(data)
            case _:
                self.admit(data)

    # Requests

    def admit(self, data: st.DataObject) -> None:
        """A request comes; under an id that was used before, mostly after the results of then have expired."""
        request_id = data.draw(any_of(*REQUESTS))
        if request_id in self._model.ended() and data.draw(st.integers(0, 3)):
            self._run(self._expire_results(request_id))
        self._admit(request_id, data.draw(lanes), data.draw(any_of("comes", "is lost", "comes twice")))

    def _admit(self, request_id: str, priority: Priority, reply: str) -> None:
        attempt = self._attempts[request_id] + 1
        payload = payload_of(request_id, attempt, self._next_serial())
        commands, transport = self._ground.commands, self._workers["a"].transport
        call = transport.admit(request_id, priority, payload, attempt)
        real = self._run(self._ground.lost(call) if reply == "is lost" else call)
        ticket = commands.last_args()[0]
        expected = self._model.admit(request_id, priority, payload, attempt, ticket)
        if expected == "accepted":
            self._attempts[request_id] = attempt
        if reply != "is lost":
            kinds = {"accepted": Accepted, "exists": Exists, "busy": Busy}
            assert isinstance(real, kinds[expected]), f"{real}, {expected}"
        if reply == "comes twice":
            again = self._run(commands.execute_command(*commands.last_words))
            assert again.decode() == self._model.admit(request_id, priority, payload, attempt, ticket)

    async def _cancel(self, request_id: str) -> None:
        try:
            real = "cancelled" if await self._workers["a"].transport.cancel(request_id, b"cancelled") else "ended"
        except UnknownRequest:
            real = "unknown"
        assert real == self._model.cancel(request_id, b"cancelled")

    # Entries

    def receive(self, data: st.DataObject) -> None:
        """Somebody asks, mostly again where a reply was lost, perhaps for less than that held; this one may be lost."""
        is_lost = data.draw(st.booleans())
        lost = [(slot, stage) for slot, worker in self._workers.items() for stage in worker.lost_nonces]
        if lost and data.draw(st.integers(0, 3)):
            slot, stage = data.draw(st.sampled_from(lost))
            max_items = data.draw(any_of(1, 1, 4))
        else:
            stages = [entry.queue[0] for entry in self._model.free()]
            slot, stage = data.draw(slots), data.draw(any_of(*stages, *STAGES))
            max_items = 4 if is_lost else data.draw(any_of(1, 2, 4))
        self._helds += self._run(self._receive(self._workers[slot], stage, max_items, is_lost=is_lost))

    def take(self, data: st.DataObject) -> None:
        """Somebody takes what is free, or takes over what another holds for too long."""
        held = self._model.held()
        if held and (not self._model.free() or data.draw(st.integers(0, 3)) == 3):
            self._run(self._end_lease(held[data.draw(st.integers(0, len(held) - 1))]))
        queues = list(dict.fromkeys(entry.queue for entry in self._model.free()))
        stage, _, pool = data.draw(any_of(*queues))
        slot = data.draw(any_of(*(slot for slot in sorted(SLOTS) if pool in (None, SLOTS[slot]))))
        self._helds += self._run(self._receive(self._workers[slot], stage, data.draw(any_of(1, 2))))

    async def _receive(self, worker: Worker, stage: str, max_items: int, *, is_lost: bool = False) -> list[Held]:
        receiver = worker.transport._receivers.get(stage)
        if receiver is not None:  # a sweep from the start, each time: where one goes on is tested elsewhere
            receiver._cursors = [START for _ in receiver.streams]
        call = worker.transport.receive(stage, max_items, block_s=0)
        deliveries = await (self._ground.lost(call) if is_lost else call)
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

    def change_lease(self, data: st.DataObject) -> None:
        what = data.draw(any_of("its lease ends", "its lease ends", "hand back", "renew"))
        held = self._draw_held(data)
        worker = self._draw_speaker(data, held)
        twice = [held.delivery] * 2
        if what == "renew":
            expected = self._model.renew(worker.who, held.entry, held.delivery.nonce)
            assert self._run(worker.transport.renew(twice)) == [expected] * 2
        elif what == "hand back":
            self._model.hand_back(worker.who, held.entry, held.delivery.nonce)
            self._run(worker.transport.hand_back(twice))
        elif held.entry in self._model.held():
            self._run(self._end_lease(held.entry))

    async def _end_lease(self, entry: Entry) -> None:
        await self._ground.end_lease(self._keys, entry)
        entry.lease_ended = True

    # Transactions

    def work(self, data: st.DataObject) -> None:
        """A holder goes on with what it holds."""
        held = data.draw(st.sampled_from(self._current()))
        transaction = TransactionDraws(data, self._model, self._next_serial).transaction(held.delivery, is_sane=True)
        self._commit(held.worker, [(held.entry, transaction)])
        if not data.draw(st.integers(0, 5)):
            self._commit_again(self._calls[-1])

    def work_on_many(self, data: st.DataObject) -> None:
        """Somebody commits what need not be its own, in one call, which may be sent twice."""
        draws = TransactionDraws(data, self._model, self._next_serial)
        helds = [self._draw_held(data)]
        for _ in range(data.draw(st.integers(0, 2))):
            helds.append(helds[0] if data.draw(st.booleans()) else self._draw_held(data))
        pairs = [(held.entry, draws.transaction(held.delivery, is_sane=False)) for held in helds]
        self._commit(self._draw_speaker(data, helds[0]), pairs)
        if data.draw(st.booleans()):
            self._commit_again(self._calls[-1])

    def _commit(self, worker: Worker, pairs: list[tuple[Entry, Transaction]]) -> None:
        real = self._run(worker.transport.commit([transaction for _, transaction in pairs]))
        name = self._ground.commands.last_args()[1]
        call = Call(worker, self._ground.commands.last_words, name, pairs)
        self._calls.append(call)
        note(call)
        assert real == self._model.commit(worker.who, name, pairs)
        for _, transaction in pairs:
            for effect in transaction.effects:
                if isinstance(effect, Restart) and transaction.request_id in self._attempts:
                    latest = max(self._attempts[transaction.request_id], effect.attempt)
                    self._attempts[transaction.request_id] = latest

    def commit_again(self, data: st.DataObject) -> None:
        """What the caller does whose reply was lost, and what the network does with a late packet."""
        self._commit_again(data.draw(st.sampled_from(self._calls_to_repeat())))

    def _commit_again(self, call: Call) -> None:
        note(f"again {call}")
        reply = self._run(self._ground.commands.execute_command(*call.words))
        assert [Outcome(word.decode()) for word in reply] == self._model.commit(call.worker.who, call.name, call.pairs)

    def _calls_to_repeat(self) -> list[Call]:
        """All but those behind which there is another commit under the same claim: a holder makes one at a time."""
        repeatable = [call for call in self._calls if all(_is_last(call, *pair) for pair in call.pairs)]
        entries = self._model.entries()
        return [call for call in repeatable if any(entry in entries for entry, _ in call.pairs)] or repeatable[-1:]

    # Misfortunes

    def misfortune(self, data: st.DataObject) -> None:
        """What is rarer than work."""
        what = data.draw(any_of(*MISFORTUNES))
        match what:
            case "cancel":
                self._run(self._cancel(data.draw(any_of(*REQUESTS, "nobody"))))
            case "unreadable":
                if self._helds:
                    held = self._draw_held(data)
                    self._run(self._dead_letter(self._draw_speaker(data, held), held))
            case "death" | "goodbye":
                self._run(self._replace(data.draw(slots), is_told=what == "goodbye"))
            case "no group":
                queue = data.draw(any_of(*self._model.queues))
                self._run(self._ground.destroy_group(self._keys, queue))
                self._model.lose_group(queue)
            case _:
                self._run(self._lose_everything())

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

    async def _lose_everything(self) -> None:
        await delete_keys(self._ground.raw, self._keys.namespace)
        self._model.lose_everything()
        await self._ground.next_millisecond()

    # What must hold after each step

    @invariant()
    def server_and_model_agree(self) -> None:
        self._agrees = False
        found = self._run(self._ground.look_at(self._keys))
        assert found == self._model.picture()
        for request_id, entries in found.results.items():
            check_results(request_id, entries)
        for pool, owned in found.credits.items():
            assert len(owned) <= MAX_REQUESTS, f"{len(owned)} credits of {pool}"
            assert sum(credit[1] for credit in owned.values()) <= MAX_BYTES, f"too many bytes of {pool}"
        self._agrees = True

    def teardown(self) -> None:
        try:
            if self._agrees:
                self._run(self._drain())
        finally:
            self._run(self._ground.clear())

    async def _drain(self) -> None:
        """Cancel all requests and serve all entries: nothing is left that stays for ever."""
        for request_id in list(self._model.requests):
            await self._cancel(request_id)
        for slot in ("a", "c"):  # one of each pool
            await self._serve_all(self._workers[slot])
        assert self._model.entries() == []
        assert await keys_that_stay(self._ground.raw, self._keys.namespace) == []

    async def _serve_all(self, worker: Worker) -> None:
        for entry in self._model.held():
            await self._end_lease(entry)
        for stage in STAGES:
            helds = await self._receive(worker, stage, MAX_AT_ONCE)
            done = [Transaction(held.delivery, *identity(held.delivery.payload), (), ack=True) for held in helds]
            outcomes = await worker.transport.commit(done)
            name = self._ground.commands.last_args()[1]
            pairs = [(held.entry, transaction) for held, transaction in zip(helds, done, strict=True)]
            assert outcomes == self._model.commit(worker.who, name, pairs) == [Outcome.GONE] * len(done)


def _is_last(call: Call, entry: Entry, transaction: Transaction) -> bool:
    """Whether no other commit came after it under its claim."""
    is_lost = entry.nonce != transaction.delivery.nonce
    return is_lost or call.name not in entry.made or entry.last_commit == call.name


def _shown(transaction: Transaction) -> str:
    whose = f"{transaction.request_id} {transaction.attempt}"
    ack = ", ack" if transaction.ack else ""
    return f"{transaction.delivery.payload!r} for {whose}{ack}: {transaction.effects}"


RULES = {
    "what was made under an older attempt is refused": ("if request[2] ~= t.attempt then", "if false then"),
    "what is sent again happens once": (
        "local function sent_before(t)\n",
        "local function sent_before(t)\n  do return nil end\n",
    ),
    "a claim is the newest one": ("if not same_claim(claim, nonce) then", "if false then"),
    "its own credit does not count against a request": ("if id == e.request_id then", "if false then"),
    "a credit counts while somebody works on its entry": ("if is_idle(t, e, credit) then", "if true then"),
    "a credit ends with its request": ("redis.call('HDEL', of[3], r.id)", ""),
}
"""Parts of the scripts, and what takes their place."""


@pytest.fixture
def ground(valkey_url: str) -> Iterator[Ground]:
    ground = Ground(valkey_url)
    yield ground
    ground.close()


BRIEF = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    stateful_step_count=50,
    report_multiple_bugs=False,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)
LONG = settings(BRIEF, derandomize=False, max_examples=2_000, stateful_step_count=80)
FIRST_FAILURE = settings(BRIEF, max_examples=200, phases=(Phase.generate,))
"""Nobody reads how a protocol without a rule fails: no time is spent on a shorter way there."""


def run_machine(ground: Ground, chosen: settings) -> None:
    class Machine(ProtocolMachine):
        def __init__(self) -> None:
            super().__init__(ground)

    run_state_machine_as_test(Machine, settings=chosen)


@pytest.mark.timeout(600)  # a failure is made as short as it can be, which takes minutes
def test_the_server_does_what_the_protocol_promises(ground: Ground) -> None:
    run_machine(ground, BRIEF)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_server_does_what_the_protocol_promises_for_long(ground: Ground) -> None:
    run_machine(ground, LONG)


def test_what_is_sent_again_says_of_each_transaction_what_became_of_it(ground: Ground) -> None:
    keys, who = ground.new_keys(), Who("a", POOLS[0])
    transport = ground.transport(who, keys, MAX_QUEUE)
    ground.run(transport.admit("r", "batch", b"work"))
    [delivery] = ground.run(transport.receive("tokenizer", 1, block_s=0))
    effects = (
        AddChunk(0, b"x"),
        Emit(b"follows nothing", 1, 1),
        AddChunk(0, b"y", substitute=True),
        TakeCredit(1, 0, 0),
        Publish("prefill", "batch", b"next"),
    )
    call = [Transaction(delivery, "r", 0, (effect,), ack=False) for effect in effects]
    outcomes = [Outcome.OK, Outcome.FENCED, Outcome.DUPLICATE, Outcome.FULL, Outcome.OK]
    assert ground.run(transport.commit(call)) == outcomes
    reply = ground.run(ground.commands.execute_command(*ground.commands.last_words))
    assert [Outcome(word.decode()) for word in reply] == outcomes
    assert ground.run(transport.queue_length("prefill", "batch")) == 1


@pytest.mark.parametrize(("old", "new"), RULES.values(), ids=RULES)
def test_a_protocol_without_this_rule_is_caught(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    whole = redis_calls.script_source

    def without_the_rule(name: str) -> str:
        return whole(name).replace(old, new)

    assert without_the_rule("commit") != whole("commit")
    monkeypatch.setattr(redis_calls, "script_source", without_the_rule)
    with pytest.raises(AssertionError):
        run_machine(ground, FIRST_FAILURE)
