"""One stack under fire: what was asked of it, what was done to it, and the judgement of what became of it.

Owns the points of the checker:

    ends       every accepted request ended, once, and was told so
    tokens     they follow one another, are stored as they were seen, and are those of the run without faults
    remains    nothing is left when all have ended (and nothing at all when the stack has stopped: lab.py)
    recovery   after a fault something moved again within lease + sweep interval + the start of a process

Knows nothing about how the stack was started.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from ops.chaos.history import History, Seen, compared, holds, stored_problems
from ops.chaos.inquiry import Inquiry
from ops.chaos.processes import Deaths, Stopped, all_ready, pids_of, ready_pids
from ops.chaos.remains import remains
from ops.chaos.server import ChaosServer
from ops.stack import Stack
from pipeline import faults
from pipeline.client.asks import NewRequest
from pipeline.connect import open_client
from pipeline.counters import DIVERGENCES
from pipeline.keys import STAGES, SWEEPS_PER_LEASE, Keys
from stages.common.sweeper import interval_s as sweep_interval_s

TIMEOUT_S = 90.0  # of one wait: a process that starts on a busy machine is the longest
WORK_S = 1.5  # what is done again once work moves: a chunk, a replay, a step, on a machine that is busy
REMAINS_S = 10.0  # sweeps come at most a lease apart
POLL_S = 0.05


class Trial:
    """One stack, what was asked of it, and what was done to it."""

    def __init__(self, lab: Inquiry, stack: Stack, judge_url: str | None = None) -> None:
        self.lab = lab
        self.stack = stack
        self.settings = stack.settings
        self.keys = Keys(stack.settings.namespace)
        self.history = History(stack.client(TIMEOUT_S))
        self.redis: Any = open_client(judge_url or stack.settings)
        self.stopped = Stopped()
        self.server = ChaosServer(self.redis, stack.settings.home, self.stopped)
        self.deaths = Deaths(stack)
        self.struck_at: float | None = None
        """When the first fault was seen."""
        self.may_die = False
        """Whether it is meant that processes of the stack end."""
        self._watching = asyncio.create_task(self.deaths.watch())

    def send(self, asks: Iterable[NewRequest]) -> list[Seen]:
        """Submit requests, all at once; returns their records, which fill up."""
        return self.history.send(asks)

    async def accepted(self, requests: Sequence[Seen]) -> None:
        """Return when requests are accepted, or refused."""
        await self.stack.watched(self.history.accepted(requests, timeout_s=TIMEOUT_S))

    def strike(self, *names: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to processes of the stack; without names to all of its stages."""
        self.mark()
        pids = pids_of(self.stack)
        for name in names or pids:
            if number == signal.SIGSTOP:
                self.stopped.stop(pids[name])
            else:
                self.may_die = True
                os.kill(pids[name], number)

    def mark(self) -> None:
        """Note that a fault happens now."""
        if self.struck_at is None:
            self.struck_at = time.monotonic()

    async def ready(self) -> None:
        """Return when all processes are ready again."""
        await self.stack.watched(all_ready(self.stack))

    async def ready_again(self, name: str) -> None:
        """Kill a process and return when another one is ready in its place."""
        before = pids_of(self.stack)[name]
        self.strike(name)
        replaced = holds(
            lambda: ready_pids(self.stack).get(name, before) != before, TIMEOUT_S, lambda: f"{name} did not come back"
        )
        await self.stack.watched(replaced)

    def require_struck(self, point: str, number: int) -> None:
        """Note how often faults at a point struck; another number is a problem."""
        struck = self.num_struck(point)
        self.lab.note(f"{point} struck {struck} times")
        self.lab.require(struck == number, f"{point} struck {struck} times and not {number}")

    def num_struck(self, point: str) -> int:
        """Return how often faults at a point have struck."""
        return len(faults.struck(self.settings.home / "faults", point))

    async def counters(self) -> dict[str, int]:
        """Return how often what should be rare happened."""
        return {name.decode(): int(count) for name, count in (await self.redis.hgetall(self.keys.counters())).items()}

    async def counted(self) -> dict[str, int]:
        """Return the counters, with all that was counted before this call: it arrives with the next sweep."""
        await asyncio.sleep(2 * sweep_interval_s(self.settings.lease_s))
        return await self.counters()

    async def queue_length(self, stage: str) -> int:
        """Return how many requests wait for a stage or are in its hands."""
        return await self.stack.transport.queue_length(stage, "interactive")

    async def until(self, condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
        """Return when a condition holds; raise TimeoutError with a sentence when it does not come to hold."""
        await self.stack.watched(holds(condition, TIMEOUT_S, otherwise))

    async def until_so(self, question: Callable[[], Awaitable[object]], otherwise: str) -> None:
        """Return when a question to the server is answered with yes; raise TimeoutError when it does not come to be."""
        deadline = time.monotonic() + TIMEOUT_S
        while not await question():
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {TIMEOUT_S:g} s: {otherwise}")
            await asyncio.sleep(POLL_S)

    async def idle(self) -> None:
        """Return when all work streams are empty, also of requests that nobody waits for any more."""

        async def is_idle() -> bool:
            return not any([await self.queue_length(stage) for stage in STAGES])

        await self.until_so(is_idle, "there are still entries in the work streams")

    def log(self, name: str) -> str:
        """Return what a process of the stack has logged so far."""
        path = self.settings.home / "logs" / f"{name}.log"
        return path.read_text("utf-8") if path.exists() else ""

    async def ended(self, requests: Sequence[Seen] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """Return when requests, by default all, are over, or the stack is."""
        await self.stack.watched(self.history.ended(requests, timeout_s=timeout_s))

    async def tokens(self, number: int, requests: Sequence[Seen] | None = None) -> None:
        """Return when so many tokens have arrived."""
        await self.stack.watched(self.history.tokens(number, requests, timeout_s=TIMEOUT_S))

    async def judge(self, requests: Sequence[Seen] | None = None, *, recovers: bool = True) -> None:
        """Wait for the ends of requests that have to be answered, by default all, and hold them against the reference.

        Raises:
            TimeoutError: some do not end.
        """
        judged = self.history.requests if requests is None else requests
        expected = await self.lab.expected([seen.ask for seen in judged])
        await self.ended(judged)
        self.lab.blame(compared(judged, expected))
        self.lab.blame(await stored_problems(self.redis, self.keys, judged))
        num_tokens = sum(seen.num_tokens for seen in judged)
        self.lab.note(f"{len(judged)} requests, {num_tokens} tokens")
        if recovers:
            self.judge_recovery(judged)
        await self.judge_remains()
        divergences = (await self.counters()).get(DIVERGENCES, 0)
        self.lab.require(not divergences, f"{divergences} replayed tokens differ from those that were emitted")

    def standstill_s(self, requests: Sequence[Seen]) -> float | None:
        """Return the longest time in which none of the requests moved, from the first fault on; None without one."""
        struck_at = self.struck_at if self.struck_at is not None else self._first_death_at()
        return None if struck_at is None else self.history.longest_gap_s(struck_at, requests)

    def judge_recovery(self, requests: Sequence[Seen], more_s: float = 0.0) -> None:
        """Compare the longest standstill after the first fault with what it may take; more_s is for this fault."""
        gap_s = self.standstill_s(requests)
        if gap_s is None:
            self.lab.blame(["no fault was seen"])
            return
        lease_s = self.settings.lease_s
        start_s = self.deaths.slowest_start_s
        bound_s = more_s + lease_s + lease_s / SWEEPS_PER_LEASE + start_s
        self.lab.note(f"stood still {gap_s:.1f} s of at most {bound_s:.1f} s (a process starts in {start_s:.1f} s)")
        self.lab.require_soon(
            gap_s <= bound_s + WORK_S, f"nothing moved for {gap_s:.1f} s, and {bound_s:.1f} s are the most"
        )

    async def judge_remains(self, timeout_s: float = REMAINS_S) -> None:
        """Look for what is left when all requests have ended; sweepers get a moment for it."""
        deadline = time.monotonic() + timeout_s
        while left := await remains(self.redis, self.settings):
            if time.monotonic() > deadline:
                self.lab.blame(f"{timeout_s:g} s after the last end: {one}" for one in left)
                return
            await asyncio.sleep(POLL_S)

    def judge_deaths(self) -> None:
        """Look for processes that ended although nobody meant them to."""
        names = {death.name for death in self.deaths.all}
        self.lab.require(self.may_die or not names, f"{', '.join(sorted(names))} died, and nobody had killed it")

    async def close(self) -> None:
        """Let go on what was stopped, and follow nothing any more."""
        self.stopped.resume_all()
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self.history.close()
        await self.redis.aclose()

    def _first_death_at(self) -> float | None:
        return min((death.died_at for death in self.deaths.all), default=None)
