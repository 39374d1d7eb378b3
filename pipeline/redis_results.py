"""Waiting for results: all who wait at the same moment share one XREAD.

Owns which wait is part of which read. Knows nothing about what entries hold.

Decode emits the tokens of all its requests in one call. A client that follows sixteen of them gets them in one reply;
with a read for each, these reads would be most of what the server does.

Nobody can join a read that waits on the server already, so a newcomer begins another one, at once. All reads end with
the same tick of the clock at the latest; whoever got nothing goes on with the others of that tick, in one read again.
"""

import asyncio
from dataclasses import dataclass, field

from redis.asyncio import Redis

from pipeline.clock import Monotonic
from pipeline.errors import ServerRefused
from pipeline.redis_calls import RedisCalls, read_stream

RESULT_PAGE = 512  # entries of one stream in one read; a long result comes in several
ENTRIES_PER_READ = 4096  # of all its streams, about 1 MB; at least MIN_PAGE of each
MIN_PAGE = 16
STREAMS_PER_READ = 256
MAX_READS = 64  # at a time, each on a connection of its own
TICK_S = 0.25  # also how soon those can go on who found no connection free
GATHERING_S = 0.005  # replies of one tick come within this

Entry = tuple[bytes, dict[bytes, bytes]]
Reply = list[tuple[bytes, list[Entry]]]


@dataclass(slots=True, eq=False)
class _Wait:
    """One caller: where in which stream it stands, and until when it waits."""

    stream: str
    after: int
    until_s: float
    entries: "asyncio.Future[list[Entry]]" = field(default_factory=asyncio.Future[list[Entry]])
    alone: bool = False
    """Whether a read that it shared was refused, which need not be its own stream's fault."""


class ResultReads:
    """Reads of any number of streams on a bounded number of connections; whoever finds none waits for a turn."""

    def __init__(self, calls: RedisCalls, readers: Redis, monotonic: Monotonic) -> None:
        self._calls = calls
        self._readers = readers
        self._monotonic = monotonic
        self._waiting: list[_Wait] = []
        self._reads: dict[asyncio.Task[Reply], list[_Wait]] = {}
        self._start: asyncio.Handle | None = None

    async def read(self, stream: str, after: int, block_s: float) -> list[Entry]:
        """Return a page of the entries behind token `after`, empty where none came within block_s; 0 does not wait.

        Raises:
            ServerError: the server does not answer, or refused.
        """
        now = self._monotonic()
        wait = _Wait(stream, after, _last_tick(now, now + block_s))
        if block_s <= 0:
            return _found(await self._send([wait], None)).get(stream, [])
        self._waiting.append(wait)
        self._start_in(0)
        return await wait.entries

    async def end(self) -> None:
        """Give everybody who waits their error; the calls were closed before, and raise it."""
        while self._waiting or self._reads:
            self._start_reads()
            await asyncio.gather(*self._reads, return_exceptions=True)
            await asyncio.sleep(0)  # for what is called when they are done

    def _start_in(self, delay_s: float) -> None:
        """Begin a read soon: after everybody has had their turn who goes on in this turn of the event loop."""
        loop = asyncio.get_running_loop()
        if self._start is None:
            self._start = loop.call_later(delay_s, self._start_reads) if delay_s else loop.call_soon(self._start_reads)
        elif not delay_s and isinstance(self._start, asyncio.TimerHandle):
            self._start.cancel()
            self._start = loop.call_soon(self._start_reads)

    def _start_reads(self) -> None:
        if self._start is not None:
            self._start.cancel()
        self._start = None
        while self._waiting and len(self._reads) < MAX_READS:
            together, self._waiting = _together(self._waiting)
            if together:
                task = asyncio.create_task(self._send(together, self._left_s(together)), name="read_results")
                self._reads[task] = together
                task.add_done_callback(self._finish)

    def _left_s(self, waits: list[_Wait]) -> float:
        now = self._monotonic()
        return min(TICK_S - now % TICK_S, min(wait.until_s for wait in waits) - now)

    async def _send(self, waits: list[_Wait], block_s: float | None) -> Reply:
        after: dict[str, str | bytes] = {wait.stream: f"0-{wait.after}" for wait in waits}
        count = min(RESULT_PAGE, max(MIN_PAGE, ENTRIES_PER_READ // len(waits)))
        block_ms = None if block_s is None else max(1, round(1000 * block_s))  # 0 would be for ever
        return await self._calls.call(lambda: read_stream(self._readers, after, count, block_ms), "read_results")

    def _finish(self, task: asyncio.Task[Reply]) -> None:
        waits = [wait for wait in self._reads.pop(task) if not wait.entries.done()]
        if task.cancelled():
            for wait in waits:
                wait.entries.cancel()
        elif (error := task.exception()) is None:
            self._give_out(waits, _found(task.result()))
        elif isinstance(error, ServerRefused) and len(waits) > 1:
            for wait in waits:
                wait.alone = True
            self._waiting += waits
        else:
            for wait in waits:
                wait.entries.set_exception(error)
        if self._waiting:
            # Whoever got something asks again in this turn of the loop, and takes the others along.
            self._start_in(GATHERING_S)

    def _give_out(self, waits: list[_Wait], found: dict[str, list[Entry]]) -> None:
        now = self._monotonic()
        for wait in waits:
            entries = found.get(wait.stream, [])
            if entries or now >= wait.until_s:
                wait.entries.set_result(entries)
            else:
                self._waiting.append(wait)


def _last_tick(now: float, until_s: float) -> float:
    """The last tick up to then, if there is one: waits that end between ticks would end everybody's read."""
    tick = until_s - until_s % TICK_S
    return tick if tick > now else until_s


def _found(reply: Reply) -> dict[str, list[Entry]]:
    return {stream.decode(): entries for stream, entries in reply}


def _together(waiting: list[_Wait]) -> tuple[list[_Wait], list[_Wait]]:
    """Part those that can share a read from the rest: each stream is in it once, and whoever reads alone is alone."""
    together: dict[str, _Wait] = {}
    rest: list[_Wait] = []
    is_full = False
    for wait in waiting:
        if wait.entries.done():  # its caller has been cancelled
            continue
        if is_full or wait.stream in together or (wait.alone and together):
            rest.append(wait)
        else:
            together[wait.stream] = wait
            is_full = wait.alone or len(together) == STREAMS_PER_READ
    return list(together.values()), rest
