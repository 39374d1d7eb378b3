"""What the protocol of queues and requests promises, as a model: plain Python that knows no server and no key.

Written from the docstrings of pipeline/transport.py and the heads of pipeline/scripts/*.lua, and from nothing else; the
twin in pipeline/memory_broker.py follows the scripts line by line, and would repeat their mistakes. There is no time in
here: a lease ends, and results expire, when the test says so.

    an entry:   new ---- receive ----> held by (consumer, nonce) ---- commit with ack, dead letter ----> gone
                 ^                      |   ^      |
                 |   the group is lost  |   |      +--- hand back ---> handed back ---- receive ----> held
                 +----------------------+   +--- its lease has ended: receive, for anybody
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.keys import POOLED_STAGES, STAGES, Lane, lanes_of
from pipeline.transport import (
    AddChunk,
    DeadLetter,
    Effect,
    Emit,
    Finish,
    GiveCredit,
    Outcome,
    Plan,
    Publish,
    Restart,
    TakeCredit,
    Transaction,
)

Queue = tuple[str, Lane, str | None]
"""Stage, lane, and the pool of stages that have one."""


@dataclass(eq=False, slots=True)
class Entry:
    """One entry of a queue."""

    queue: Queue
    payload: bytes
    state: Literal["new", "held", "handed back"] = "new"
    holder: str | None = None
    nonce: str | None = None
    tries: int = 0
    lease_ended: bool = False
    made: dict[str, dict[int, Outcome]] = field(default_factory=dict[str, dict[int, Outcome]])
    """What commits did under this claim: by the name of the call, and the number of the transaction in it."""
    last_commit: str | None = None
    """The last of these names."""


GONE = b"(gone)"
"""In a picture, what stands for the payload of an entry that is not there any more."""


@dataclass(slots=True)
class Credit:
    """What a request may fill of a pool; where it is tied to an entry, it counts only while somebody works on that."""

    pool: str
    attempt: int
    num_bytes: int
    entry: Entry | None


@dataclass(slots=True)
class Request:
    """One request, from its admission until its results expire."""

    ticket: str
    attempt: int
    state: str = "queued"
    num_tokens: int = 0
    results: list[tuple[int | None, bytes]] = field(default_factory=list[tuple[int | None, bytes]])
    chunks: dict[int, bytes] = field(default_factory=dict[int, bytes])
    plan: Plan | None = None
    is_joined: bool = False
    credit: Credit | None = None
    home: str | None = None
    """The pool in which it got its last credit, until it gives that back."""

    @property
    def has_ended(self) -> bool:
        """Whether it has its terminal entry."""
        return self.state != "queued"


@dataclass(frozen=True, slots=True)
class Who:
    """A consumer, and the pool in its reach."""

    name: str
    pool: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that can be seen, as plain values."""

    queues: dict[Queue, list[tuple[object, ...]]]
    """Entries in their order: payload, state, holder, nonce, tries, whether its lease has ended."""
    requests: dict[str, tuple[str, int, int]]
    """State, attempt, number of tokens."""
    results: dict[str, list[tuple[int | None, bytes]]]
    chunks: dict[tuple[str, int], dict[int, bytes]]
    credits: dict[str, dict[str, tuple[int, int, bytes | None]]]
    """Of each pool: attempt, bytes, and the payload of the entry that it is tied to, by request."""
    dead: dict[str, list[tuple[bytes, str]]]
    finished: list[tuple[str, bytes]]


class ProtocolModel:
    """Answers each call as the protocol must, and remembers what it must remember."""

    def __init__(self, pools: Sequence[str], max_queue: int) -> None:
        self._max_queue = max_queue
        self._pools = tuple(pools)
        self.requests: dict[str, Request] = {}
        self.queues: dict[Queue, list[Entry]] = {
            (stage, lane, pool): []
            for stage in STAGES
            for lane in lanes_of(stage)
            for pool in (self._pools if stage in POOLED_STAGES else (None,))
        }
        self._dead: dict[str, list[tuple[bytes, str]]] = {}
        self._finished: list[tuple[str, bytes]] = []

    def picture(self) -> Picture:
        """Everything that can be seen."""
        requests = self.requests.items()
        owned = {
            pool: {name: self._seen_credit(credit) for name, credit in self._credits_of(pool).items()}
            for pool in self._pools
        }
        return Picture(
            queues={queue: [_seen(entry) for entry in entries] for queue, entries in self.queues.items() if entries},
            requests={name: (request.state, request.attempt, request.num_tokens) for name, request in requests},
            results={name: list(request.results) for name, request in requests if request.results},
            chunks={(name, request.attempt): dict(request.chunks) for name, request in requests if request.chunks},
            credits={pool: credits_of for pool, credits_of in owned.items() if credits_of},
            dead={stage: list(letters) for stage, letters in self._dead.items()},
            finished=list(self._finished),
        )

    def entries(self) -> list[Entry]:
        """All entries, in a fixed order."""
        return [entry for entries in self.queues.values() for entry in entries]

    def held(self) -> list[Entry]:
        """Those that somebody holds."""
        return [entry for entry in self.entries() if entry.state == "held"]

    def free(self) -> list[Entry]:
        """Those that anybody may have who asks."""
        return [entry for entry in self.entries() if _rank(entry) is not None]

    def ended(self) -> list[str]:
        """Requests whose results can expire."""
        return [request_id for request_id, request in self.requests.items() if request.has_ended]

    def _credits_of(self, pool: str) -> dict[str, Credit]:
        owned = {name: request.credit for name, request in self.requests.items() if request.credit}
        return {name: credit for name, credit in owned.items() if credit.pool == pool}

    def _seen_credit(self, credit: Credit) -> tuple[int, int, bytes | None]:
        if credit.entry is None:
            return credit.attempt, credit.num_bytes, None
        return credit.attempt, credit.num_bytes, credit.entry.payload if self._is_there(credit.entry) else GONE

    # Requests

    def admit(self, request_id: str, lane: Lane, payload: bytes, attempt: int, ticket: str) -> str:
        """Its state and its entry appear together, once; sent again with the same ticket, it is accepted again."""
        request = self.requests.get(request_id)
        if request is not None:
            return "accepted" if request.ticket == ticket else "exists"
        in_front = len(self.queues["tokenizer", lane, None]) + len(self.queues["prefill", lane, None])
        if in_front >= self._max_queue:
            return "busy"
        self.requests[request_id] = Request(ticket, attempt)
        self._append(("tokenizer", lane, None), payload)
        return "accepted"

    def cancel(self, request_id: str, terminal: bytes) -> str:
        """It has a terminal entry afterwards, written here or before."""
        request = self.requests.get(request_id)
        if request is None:
            return "unknown"
        if request.has_ended:
            return "ended"
        self._end(request_id, request, terminal, "cancelled")
        return "cancelled"

    def forget_results(self, request_id: str) -> None:
        """The time of an ended request's results is over: its id is free again."""
        assert self.requests[request_id].has_ended
        del self.requests[request_id]

    def _end(self, request_id: str, request: Request, terminal: bytes, state: str) -> None:
        request.state = state
        request.results.append((None, terminal))
        request.chunks, request.plan, request.credit, request.home = {}, None, None, None
        self._finished.append((request_id, terminal))

    # Entries

    def receive(self, who: Who, stage: str, max_items: int, nonce: str, *, sent_again: bool) -> list[Entry]:
        """By priority; in each lane handed back ones first, then those whose lease has ended, then new ones.

        Sent again after a lost reply, it first gives what the lost reply held, or hands back what is too much.
        """
        lanes = [self.queues[stage, lane, who.pool if stage in POOLED_STAGES else None] for lane in lanes_of(stage)]
        taken: list[Entry] = []
        if sent_again:
            for entry in [entry for entries in lanes for entry in entries if self.holds(who, entry, nonce)]:
                if len(taken) < max_items:
                    entry.lease_ended = False
                    taken.append(entry)
                else:
                    _hand_back(entry)
        for entries in lanes:
            for wanted in range(3):
                for entry in [entry for entry in entries if _rank(entry) == wanted and entry not in taken]:
                    if len(taken) < max_items:
                        _give(entry, who, nonce)
                        taken.append(entry)
        return taken

    def holds(self, who: Who, entry: Entry, nonce: str) -> bool:
        """The fence: whether this is the newest claim of an entry that is there, and it is this consumer's."""
        is_newest = entry.state == "held" and (entry.holder, entry.nonce) == (who.name, nonce)
        return is_newest and self._is_there(entry)

    def renew(self, who: Who, entry: Entry, nonce: str) -> bool:
        """Only the holder's nonce extends a lease."""
        if not self.holds(who, entry, nonce):
            return False
        entry.lease_ended = False
        return True

    def hand_back(self, who: Who, entry: Entry, nonce: str) -> None:
        """What its caller holds is free at once, and the delivery was no try; lost ones are left alone."""
        if self.holds(who, entry, nonce):
            _hand_back(entry)

    def dead_letter(self, who: Who, entry: Entry, nonce: str, reason: str) -> None:
        """Only the holder moves an entry to the dead letters."""
        if self.holds(who, entry, nonce):
            self._bury(entry, reason)
            self._drop(entry)

    def lose_group(self, queue: Queue) -> None:
        """XGROUP DESTROY: nobody holds anything, everything is delivered again; tries are remembered."""
        for entry in self.queues[queue]:
            _forget_claim(entry, "new")

    def lose_everything(self) -> None:
        """FLUSHALL."""
        self.requests.clear()
        self._dead.clear()
        self._finished.clear()
        for entries in self.queues.values():
            entries.clear()

    def _is_there(self, entry: Entry) -> bool:
        return entry in self.queues[entry.queue]

    def _append(self, queue: Queue, payload: bytes) -> Entry:
        self.queues[queue].append(Entry(queue, payload))
        return self.queues[queue][-1]

    def _drop(self, entry: Entry) -> None:
        self.queues[entry.queue].remove(entry)

    def _bury(self, entry: Entry, reason: str) -> None:
        self._dead.setdefault(entry.queue[0], []).append((entry.payload, reason))

    # Transactions

    def commit(self, who: Who, call: str, transactions: Iterable[tuple[Entry, Transaction]]) -> list[Outcome]:
        """In order; each happens as a whole or not at all, whatever becomes of the others.

        What was made before by this very call is not made again, and its outcome is what it was.
        """
        return [
            self._commit_one(who, call, number, entry, transaction)
            for number, (entry, transaction) in enumerate(transactions)
        ]

    def _commit_one(self, who: Who, call: str, number: int, entry: Entry, transaction: Transaction) -> Outcome:
        if not self.holds(who, entry, transaction.delivery.nonce):
            return Outcome.FENCED if self._is_there(entry) else Outcome.ALREADY
        if (outcome := entry.made.get(call, {}).get(number)) is not None:
            return outcome
        request = self.requests.get(transaction.request_id)
        if request is None or request.has_ended:
            self._drop(entry)
            return Outcome.GONE
        if transaction.attempt != request.attempt:
            if transaction.attempt < request.attempt:  # attempts only grow: nobody can ever use it
                self._drop(entry)
            return Outcome.FENCED
        refusal = self._refusal(who, transaction, request)
        if refusal is not None:
            return refusal
        outcomes = [self._make(who, entry, transaction.request_id, request, effect) for effect in transaction.effects]
        outcome = Outcome.DUPLICATE if Outcome.DUPLICATE in outcomes else Outcome.OK
        if transaction.ack:
            self._drop(entry)
        else:
            entry.made.setdefault(call, {})[number] = outcome
            entry.last_commit = call
        return outcome

    def _refusal(self, who: Who, transaction: Transaction, request: Request) -> Outcome | None:
        num_tokens = request.num_tokens
        for effect in transaction.effects:
            if isinstance(effect, Emit):
                if effect.first_index != num_tokens:
                    return Outcome.FENCED
                num_tokens += effect.num_tokens
            elif isinstance(effect, TakeCredit) and self._in_the_way(who.pool, transaction.request_id, effect) is None:
                return Outcome.FULL
        return None

    def _in_the_way(self, pool: str, request_id: str, wanted: TakeCredit) -> list[str] | None:
        """Requests whose credits have to go for this one, or None if there is no room even so."""
        others = self._credits_of(pool)
        own = others.pop(request_id, None)
        if (own is not None and own.num_bytes >= wanted.num_bytes) or _fits(wanted, others.values()):
            return []
        waiting = [name for name, credit in others.items() if credit.entry is not None and self._waits(credit.entry)]
        staying = [credit for name, credit in others.items() if name not in waiting]
        return waiting if _fits(wanted, staying) else None

    def _waits(self, entry: Entry) -> bool:
        """Whether nobody works on it."""
        return _rank(entry) is not None or not self._is_there(entry)

    def _make(self, who: Who, entry: Entry, request_id: str, request: Request, effect: Effect) -> Outcome:
        match effect:
            case Publish(stage, priority, payload):
                self._append((stage, priority, who.pool if stage in POOLED_STAGES else None), payload)
            case Emit(delta, _, num_tokens):
                request.num_tokens += num_tokens
                request.results.append((request.num_tokens, delta))
                entry.tries = 1  # progress: what crashed a process before did not stop this one
            case Finish(terminal, state):
                self._end(request_id, request, terminal, state)
            case TakeCredit() | GiveCredit():
                self._change_credit(who, entry, request_id, request, effect)
            case DeadLetter(reason):
                self._bury(entry, reason)
            case Restart(attempt, payload):
                self._restart(request, attempt, payload)
            case AddChunk() | Plan():
                return self._complete(who, request, effect)
        return Outcome.OK

    def _change_credit(
        self, who: Who, entry: Entry, request_id: str, request: Request, effect: TakeCredit | GiveCredit
    ) -> None:
        """A request has one credit at most, whichever pool it is in; with it, it begins its prompt.

        What decode has got already has begun before.
        """
        if isinstance(effect, GiveCredit):
            request.credit, request.home = None, None
            return
        for name in self._in_the_way(who.pool, request_id, effect) or ():
            self._revoke(self.requests[name])
        if not request.is_joined:
            request.chunks, request.plan = {}, None
        tie = entry if request.plan is None else None
        request.credit, request.home = Credit(who.pool, request.attempt, effect.num_bytes, tie), who.pool

    def _revoke(self, request: Request) -> None:
        """Whoever was away for a lease has lost its claim with the credit."""
        entry = request.credit.entry if request.credit else None
        if entry is not None and entry.state == "held":
            entry.nonce, entry.made, entry.last_commit = None, {}, None
        request.credit = None

    def _restart(self, request: Request, attempt: int, payload: bytes) -> None:
        request.attempt, request.chunks, request.plan, request.is_joined = attempt, {}, None, False
        entry = self._append(("prefill", "returned", None), payload)
        if request.credit is not None:
            request.credit.attempt, request.credit.entry = attempt, entry

    def _complete(self, who: Who, request: Request, part: AddChunk | Plan) -> Outcome:
        """The first plan stays, but the last chunk; one that only stands in for another takes nobody's place.

        From the plan on, a credit counts whatever happens to entries.
        """
        outcome = Outcome.OK
        if isinstance(part, Plan):
            if request.plan is None and request.credit is not None:
                request.credit.entry = None
            request.plan = request.plan or part
        elif request.home not in (None, who.pool):
            outcome = Outcome.DUPLICATE
        elif not part.substitute:
            request.chunks[part.index] = part.ref
        elif request.chunks.setdefault(part.index, part.ref) != part.ref:
            outcome = Outcome.DUPLICATE
        self._join(who, request)
        return outcome

    def _join(self, who: Who, request: Request) -> None:
        """Decode gets one entry per request and attempt, when the plan and its chunks are complete."""
        plan = request.plan
        if plan is None or request.is_joined or any(index not in request.chunks for index in range(plan.num_chunks)):
            return
        request.is_joined = True
        self._append(("decode", plan.priority, who.pool), plan.payload)


def _fits(wanted: TakeCredit, others: Collection[Credit]) -> bool:
    num_bytes = sum(credit.num_bytes for credit in others) + wanted.num_bytes
    return num_bytes <= wanted.max_bytes and len(others) + 1 <= wanted.max_requests


def _rank(entry: Entry) -> int | None:
    """Where an entry stands among those that anybody may have; None for what somebody holds."""
    if entry.state == "held":
        return 1 if entry.lease_ended else None
    return 0 if entry.state == "handed back" else 2


def _give(entry: Entry, who: Who, nonce: str) -> None:
    _forget_claim(entry, "held")
    entry.holder, entry.nonce = who.name, nonce
    entry.tries += 1


def _hand_back(entry: Entry) -> None:
    _forget_claim(entry, "handed back")
    entry.tries -= 1


def _forget_claim(entry: Entry, state: Literal["new", "held", "handed back"]) -> None:
    entry.state, entry.holder, entry.nonce, entry.lease_ended = state, None, None, False
    entry.made, entry.last_commit = {}, None


def _seen(entry: Entry) -> tuple[object, ...]:
    return entry.payload, entry.state, entry.holder, entry.nonce, entry.tries, entry.lease_ended
