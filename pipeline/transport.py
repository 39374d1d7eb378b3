"""What moves work between stages: the seam, its values, and what every implementation promises.

Owns the types. Knows nothing about Redis; redis_streams.py and memory.py implement it, and one contract
suite (tests/pipeline/test_transport_contract.py) holds both to this page.

A delivery is a lease with a fence. Whoever receives an entry gets a random nonce; every later call about
the entry is refused once somebody else has been given a newer one. So work may be done twice, effects
happen once:

               receive                    commit, ack
    waiting ------------> held by nonce N ------------> gone
       ^                    |    |    |
       |     hand_back      |    |    +-- dead_letter --> dead stream
       +--------------------+    +------- no renewal for a lease: receive gives it to another, nonce N+1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, Protocol

from pipeline.keys import LEASE_S, MAX_QUEUE, RESULT_TTL_S, Lane, Priority

EndState = Literal["finished", "failed", "cancelled"]
END_STATES: tuple[EndState, ...] = ("finished", "failed", "cancelled")
AFTER_ALL: Final = 2**64 - 1  # a position in results that nothing but the terminal entry is behind


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry, leased to the one who received it; tries counts deliveries, this one included."""

    stage: str
    stream: str
    entry_id: str
    nonce: str
    payload: bytes
    tries: int
    consumer: str = ""
    """The name of the one who received it."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Append an entry to a stage's stream."""

    stage: str
    priority: Priority
    payload: bytes


@dataclass(frozen=True, slots=True)
class Emit:
    """Append a delta to the results; refused unless exactly first_index tokens are there already."""

    delta: bytes
    first_index: int
    num_tokens: int

    def __post_init__(self) -> None:
        if self.first_index < 0 or self.num_tokens < 1:
            raise ValueError(f"cannot emit {self.num_tokens} tokens from index {self.first_index}")


@dataclass(frozen=True, slots=True)
class Finish:
    """End the request: write the terminal entry, let state and results expire, drop its chunk references."""

    terminal: bytes
    state: EndState


@dataclass(frozen=True, slots=True)
class AddChunk:
    """Store one sealed chunk of this attempt, in the place of an earlier one. Then join.

    A substitute, which names no blob that can be read, takes nobody's place. In another pool than that of the
    request's credit nothing is stored: it began again there.
    """

    index: int
    ref: bytes
    substitute: bool = False

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ValueError(f"chunk index {self.index} is negative")


@dataclass(frozen=True, slots=True)
class Plan:
    """Say how many chunks this attempt has, and what decode gets when all are there. Then join.

    The join appends the payload to decode's stream, once per request and attempt, in whichever call makes the
    plan and chunks 0 .. num_chunks - 1 complete.
    """

    num_chunks: int
    priority: Priority
    payload: bytes

    def __post_init__(self) -> None:
        if self.num_chunks < 1:
            raise ValueError(f"a plan of {self.num_chunks} chunks never completes")


@dataclass(frozen=True, slots=True)
class TakeCredit:
    """Reserve num_bytes of the pool for the request, and begin its prompt, unless there is no room: then FULL.

    A credit belongs to the request's state: it ends with the request, or when it is given back. One that the request
    has already is enough if it is large enough. Until the Plan, a credit counts only while somebody works on its entry;
    one whose entry waits (its holder died, or handed it back) makes way for others, and a holder that was only away has
    lost its claim with it. What an earlier holder stored of the attempt is forgotten.
    """

    num_bytes: int
    max_bytes: int
    max_requests: int


@dataclass(frozen=True, slots=True)
class GiveCredit:
    """Give the request's credit back before the request ends."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Send the request back to prefill under a larger attempt, ahead of what waits there; its credit goes along.

    What was done under the old attempt is refused from now on, and its chunk references are gone; emitted tokens stay.
    """

    attempt: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Keep the delivery's payload with a reason in the stage's dead stream."""

    reason: str


Effect = Publish | Emit | Finish | AddChunk | Plan | TakeCredit | GiveCredit | Restart | DeadLetter


@dataclass(frozen=True, slots=True)
class Transaction:
    """Effects that happen together or not at all, under the fence of one delivery; ack ends the delivery.

    Only a DeadLetter may follow a Finish, and there is at most one Finish: what comes after an end is lost.
    """

    delivery: Delivery
    request_id: str
    attempt: int
    effects: tuple[Effect, ...]
    ack: bool

    def __post_init__(self) -> None:
        restarts = [effect for effect in self.effects if isinstance(effect, Restart)]
        if restarts and (len(self.effects) > 1 or not self.ack or restarts[0].attempt <= self.attempt):
            raise ValueError("a restart stands alone, ends its delivery, and has a larger attempt")
        ends = [i for i, effect in enumerate(self.effects) if isinstance(effect, Finish)]
        if not ends:
            return
        if any(isinstance(effect, Plan | AddChunk) for effect in self.effects):
            raise ValueError("a transaction that finishes a request cannot hand it on to decode")
        if any(not isinstance(effect, DeadLetter) for effect in self.effects[ends[0] + 1 :]):
            raise ValueError("only a dead letter may follow a finish")


class Outcome(StrEnum):
    """What became of one transaction."""

    OK = "ok"
    """It happened."""
    DUPLICATE = "duplicate"
    """It happened, but an AddChunk was not stored, because of what is there, or of the pool: yours is not used."""
    ALREADY = "already"
    """The entry is gone: it was acknowledged before, by an earlier sending of this transaction or by another
    holder. Nothing changed."""
    FENCED = "fenced"
    """Not yours to do: another holder, another attempt, or an Emit that does not follow what is there.
    Nothing changed; drop the work quietly."""
    FULL = "full"
    """A TakeCredit found no room. Nothing changed; ask again later."""
    GONE = "gone"
    """The request has ended or its state is missing. The entry was acknowledged, nothing else changed."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is durable as far as the server is, and will end in a terminal entry."""


@dataclass(frozen=True, slots=True)
class Exists:
    """The id is taken, by a request that runs or whose results have not expired. Nothing changed."""


@dataclass(frozen=True, slots=True)
class Busy:
    """The queue or the server's memory is full. Nothing changed."""

    retry_after_s: float


Admission = Accepted | Exists | Busy


@dataclass(frozen=True, slots=True)
class ResultEntry:
    """One entry of a result stream; offset is the number of tokens so far, None for the terminal entry."""

    offset: int | None
    data: bytes


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One entry of the log of finished requests."""

    request_id: str
    terminal: bytes


@dataclass(frozen=True, slots=True)
class Process:
    """A registered process."""

    stage: str
    consumer: str
    info: bytes


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """How one process takes part; all processes of a stack must agree on everything but consumer."""

    consumer: str
    pool_id: str | None = None
    """The pool whose blobs this process reaches; needed by prefill and whatever comes after it."""
    lease_s: float = LEASE_S
    max_queue: int = MAX_QUEUE
    result_ttl_s: int = RESULT_TTL_S
    strict: bool = False
    """Whether an admission is acknowledged only when it is on the server's disk."""


class Transport(Protocol):
    """One process's connection to the queues. Every call may raise a ServerError; all may be repeated."""

    @property
    def consumer(self) -> str:
        """The name under which this process holds entries."""
        ...

    async def admit(
        self, request_id: str, priority: Priority, payload: bytes, attempt: int = 0, timeout_s: float | None = None
    ) -> Admission:
        """Accept a request: create its state and give it to the tokenizer, in one step.

        The attempt is that of the payload. Where an id may come again, it must have grown: what was begun under a
        smaller one is refused. timeout_s from now the request is given up, whatever its state is then.
        """
        ...

    async def cancel(self, request_id: str, terminal: bytes) -> bool:
        """End a request now, whoever works on it; False where it had ended already.

        Whatever a stage still does for it is refused as GONE at its next commit, with all it holds.

        Raises:
            UnknownRequest: there is no such request.
        """
        ...

    async def finished(self, num: int) -> list[FinishedRequest]:
        """Return the last requests that ended, oldest first; the log keeps about MAX_FINISHED."""
        ...

    async def receive(self, stage: str, max_items: int, block_s: float) -> list[Delivery]:
        """Take up to max_items entries: interactive before batch, given-up ones before new ones.

        Waits up to block_s for the first one. One call at a time per stage.
        """
        ...

    async def renew(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Extend the leases; False means lost, which no later renewal can undo."""
        ...

    async def commit(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        """Carry out transactions in order, in one round trip; a refused one does not touch the others.

        One call at a time for a delivery: what makes a repeated call harmless is the name of the last one.
        """
        ...

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give entries up unprocessed: claimable at once, not counted as a try. Lost ones are left alone."""
        ...

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Move an entry that belongs to no known request to the dead stream, unless it is lost.

        Where the request is known, commit DeadLetter together with Finish instead.
        """
        ...

    async def chunks(self, request_id: str, attempt: int) -> dict[int, bytes]:
        """Return the sealed chunks of an attempt by index."""
        ...

    async def read_results(self, request_id: str, after: int, block_s: float) -> list[ResultEntry]:
        """Return entries after the first `after` tokens, waiting up to block_s for one; a page at a time.

        Any number of calls may wait. One that waits for the end, behind AFTER_ALL, may see it a quarter of a second
        late.

        Raises:
            UnknownRequest: nothing is there and nothing will come.
        """
        ...

    async def queue_length(self, stage: str, priority: Lane) -> int:
        """Return how many entries wait or are being worked on."""
        ...

    async def num_waiting(self, stage: str, lane: Lane) -> int:
        """Return how many entries nobody works on, apart from those of dead processes."""
        ...

    async def register(self, stage: str, info: bytes, ttl_s: float) -> None:
        """Announce this process for ttl_s seconds; info replaces what it announced before."""
        ...

    async def processes(self) -> list[Process]:
        """Return the processes whose registration has not run out, by stage and consumer."""
        ...

    async def close(self) -> None:
        """Release connections and this consumer's name; entries still held stay leased until they expire."""
        ...
