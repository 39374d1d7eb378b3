"""The queues' state and rules inside one process: scripts/*.lua, said again in Python.

Owns entries, requests and registrations. Knows nothing about waiting: every method is synchronous, hence
atomic under asyncio. For tests and for a pipeline in a single process; nothing survives it.
"""

import secrets
from collections import deque
from dataclasses import dataclass, field

from pipeline.clock import Monotonic
from pipeline.keys import MAX_DEAD, MAX_FINISHED, RETURNED, Keys, Lane, lanes_of
from pipeline.memory_credits import MemoryCredits
from pipeline.transport import (
    END_STATES,
    AddChunk,
    DeadLetter,
    Delivery,
    Emit,
    Finish,
    FinishedRequest,
    GiveCredit,
    Outcome,
    Plan,
    Publish,
    Restart,
    ResultEntry,
    TakeCredit,
    Transaction,
    TransportOptions,
)


@dataclass(slots=True)
class Entry:
    """One entry of a work stream; new: no nonce, no tries. Handed back: no nonce, but delivered."""

    payload: bytes
    tries: int = 0
    delivered: bool = False
    nonce: str | None = None
    renewed_at: float = 0.0


@dataclass(slots=True)
class Request:
    """The state of one request; expires_at is set when it has ended."""

    state: str = "queued"
    attempt: int = 0
    num_tokens: int = 0
    results: list[ResultEntry] = field(default_factory=list[ResultEntry])
    chunks: dict[int, bytes] = field(default_factory=dict[int, bytes])
    plan: Plan | None = None
    joined: bool = False
    home: str | None = None
    """The pool in which it got its last credit, until it gives that back."""
    deadline: float | None = None
    """When it is given up, unless it has ended by then."""
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Dead:
    """One dead letter."""

    payload: bytes
    reason: str


class MemoryBroker:
    """What the transports of one process share, in the place of a server."""

    def __init__(self, keys: Keys, monotonic: Monotonic) -> None:
        self._keys = keys
        self.monotonic = monotonic
        self.streams: dict[str, dict[str, Entry]] = {}
        self._requests: dict[str, Request] = {}
        self.dead: dict[str, deque[Dead]] = {}
        self.finished: deque[FinishedRequest] = deque(maxlen=MAX_FINISHED)
        self.registrations: dict[tuple[str, str], tuple[bytes, float]] = {}
        self.credits = MemoryCredits(self._waits, self._void)
        self._num_entries = 0

    def request(self, request_id: str) -> Request | None:
        """Return the state of a request, unless it is unknown or has expired."""
        request = self._requests.get(request_id)
        if request and request.expires_at is not None and request.expires_at <= self.monotonic():
            del self._requests[request_id]
            return None
        return request

    def create_request(self, request_id: str, attempt: int = 0, timeout_s: float | None = None) -> None:
        """Start the state of a request."""
        deadline = None if timeout_s is None else self.monotonic() + timeout_s
        self._requests[request_id] = Request(attempt=attempt, deadline=deadline)

    def requests(self) -> dict[str, Request]:
        """Return all requests that have not expired."""
        found = ((request_id, self.request(request_id)) for request_id in list(self._requests))
        return {request_id: request for request_id, request in found if request}

    def length(self, stage: str, priority: Lane, pool_id: str | None) -> int:
        """Return how many entries wait or are being worked on."""
        return len(self.streams.get(self._keys.stream(stage, priority, pool_id), {}))

    def num_waiting(self, stage: str, lane: Lane, pool_id: str | None) -> int:
        """Return how many entries nobody has."""
        entries = self.streams.get(self._keys.stream(stage, lane, pool_id), {})
        return sum(entry.nonce is None for entry in entries.values())

    def append(self, stage: str, priority: Lane, pool_id: str | None, payload: bytes) -> tuple[str, str]:
        """Add an entry to a stage's stream; returns the stream's name and the entry's id."""
        self._num_entries += 1
        name = self._keys.stream(stage, priority, pool_id)
        self.streams.setdefault(name, {})[str(self._num_entries)] = Entry(payload)
        return name, str(self._num_entries)

    def take(self, stage: str, max_items: int, options: TransportOptions) -> list[Delivery]:
        """Claim entries: by priority, and within it handed back, then expired, then new."""
        nonce = secrets.token_hex(16)
        taken: list[Delivery] = []
        for lane in lanes_of(stage):
            name = self._keys.stream(stage, lane, options.pool_id)
            free = [
                (rank, entry_id, entry)
                for entry_id, entry in self.streams.get(name, {}).items()
                if (rank := self._rank(entry, options.lease_s)) is not None
            ]
            for _, entry_id, entry in sorted(free, key=lambda item: item[0])[: max_items - len(taken)]:
                entry.tries, entry.delivered, entry.nonce = entry.tries + 1, True, nonce
                entry.renewed_at = self.monotonic()
                taken.append(Delivery(stage, name, entry_id, nonce, entry.payload, entry.tries, options.consumer))
        return taken

    def _rank(self, entry: Entry, lease_s: float) -> int | None:
        if entry.nonce is None:
            return 0 if entry.delivered else 2
        return 1 if self.monotonic() - entry.renewed_at >= lease_s else None

    def held(self, delivery: Delivery) -> Entry | None:
        """Return the entry if this delivery's claim is the newest: the fence."""
        entry = self.streams.get(delivery.stream, {}).get(delivery.entry_id)
        return entry if entry and entry.nonce == delivery.nonce else None

    def bury(self, delivery: Delivery, reason: str) -> None:
        """Keep the payload of an entry among the dead letters."""
        letters = self.dead.setdefault(delivery.stage, deque(maxlen=MAX_DEAD))
        letters.append(Dead(delivery.payload, reason))

    def drop(self, delivery: Delivery) -> None:
        """End an entry."""
        del self.streams[delivery.stream][delivery.entry_id]

    def commit(self, transaction: Transaction, options: TransportOptions) -> Outcome:
        """Carry out one transaction as a whole or not at all."""
        delivery = transaction.delivery
        if not self.held(delivery):
            exists = delivery.entry_id in self.streams.get(delivery.stream, {})
            return Outcome.FENCED if exists else Outcome.ALREADY
        request = self.request(transaction.request_id)
        if request is None or request.state in END_STATES:
            self.drop(delivery)
            return Outcome.GONE
        if transaction.attempt != request.attempt:
            if transaction.attempt < request.attempt:
                self.drop(delivery)
            return Outcome.FENCED
        refusal = self._refusal(transaction, request.num_tokens, options)
        if refusal is not None:
            return refusal
        outcome = self._write(transaction, request, options)
        if transaction.ack:
            self.drop(delivery)
        return outcome

    def _refusal(self, transaction: Transaction, num_tokens: int, options: TransportOptions) -> Outcome | None:
        """Return why it cannot happen, by the first effect that cannot."""
        for effect in transaction.effects:
            if isinstance(effect, Emit):
                if effect.first_index != num_tokens:
                    return Outcome.FENCED
                num_tokens += effect.num_tokens
            elif isinstance(effect, TakeCredit) and not self.credits.has_room(transaction, effect, options):
                return Outcome.FULL
        return None

    def _write(self, transaction: Transaction, request: Request, options: TransportOptions) -> Outcome:
        outcome = Outcome.OK
        for effect in transaction.effects:
            match effect:
                case Publish(stage, priority, payload):
                    self.append(stage, priority, options.pool_id, payload)
                case Emit(delta, _, num_tokens):
                    request.num_tokens += num_tokens
                    request.results.append(ResultEntry(request.num_tokens, delta))
                    self.streams[transaction.delivery.stream][transaction.delivery.entry_id].tries = 1
                case Finish():
                    self.end_request(transaction.request_id, request, effect, options)
                case AddChunk() | Plan():
                    outcome = self._complete(transaction.request_id, request, effect, options) or outcome
                case TakeCredit() | GiveCredit():
                    self._change_credit(transaction, request, effect, options)
                case Restart():
                    self._restart(transaction, request, effect)
                case DeadLetter(reason):
                    self.bury(transaction.delivery, reason)
        return outcome

    def _change_credit(
        self, transaction: Transaction, request: Request, effect: TakeCredit | GiveCredit, options: TransportOptions
    ) -> None:
        if isinstance(effect, GiveCredit):
            self.credits.drop(transaction.request_id)
            request.home = None
            return
        self.credits.take(transaction, effect, options)
        request.home = options.pool_id
        if request.joined:  # decode gets it once under this attempt
            self.credits.settle(transaction.request_id)
        else:
            request.chunks, request.plan = {}, None  # it begins its prompt

    def _waits(self, entry: tuple[str, str], lease_s: float) -> bool:
        found = self.streams.get(entry[0], {}).get(entry[1])
        return found is None or self._rank(found, lease_s) is not None

    def _void(self, entry: tuple[str, str]) -> None:
        found = self.streams.get(entry[0], {}).get(entry[1])
        if found is not None and found.nonce is not None:
            found.nonce = ""

    def _restart(self, transaction: Transaction, request: Request, restart: Restart) -> None:
        request.attempt, request.plan, request.chunks, request.joined = restart.attempt, None, {}, False
        entry = self.append("prefill", RETURNED, None, restart.payload)
        self.credits.move(transaction.request_id, restart.attempt, entry)

    def end_request(self, request_id: str, request: Request, end: Finish, options: TransportOptions) -> None:
        """Write the terminal entry; from now on the request is only to be read."""
        request.results.append(ResultEntry(None, end.terminal))
        request.state, request.plan, request.chunks = end.state, None, {}
        self.credits.drop(request_id)
        request.expires_at = self.monotonic() + options.result_ttl_s
        self.finished.append(FinishedRequest(request_id, end.terminal))

    def _complete(
        self, request_id: str, request: Request, part: AddChunk | Plan, options: TransportOptions
    ) -> Outcome | None:
        """Note one part of what decode waits for, and hand it over with the last one."""
        outcome = None
        if isinstance(part, Plan):
            if request.plan is None:
                request.plan = part
                self.credits.settle(request_id)
        elif request.home not in (None, options.pool_id):
            outcome = Outcome.DUPLICATE
        elif not part.substitute:
            request.chunks[part.index] = part.ref
        elif request.chunks.setdefault(part.index, part.ref) != part.ref:
            outcome = Outcome.DUPLICATE
        self._join(request, options)
        return outcome

    def _join(self, request: Request, options: TransportOptions) -> None:
        plan = request.plan
        if plan is None or request.joined or not request.chunks.keys() >= set(range(plan.num_chunks)):
            return
        request.joined = True
        self.append("decode", plan.priority, options.pool_id, plan.payload)
