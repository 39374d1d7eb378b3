"""Where a row happens: stacks to strike, a client that remembers, and the judgement of what became of it.

Owns what the rows have in common: a stack's life, whom a client asked for what, and the points of the checker.
A row collects problems instead of stopping at the first one; a row without problems has passed.

    ends       every accepted request ended, once, and was told so
    tokens     they follow one another, are stored as they were seen, and are those of the run without faults
    remains    nothing is left when all have ended, and nothing at all when the stack has stopped
    recovery   after a fault something moved again within lease + sweep interval + the start of a process
"""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.chaos.history import History, Seen, compared, holds, problems_of, stored_problems
from ops.chaos.homes import new_home
from ops.chaos.processes import Deaths, Stopped, all_ready, gone, pids_of, ready_pids
from ops.chaos.reference import Reference
from ops.chaos.remains import blobs_left, remains
from ops.chaos.server import ChaosServer
from ops.outputs import Output
from ops.stack import Stack
from ops.supervision.crashes import RestartPolicy
from pipeline import faults
from pipeline.client.asks import NewRequest, make_ask
from pipeline.connect import open_client
from pipeline.counters import DIVERGENCES
from pipeline.keys import STAGES, SWEEPS_PER_LEASE, Keys
from pipeline.settings import Settings
from stages.common.sweeper import interval_s as sweep_interval_s

LEASE_S = 1.0
CHUNK_TOKENS = 64
TIMEOUT_S = 90.0  # of one wait: a process that starts on a busy machine is the longest
WORK_S = 1.5  # what is done again once work moves: a chunk, a replay, a step, on a machine that is busy
REMAINS_S = 10.0  # sweeps come at most a lease apart
POLL_S = 0.05
POLICY = RestartPolicy(first_delay_s=0.05, max_delay_s=0.2, max_in_a_row=1000)


class NotRun(Exception):  # noqa: N818 - reads as the fact it states
    """A row cannot be run here; says why."""


@dataclass(frozen=True, slots=True)
class Models:
    """Files of models."""

    served: Path
    """What the row's stacks serve."""
    other: Path
    """A small one that is not the same."""


@dataclass(slots=True)
class Findings:
    """What a row has seen so far."""

    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Lab:
    """One row's means, and what it found."""

    def __init__(
        self, base: Settings, models: Models, reference: Reference, *, long: bool = False, logs: Path | None = None
    ) -> None:
        """Prepare it; `logs` is where the logs of its stacks are kept, `long` whether minutes are well spent."""
        self.models = models
        self.long = long
        self.found = Findings()
        self._base = base
        self._reference = reference
        self._logs = logs

    def note(self, number: str) -> None:
        """Keep something that happened, in words."""
        self.found.notes.append(number)

    def require(self, fact: object, otherwise: str) -> None:
        """Keep a problem unless something holds."""
        if not fact:
            self.found.problems.append(otherwise)

    def problems(self, problems: Iterable[str]) -> None:
        """Keep problems."""
        self.found.problems += problems

    async def expected(self, asks: Sequence[NewRequest]) -> list[Output]:
        """Return what requests come to where nothing goes wrong."""
        return await self._reference.outputs(asks)

    def ask(self, prompt: str, max_tokens: int, **params: Any) -> NewRequest:
        """Return a request of the served model; greedy with seed 1 unless it says otherwise."""
        values = {"seed": 1, "temperature": 0.0, "max_tokens": max_tokens} | params
        return make_ask(prompt, model=str(self.models.served), **values)

    def settings(self, **fields: object) -> dict[str, object]:
        """Return what differs from the user's settings in every stack that is struck."""
        usual = {"model": str(self.models.served), "lease_s": LEASE_S, "chunk_tokens": CHUNK_TOKENS}
        return usual | fields

    @asynccontextmanager
    async def home(self, **fields: object) -> AsyncIterator[Settings]:
        """Give a home without a stack; its logs are kept where that was asked for."""
        with new_home(self._base, **self.settings(**fields)) as settings:
            try:
                yield settings
            finally:
                self._keep_logs(settings.home / "logs")

    @asynccontextmanager
    async def trial(
        self,
        replicas: Mapping[str, int] | None = None,
        *,
        fault: str | None = None,
        procfile: Path | None = None,
        **fields: object,
    ) -> AsyncIterator["Trial"]:
        """Run a stack in a home of its own; see trial_in.

        Args:
            replicas: processes of each stage.
            fault: which fault points strike (pipeline/faults.py).
            procfile: other commands than the project's.
            fields: settings.
        """
        async with self.home(**fields) as settings:
            struck = {"fault": fault, "fault_dir": settings.home / "faults"} if fault else {}
            async with self.trial_in(settings.model_copy(update=struck), replicas, procfile=procfile) as trial:
                yield trial

    @asynccontextmanager
    async def trial_in(
        self,
        settings: Settings,
        replicas: Mapping[str, int] | None = None,
        *,
        procfile: Path | None = None,
        judge_url: str | None = None,
    ) -> AsyncIterator["Trial"]:
        """Run a stack to be struck; when it has stopped, nothing of it may be left.

        `judge_url` is where the checker finds the server, if it must not go the way of the stages.
        """
        warnings: list[str] = []
        stack = Stack(settings, replicas, policy=POLICY, warn=warnings.append, procfile=procfile)
        pids: dict[str, int] = {}
        async with stack, AsyncExitStack() as ending:
            trial = Trial(self, stack, judge_url)
            ending.push_async_callback(trial.close)
            ending.callback(lambda: pids.update(pids_of(stack)))
            yield trial
        await gone(pids)
        self.problems(f"at the end of the stack: {warning}" for warning in warnings)
        self.problems(f"after the stack: {left}" for left in blobs_left(settings))

    def _keep_logs(self, logs: Path) -> None:
        if self._logs is not None and logs.is_dir():
            number = 1 + sum(1 for _ in self._logs.glob("*")) if self._logs.is_dir() else 1
            shutil.copytree(logs, self._logs / f"stack-{number}")


class Trial:
    """One stack, what was asked of it, and what was done to it."""

    def __init__(self, lab: Lab, stack: Stack, judge_url: str | None = None) -> None:
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
        self._watching = asyncio.create_task(self.deaths.watch())

    def send(self, asks: Iterable[NewRequest]) -> list[Seen]:
        """Submit requests, all at once; returns their records, which fill up."""
        return self.history.send(asks)

    async def accepted(self, requests: Sequence[Seen]) -> None:
        """Return when requests are accepted, or refused."""
        waiting = lambda: [seen for seen in requests if seen.accepted_at is None and not seen.is_over]  # noqa: E731
        decided = holds(lambda: not waiting(), TIMEOUT_S, lambda: f"{len(waiting())} requests wait at the door")
        await self.stack.watched(decided)

    def strike(self, *names: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to processes of the stack; without names to all of its stages."""
        self.mark()
        pids = pids_of(self.stack)
        for name in names or pids:
            if number == signal.SIGSTOP:
                self.stopped.stop(pids[name])
            else:
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

    async def idle(self) -> None:
        """Return when all work streams are empty, also of requests that nobody waits for any more."""
        deadline = time.monotonic() + TIMEOUT_S
        while waiting := sum([await self.queue_length(stage) for stage in STAGES]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{waiting} entries are still in the work streams after {TIMEOUT_S:g} s")
            await asyncio.sleep(POLL_S)

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
        self.lab.problems(compared(judged, expected))
        self.lab.problems(await stored_problems(self.redis, self.keys, judged))
        num_tokens = sum(seen.num_tokens for seen in judged)
        self.lab.note(f"{len(judged)} requests, {num_tokens} tokens")
        if recovers:
            self.judge_recovery(judged)
        await self.judge_remains()
        divergences = (await self.counters()).get(DIVERGENCES, 0)
        self.lab.require(not divergences, f"{divergences} replayed tokens differ from those that were emitted")

    def judge_ends(self, requests: Sequence[Seen]) -> None:
        """Look at requests only for how they ended, not for what they came to."""
        for seen in requests:
            self.lab.problems(problems_of(seen))

    def standstill_s(self, requests: Sequence[Seen]) -> float | None:
        """Return the longest time in which none of the requests moved, from the first fault on; None without one."""
        struck_at = self.struck_at if self.struck_at is not None else self._first_death_at()
        return None if struck_at is None else self.history.longest_gap_s(struck_at, requests)

    def judge_recovery(self, requests: Sequence[Seen], more_s: float = 0.0) -> None:
        """Compare the longest standstill after the first fault with what it may take; more_s is for this fault."""
        gap_s = self.standstill_s(requests)
        if gap_s is None:
            self.lab.problems(["no fault was seen"])
            return
        lease_s = self.settings.lease_s
        start_s = self.deaths.slowest_start_s
        bound_s = more_s + lease_s + lease_s / SWEEPS_PER_LEASE + start_s
        self.lab.note(f"stood still {gap_s:.1f} s of at most {bound_s:.1f} s (a process starts in {start_s:.1f} s)")
        self.lab.require(
            gap_s <= bound_s + WORK_S, f"nothing moved for {gap_s:.1f} s, and {bound_s:.1f} s are the most"
        )

    async def judge_remains(self, timeout_s: float = REMAINS_S) -> None:
        """Look for what is left when all requests have ended; sweepers get a moment for it."""
        deadline = time.monotonic() + timeout_s
        while left := await remains(self.redis, self.settings):
            if time.monotonic() > deadline:
                self.lab.problems(f"{timeout_s:g} s after the last end: {one}" for one in left)
                return
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Let go on what was stopped, and follow nothing any more."""
        self.stopped.resume_all()
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self.history.close()
        await self.redis.aclose()

    def _first_death_at(self) -> float | None:
        return min((death.died_at for death in self.deaths.all), default=None)
