"""Reading results: all who ask at the same moment share one XREAD.

Owns which wait is part of which read. Knows nothing about what entries hold.

Decode emits the tokens of all its requests in one call. A client that follows sixteen of them gets them in one reply;
with a read for each, these reads would be most of what the server does.

    asked ----> fresh ----> a read ----> entries
                              |  none before the tick, or only others' came
                            quiet -----> a read of quiet ones only, so that tokens of few do not cost a read of all

Nobody can join a read that waits on the server already, so a newcomer begins another one. All reads end with the same
tick of the clock at the latest; whoever got nothing goes on with the others of that tick, in one read again.
"""

import asyncio
import contextvars
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from redis.asyncio import Redis

from pipeline.clock import Monotonic
from pipeline.errors import ServerRefused, SluiceError
from pipeline.redis_calls import RedisCalls, read_stream
from pipeline.transport import AFTER_ALL

RESULT_PAGE: Final = 512  # entries of one stream in one read; a long result comes in several
ENTRIES_PER_READ = 4096  # of all its streams, about 1 MB; at least MIN_PAGE of each
MIN_PAGE = 16
STREAMS_PER_READ = 256
MAX_READS = 64  # that wait on the server at a time, each on a connection of its own
MANY_READS = 16  # from here on, who asks within GATHERING_S begins together: MAX_READS are enough until the tick
TICK_S = 0.25
GATHERING_S = 0.005  # also how far apart the replies of one tick are

Entry = tuple[bytes, dict[bytes, bytes]]
Reply = list[tuple[bytes, list[Entry]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """One caller: where in which stream it stands, and until when it waits."""

    stream: str
    after: int
    until_s: float
    entries: asyncio.Future[list[Entry]] = field(default_factory=asyncio.Future[list[Entry]])


_Waits = dict[tuple[str, int], list[_Wait]]
"""The waits of one read: a stream is in it once, for all who stand at the same place."""


@dataclass(slots=True, eq=False)
class _Group:
    """Waits that begin their next read together."""

    blocks: bool
    """Whether the read waits on the server."""
    waits: list[_Wait] = field(default_factory=list[_Wait])
    start: asyncio.Handle | None = None


class ResultReads:
    """Reads of any number of streams on a bounded number of connections; whoever finds none waits for the tick."""

    def __init__(self, calls: RedisCalls, readers: Redis, monotonic: Monotonic) -> None:
        self._calls = calls
        self._readers = readers
        self._monotonic = monotonic
        self._looks, self._fresh, self._quiet = _Group(blocks=False), _Group(blocks=True), _Group(blocks=True)
        self._reads: dict[asyncio.Task[Reply], tuple[_Group, _Waits]] = {}

    def last_tick(self, wait_s: float) -> float:
        """Return the last tick within wait_s from now; the end of that where there is none.

        Callers that wait until some other time would end everybody's read.
        """
        now = self._monotonic()
        tick = now + wait_s - (now + wait_s) % TICK_S
        return tick if tick > now else now + wait_s

    async def read(self, stream: str, after: int, until_s: float) -> list[Entry]:
        """Return a page of the entries behind token `after`, empty where none came; a time in the past does not wait.

        Raises:
            ServerError: the server does not answer, or refused.
        """
        if after == AFTER_ALL:
            return await self._wait_for_end(stream, until_s)
        return await self._ask(_Wait(stream, after, until_s))

    async def end(self, error: SluiceError) -> None:
        """Give everybody who waits this error, and return when no read is under way."""
        for group in (self._looks, self._fresh, self._quiet):
            _fail(group.waits, error)
        reads = dict(self._reads)
        for task, (_, waits) in reads.items():
            _fail(_callers(waits), error)
            task.cancel()
        if reads:
            await asyncio.wait(reads)

    async def _wait_for_end(self, stream: str, until_s: float) -> list[Entry]:
        """Look at each tick: a read that waited would be repeated, with all its streams, for each delta of any."""
        while True:
            now = self._monotonic()
            entries = await self._ask(_Wait(stream, AFTER_ALL, now))
            if entries or now >= until_s:
                return entries
            await asyncio.sleep(self._pause_s(until_s))

    async def _ask(self, wait: _Wait) -> list[Entry]:
        if wait.until_s <= self._monotonic():
            self._add(self._looks, [wait], 0)
        else:
            self._add(self._fresh, [wait], GATHERING_S if len(self._reads) >= MANY_READS else 0)
        return await wait.entries

    def _add(self, group: _Group, waits: list[_Wait], delay_s: float) -> None:
        """Let the group begin soon: in the next turn of the loop at the earliest, so that all of this one are in."""
        group.waits += waits
        if group.waits and group.start is None:
            loop = asyncio.get_running_loop()
            begin = self._begin
            group.start = loop.call_later(delay_s, begin, group) if delay_s else loop.call_soon(begin, group)

    def _begin(self, group: _Group) -> None:
        group.start = None
        while group.waits and not (group.blocks and self._num_waiting() >= MAX_READS):
            together, group.waits = _together(group.waits)
            self._send(group, together)

    def _num_waiting(self) -> int:
        return sum(group.blocks for group, _ in self._reads.values())

    def _send(self, group: _Group, waits: _Waits) -> None:
        if not waits:
            return
        # A context of its own: that of one of its callers would stand in all logs.
        task = asyncio.create_task(self._read(group, waits), name="read_results", context=contextvars.Context())
        self._reads[task] = group, waits
        task.add_done_callback(self._finish)

    async def _read(self, group: _Group, waits: _Waits) -> Reply:
        after: dict[str, str | bytes] = {stream: f"0-{place}" for stream, place in waits}
        count = min(RESULT_PAGE, max(MIN_PAGE, ENTRIES_PER_READ // len(waits)))
        block_s = self._pause_s(min(wait.until_s for wait in _callers(waits))) if group.blocks else None
        return await self._calls.call(lambda: read_stream(self._readers, after, count, block_s), "read_results")

    def _pause_s(self, until_s: float) -> float:
        """Up to the tick, or to this end of a wait if that is sooner."""
        now = self._monotonic()
        return min(TICK_S - now % TICK_S, until_s - now)

    def _finish(self, task: asyncio.Task[Reply]) -> None:
        group, waits = self._reads.pop(task)
        if task.cancelled():
            for wait in _callers(waits):
                wait.entries.cancel()
        elif (error := task.exception()) is None:
            self._give_out(group, waits, {stream.decode(): entries for stream, entries in task.result()})
        elif isinstance(error, ServerRefused) and len(waits) > 1:
            # For one that is no stream all are refused; of two halves, one is answered.
            half = len(waits) // 2
            self._send(group, dict(list(waits.items())[:half]))
            self._send(group, dict(list(waits.items())[half:]))
        else:
            _fail(_callers(waits), error)
        for waiting in (self._fresh, self._quiet):  # for whom there was no read before
            self._add(waiting, [], GATHERING_S)

    def _give_out(self, group: _Group, waits: _Waits, found: dict[str, list[Entry]]) -> None:
        now = self._monotonic()
        quiet: list[_Wait] = []
        for wait in _callers(waits):
            if wait.entries.done():  # the caller has been cancelled
                continue
            entries = found.get(wait.stream, [])
            if entries or not group.blocks or now >= wait.until_s:
                wait.entries.set_result(entries)
            else:
                quiet.append(wait)
        self._add(self._quiet, quiet, GATHERING_S)


def _together(waiting: Sequence[_Wait]) -> tuple[_Waits, list[_Wait]]:
    """Part those that can share a read from the rest."""
    together: _Waits = defaultdict(list)
    places: dict[str, int] = {}
    rest: list[_Wait] = []
    for wait in waiting:
        if wait.entries.done():  # the caller has been cancelled
            continue
        is_full = len(places) == STREAMS_PER_READ
        place = places.get(wait.stream) if is_full else places.setdefault(wait.stream, wait.after)
        if place == wait.after:
            together[wait.stream, wait.after].append(wait)
        else:
            rest.append(wait)
    return together, rest


def _callers(waits: _Waits) -> list[_Wait]:
    return [wait for callers in waits.values() for wait in callers]


def _fail(waits: Iterable[_Wait], error: BaseException) -> None:
    """Give each caller an error of its own: one that is raised in several places collects all their frames."""
    for wait in waits:
        if wait.entries.done():
            continue
        own = type(error).__new__(type(error), *error.args)
        own.__dict__.update(vars(error))
        own.__cause__ = error.__cause__
        wait.entries.set_exception(own)
