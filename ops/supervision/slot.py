"""One place in a stack: keeps one process running in it, whichever it is at the moment, until told to leave.

Owns that process and its log. It does not see readiness itself: the supervisor asks who has registered, and says
so with mark_ready(). Knows nothing about other slots.

                   registered              died                     waited
        starting ------------> ready ------------> backing off ----------------> starting
            |                                           ^
            +--- died, or not ready in time ------------+---> given up: StageFailed out of run()

    leave(), in any of these:  stopping, for as long as the process takes  ---> gone

A death before the first readiness of all is final at once: what is wrong then (a setting, a model file, the
handshake) does not go away by itself. Later deaths are crashes, and crashes are what restarts are for.
"""

import asyncio
import contextlib
import time

import structlog

from ops.supervision.crashes import CrashRecord, RestartPolicy, StageFailed
from ops.supervision.process import ChildProcess, Launch, ProcessLog, describe_exit
from ops.supervision.slot_status import SlotState, SlotStatus

logger = structlog.get_logger("supervisor")


class Slot:
    """A place for process `number` of a stage; create a task for run()."""

    def __init__(self, stage: str, number: int, launch: Launch, log: ProcessLog, policy: RestartPolicy) -> None:
        """Prepare it; nothing is started before run()."""
        self.stage = stage
        self.number = number
        self.name = slot_name(stage, number)
        self.ready = asyncio.Event()
        self.leaving = asyncio.Event()
        """Set for good by leave(): from then on nothing is started."""
        self.gone = asyncio.Event()
        """Set for good when run() has ended."""
        self.ever_ready = False
        self.failure: StageFailed | None = None
        """Why run() gave up."""
        self.final_if_unready = False
        """Whether a death before readiness is final at once."""
        self._launch = launch
        self._log = log
        self._policy = policy
        self._crashes = CrashRecord(policy)
        self._process: ChildProcess | None = None
        self._started_at = self._ready_at = 0.0
        self._backing_off = False
        self._ended_by_signal = False
        self._num_restarts = 0
        self._spawning = asyncio.Lock()  # whoever holds it may start a process, or say that none is started any more

    @property
    def pid(self) -> int | None:
        """The process that fills it, if one does."""
        return None if self._process is None else self._process.pid

    def status(self) -> SlotStatus:
        """Return what is known now."""
        uptime_s = None if self._process is None else round(time.monotonic() - self._started_at, 1)
        return SlotStatus(
            name=self.name,
            stage=self.stage,
            pid=self.pid,
            state=self._state(),
            num_restarts=self._num_restarts,
            uptime_s=uptime_s,
        )

    def mark_ready(self) -> None:
        """Note that the process is registered."""
        self._ready_at = time.monotonic()
        self.ever_ready = True
        self.ready.set()
        logger.info("process_ready", process=self.name, pid=self.pid)

    async def run(self) -> None:
        """Keep a process running until told to leave.

        Raises:
            StageFailed: it does not stay up.
        """
        try:
            while (problem := await self._run_once()) is not None:
                await self._back_off(self._delay_after(problem))
                self._num_restarts += 1
        finally:
            self.gone.set()

    async def leave(self, grace_s: float) -> None:
        """Ask the process to finish, end it if it has not after grace_s seconds, and start none any more."""
        self.leaving.set()
        async with self._spawning:  # one that is being started is one to end
            process = self._process
        if process is None:
            return
        process.terminate()
        wait = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({wait}, timeout=grace_s)
        finally:
            if not wait.done():
                logger.warning("process_killed", process=self.name, pid=process.pid, grace_s=round(grace_s, 1))
                process.kill()
        await wait
        await self.gone.wait()

    async def settled(self) -> None:
        """Return when nothing is on its way any more: it is ready and stays, or it is gone."""
        while not self.gone.is_set() and not (self.ready.is_set() and not self.leaving.is_set()):
            if self.leaving.is_set():
                await self.gone.wait()
            else:
                await wait_any(self.ready, self.gone, self.leaving)

    def _state(self) -> SlotState:
        if self.leaving.is_set():
            return "stopping"
        if self._backing_off:
            return "backing_off"
        return "ready" if self.ready.is_set() else "starting"

    async def _run_once(self) -> str | None:
        """Start a process and wait for its end; return how it died, or None when it was to leave."""
        try:
            async with self._spawning:
                if not self.leaving.is_set():
                    self._started_at = time.monotonic()
                    self._process = await ChildProcess.start(self._launch, self._log)
        except OSError as error:  # no memory or no process number left is as good as a crash
            return f"could not be started: {error.strerror}"
        if self._process is None:
            return None
        problem = await self._until_death(self._process)
        self._process = None
        if not self.leaving.is_set():
            return problem
        logger.info("process_stopped", process=self.name, how=problem)
        return None

    async def _until_death(self, process: ChildProcess) -> str:
        """Wait for the end of a process, which comes at the latest when it is not ready in time."""
        ended = asyncio.create_task(process.wait())
        ready = asyncio.create_task(self.ready.wait())
        try:
            timeout_s = self._policy.ready_timeout_s
            done, _ = await asyncio.wait({ended, ready}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                process.kill()
                await ended
                return f"was not ready after {timeout_s:.0f} s"
            code = await ended
            self._ended_by_signal = code < 0
            return describe_exit(code)
        finally:
            ready.cancel()
            ended.cancel()

    def _delay_after(self, problem: str) -> float:
        was_ready = self.ready.is_set()
        self.ready.clear()
        # A message that kills its readers may do so before anybody sees that the process was ready. What is wrong with
        # a start, on the other hand, ends it with a code.
        excused = self.ever_ready and self._ended_by_signal
        ready_s = time.monotonic() - self._ready_at if was_ready else 0.0
        delay_s = self._crashes.died(was_ready=was_ready or excused, ready_s=ready_s)
        if delay_s is None or (self.final_if_unready and not was_ready):
            num_deaths = self._crashes.num_deaths
            times = f", {num_deaths} times in a row" if num_deaths > 1 else ""
            self.failure = StageFailed(self.name, problem + times, self._log)
            raise self.failure
        logger.warning("process_died", process=self.name, problem=problem, restart_in_s=delay_s)
        return delay_s

    async def _back_off(self, delay_s: float) -> None:
        self._backing_off = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self.leaving.wait()
        self._backing_off = False


def slot_name(stage: str, number: int) -> str:
    """Return the name of process `number` of a stage, counted from 1."""
    return stage if number == 1 else f"{stage}-{number}"


async def wait_any(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
