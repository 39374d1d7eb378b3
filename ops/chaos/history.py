"""What clients saw: each request with when it was submitted and accepted, every delta with its offset, and its end.

Owns the record and the judgement of one request: it ended exactly once, its tokens follow one another without gap or
overlap, and they are those of the run without faults. Reads through the product's own client, as its users do, and
afterwards once more what is stored. Knows nothing about what went wrong meanwhile.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.outputs import Output, differences
from pipeline.batch.results import Completion, outcome_of
from pipeline.client.asks import NewRequest, new_request_id
from pipeline.client.client import Client
from pipeline.errors import SluiceError
from pipeline.keys import Keys, Priority
from pipeline.messages import Delta, Failure, Terminal
from pipeline.wire import unpack

POLL_S = 0.005
DOOR_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Seen:
    """One request as its client saw it; times are this process's monotonic seconds."""

    ask: NewRequest
    request_id: str
    submitted_at: float
    accepted_at: float | None = None
    deltas: list[Delta] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)
    """One for each delta."""
    terminals: list[Terminal] = field(default_factory=list)
    ended_at: float | None = None
    error: SluiceError | None = None
    """Why the client gave up: what it was told instead of a terminal."""

    @property
    def num_tokens(self) -> int:
        """Output tokens that have arrived."""
        return sum(len(delta.token_ids) for delta in self.deltas)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come to this client."""
        return self.ended_at is not None

    @property
    def failure(self) -> Failure | None:
        """Why it failed, where its terminal says so."""
        return self.terminals[0].failure if self.terminals else None


class History:
    """The requests of one client and everything that it was told about them."""

    def __init__(self, client: Client) -> None:
        self.requests: list[Seen] = []
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def send(
        self,
        asks: Iterable[NewRequest],
        priority: Priority = "interactive",
        *,
        door_timeout_s: float = DOOR_TIMEOUT_S,
        token_s: float = 0.0,
    ) -> list[Seen]:
        """Submit requests, all at once, and follow each to its end; returns their records, which fill up.

        Args:
            asks: what is wanted.
            priority: of all.
            door_timeout_s: how long to wait where the door is closed.
            token_s: how long the reader takes for each token, before it reads on.
        """
        sent = [Seen(ask, ask.request_id or new_request_id(), time.monotonic()) for ask in asks]
        for seen in sent:
            self._own(self._submit_and_follow(seen, priority, door_timeout_s, token_s))
        self.requests += sent
        return sent

    def resume(self, requests: Iterable[Seen]) -> None:
        """Follow requests that another client submitted, from their beginning."""
        for seen in requests:
            self.requests.append(seen)
            self._own(self._follow(seen))

    async def accepted(self, requests: Sequence[Seen], *, timeout_s: float) -> None:
        """Return when requests are accepted, or refused.

        Raises:
            TimeoutError: some still wait at the door.
        """

        def waiting() -> int:
            return sum(seen.accepted_at is None and not seen.is_over for seen in requests)

        await holds(lambda: not waiting(), timeout_s, lambda: f"{waiting()} requests wait at the door")

    async def ended(self, requests: Sequence[Seen] | None = None, *, timeout_s: float) -> None:
        """Return when the requests, by default all of them, are over.

        Raises:
            TimeoutError: some are not; says which.
        """
        waited_for = self.requests if requests is None else requests
        await holds(lambda: all(seen.is_over for seen in waited_for), timeout_s, lambda: _still_open(waited_for))

    async def tokens(self, number: int, requests: Sequence[Seen] | None = None, *, timeout_s: float) -> None:
        """Return when so many tokens of the requests have arrived.

        Raises:
            TimeoutError: they have not.
        """
        waited_for = self.requests if requests is None else requests

        def arrived() -> int:
            return sum(seen.num_tokens for seen in waited_for)

        await holds(lambda: arrived() >= number, timeout_s, lambda: f"{arrived()} of {number} tokens arrived")

    def longest_gap_s(self, after: float, requests: Sequence[Seen] | None = None) -> float:
        """Return the longest time in which no request moved, from a moment on to the last end.

        Where all of them were submitted later, from then on.
        """
        judged = self.requests if requests is None else requests
        began_at = max(after, min((seen.submitted_at for seen in judged), default=after))
        moments = sorted(moment for seen in judged for moment in _moments(seen) if moment >= began_at)
        gaps = (later - earlier for earlier, later in zip([began_at, *moments], moments, strict=False))
        return max(gaps, default=0.0)

    async def close(self) -> None:
        """Follow nothing any more."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit_and_follow(self, seen: Seen, priority: Priority, door_timeout_s: float, token_s: float) -> None:
        try:
            await self._client.submit(seen.ask, priority, request_id=seen.request_id, timeout_s=door_timeout_s)
        except SluiceError as error:
            seen.error, seen.ended_at = error, time.monotonic()
            return
        seen.accepted_at = time.monotonic()
        await self._follow(seen, token_s)

    async def _follow(self, seen: Seen, token_s: float = 0.0) -> None:
        try:
            async for entry in self._client.stream(seen.request_id):
                if isinstance(entry, Terminal):
                    seen.terminals.append(entry)
                    continue
                seen.deltas.append(entry)
                seen.arrived_at.append(time.monotonic())
                await asyncio.sleep(token_s * len(entry.token_ids))
        except SluiceError as error:
            seen.error = error
        finally:
            seen.ended_at = time.monotonic()


def problems_of(seen: Seen) -> list[str]:
    """Return what is wrong with what a client saw of a request, whatever its tokens are."""
    if seen.accepted_at is None:
        return [f"{seen.request_id} was not accepted: {seen.error}"]
    if seen.error is not None:
        return [f"{seen.request_id} was given up: {seen.error}"]
    found: list[str] = []
    if len(seen.terminals) != 1:
        found.append(f"{seen.request_id} has {len(seen.terminals)} terminal entries and not 1")
    position = 0
    for delta in seen.deltas:
        if delta.first_index != position:
            found.append(f"{seen.request_id}: a delta begins at token {delta.first_index}, and {position} was next")
        position = delta.first_index + len(delta.token_ids)
    return found


def output_of(seen: Seen) -> Output | Failure | None:
    """Return what a request came to; None where it did not end, or its deltas are no output."""
    if len(seen.terminals) != 1:
        return None
    try:
        outcome = outcome_of(seen.deltas, seen.terminals[0])
    except SluiceError:  # problems_of has the details
        return None
    return Output.of(outcome) if isinstance(outcome, Completion) else outcome


def compared(requests: Sequence[Seen], expected: Sequence[Output]) -> list[str]:
    """Return what differs between what clients saw and what the run without faults gave; request by request."""
    found: list[str] = []
    for seen, output in zip(requests, expected, strict=True):
        found += problems_of(seen)
        actual = output_of(seen)
        if isinstance(actual, Failure):
            found.append(f"{seen.request_id} failed in {actual.stage}: {actual.code}: {actual.message}")
        elif actual is not None:
            found += differences({seen.request_id: output}, {seen.request_id: actual})
    return found


async def stored_problems(redis: Any, keys: Keys, requests: Iterable[Seen]) -> list[str]:
    """Return where what is stored about requests contradicts itself, or what their clients saw.

    A result stream has its deltas under the number of tokens so far, without gap, and one terminal entry behind them;
    the log of ends names each request once. Call it before the results expire.
    """
    found: list[str] = []
    logged = [fields[b"id"].decode() for _, fields in await redis.xrange(keys.finished())]
    for seen in requests:
        if seen.terminals:
            found += _stored(seen, await redis.xrange(keys.results(seen.request_id)))
            if (times := logged.count(seen.request_id)) != 1:
                found.append(f"{seen.request_id} is {times} times in the log of ended requests")
    return found


async def holds(condition: Callable[[], bool], timeout_s: float, otherwise: Callable[[], str]) -> None:
    """Return when a condition holds; raise TimeoutError with a sentence when it does not come to hold."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout_s:g} s: {otherwise()}")
        await asyncio.sleep(POLL_S)


def _stored(seen: Seen, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[str]:
    found: list[str] = []
    token_ids: list[int] = []
    num_terminals = 0
    for entry_id, fields in entries:
        major, _, minor = entry_id.decode().partition("-")
        if major != "0":
            num_terminals += 1
            continue
        delta = unpack(fields[b"p"], Delta)
        if num_terminals or delta.first_index != len(token_ids):
            found.append(f"{seen.request_id}: entry {entry_id.decode()} begins at token {delta.first_index}")
        token_ids += delta.token_ids
        if int(minor) != len(token_ids):
            found.append(f"{seen.request_id}: entry {entry_id.decode()} ends with token {len(token_ids)}")
    if num_terminals != 1:
        found.append(f"{seen.request_id} has {num_terminals} terminal entries stored and not 1")
    if token_ids != [token_id for delta in seen.deltas for token_id in delta.token_ids]:
        found.append(f"{seen.request_id}: the stored tokens are not those that its client saw")
    return found


def _moments(seen: Seen) -> list[float]:
    return seen.arrived_at if seen.ended_at is None else [*seen.arrived_at, seen.ended_at]


def _still_open(requests: Sequence[Seen]) -> str:
    still_open = [seen for seen in requests if not seen.is_over]
    shown = ", ".join(f"{seen.request_id} ({seen.num_tokens} tokens)" for seen in still_open[:4])
    return f"{len(still_open)} of {len(requests)} requests have not ended: {shown}"
