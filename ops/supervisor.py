"""Keeps the processes of a stack running: starts them, knows which are ready, restarts those that die.

Owns its children and their logs. A process is ready when it says so itself, in its registration; the
supervisor only asks who has. Knows nothing about what the processes do.

               registered              died                     waited
    starting ------------> ready ------------> backing off ----------------> starting
        |                                            ^
        +--- died, or not ready in time -------------+---> failed: the whole stack is given up

A death before the first readiness of all is final at once: what is wrong then (a setting, a model file, the
handshake) does not go away by itself. Later deaths are crashes, and crashes are what restarts are for.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import structlog

from ops.process import ChildProcess, Echo, Launch, ProcessLog, describe_exit
from ops.procfile import ProcfileLine
from pipeline.errors import ServerError, SluiceError

READY_POLL_S = 0.1  # only while somebody is not ready
SHOWN_LINES = 12

logger = structlog.get_logger("supervisor")

ListReady = Callable[[], Awaitable[Set[int]]]
"""Returns the pids that are registered as ready."""


class StageFailed(SluiceError):  # noqa: N818 - reads as the fact it states
    """A process cannot be kept running; carries the last lines it wrote."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "stage_failed"

    def __init__(self, name: str, problem: str, log: ProcessLog) -> None:
        self.name = name
        self.problem = problem
        self.last_lines = log.last_lines()
        shown = self.last_lines[-SHOWN_LINES:]
        said = "\n".join(f"  {line}" for line in shown) if shown else "  (it wrote nothing)"
        super().__init__(f"{name} {problem}. Its last lines, from {log.path}:\n{said}")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a process that died is started again, and when it is given up."""

    first_delay_s: float = 0.5
    max_delay_s: float = 10.0
    calm_s: float = 30.0
    """A process that was ready this long starts with a clean record."""
    max_unready: int = 3
    """Deaths in a row without becoming ready."""
    max_in_a_row: int = 20
    """Deaths in a row at all: above what a few poisonous requests cause before they are dead letters."""
    ready_timeout_s: float = 300.0
    """Time to load a model, and to compile kernels with an empty cache."""


@dataclass(slots=True)
class CrashRecord:
    """The deaths of one process in a row."""

    policy: RestartPolicy
    num_deaths: int = 0
    num_unready: int = 0

    def died(self, *, was_ready: bool, ready_s: float) -> float | None:
        """Count a death; return the seconds to wait before the restart, or None to give up."""
        if was_ready and ready_s >= self.policy.calm_s:
            self.num_deaths = 0
        self.num_deaths += 1
        self.num_unready = 0 if was_ready else self.num_unready + 1
        if self.num_unready >= self.policy.max_unready or self.num_deaths >= self.policy.max_in_a_row:
            return None
        return min(self.policy.first_delay_s * 2 ** (self.num_deaths - 1), self.policy.max_delay_s)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all processes of a stack have in common."""

    environment: Mapping[str, str]
    cwd: Path
    log_dir: Path
    echo: Echo | None = None


@dataclass(slots=True)
class _Slot:
    """One place in the stack, whichever process fills it at the moment."""

    name: str
    launch: Launch
    log: ProcessLog
    crashes: CrashRecord
    process: ChildProcess | None = None
    ready_at: float | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    num_restarts: int = 0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What the supervisor knows about one process."""

    name: str
    pid: int | None
    ready: bool
    num_restarts: int


class Supervisor:
    """Runs every line of a Procfile, some of them several times."""

    def __init__(
        self,
        lines: Sequence[ProcfileLine],
        replicas: Mapping[str, int],
        surroundings: Surroundings,
        list_ready: ListReady,
        policy: RestartPolicy | None = None,
    ) -> None:
        unknown = replicas.keys() - {line.stage for line in lines}
        if unknown:
            raise ValueError(f"no line of the Procfile is named {', '.join(sorted(unknown))}")
        self._policy = policy or RestartPolicy()
        self._list_ready = list_ready
        self._slots: list[_Slot] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[StageFailed] | None = None
        self._stopping = False
        self._spawning = asyncio.Lock()  # whoever holds it may start processes, or say that none is started any more
        self._all_ready_once = False
        for line in lines:
            launch = Launch(line.command, surroundings.environment, surroundings.cwd)
            for index in range(replicas.get(line.stage, 1)):
                name = line.stage if index == 0 else f"{line.stage}-{index + 1}"
                log = ProcessLog(surroundings.log_dir / f"{name}.log", name, surroundings.echo)
                self._slots.append(_Slot(name, launch, log, CrashRecord(self._policy)))

    async def start(self) -> None:
        """Start all processes, and the tasks that look after them."""
        self._failure = asyncio.get_running_loop().create_future()
        for slot in self._slots:
            slot.log.path.parent.mkdir(parents=True, exist_ok=True)
            await self._spawn(slot)
            self._own(self._keep_running(slot))
        self._own(self._watch_ready())

    async def wait_ready(self) -> None:
        """Return when all processes are ready.

        Raises:
            StageFailed: one died, or was not ready in time.
        """
        failed = asyncio.ensure_future(self.wait_failed())
        ready = asyncio.ensure_future(self._wait_all_ready())
        try:
            await asyncio.wait({failed, ready}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
        finally:
            failed.cancel()
            ready.cancel()
            await asyncio.gather(failed, ready, return_exceptions=True)
        self._all_ready_once = True

    async def wait_failed(self) -> StageFailed:
        """Return what made the supervisor give up; never returns while it has not."""
        if self._failure is None:
            raise RuntimeError("the supervisor was not started")
        return await asyncio.shield(self._failure)

    def states(self) -> list[ProcessState]:
        """Return one state for each process, in the order of the Procfile."""
        return [
            ProcessState(slot.name, slot.process and slot.process.pid, slot.ready.is_set(), slot.num_restarts)
            for slot in self._slots
        ]

    async def stop(self, grace_s: float) -> None:
        """Ask all processes to finish, end those that have not after grace_s seconds; none is left."""
        async with self._spawning:
            self._stopping = True
        running = [slot.process for slot in self._slots if slot.process is not None]
        for process in running:
            process.terminate()
        waits = [asyncio.create_task(process.wait()) for process in running]
        try:
            if waits:
                await asyncio.wait(waits, timeout=grace_s)
        finally:
            for process, wait in zip(running, waits, strict=True):
                if not wait.done():
                    logger.warning("process_killed", pid=process.pid, grace_s=grace_s)
                    process.kill()
        await asyncio.gather(*waits)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Pass an unforeseen error on to whoever waits, who would wait in vain."""
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _keep_running(self, slot: _Slot) -> None:
        while slot.process is not None:
            started_at = time.monotonic()
            problem = await self._until_death(slot)
            was_ready, ready_at = slot.ready.is_set(), slot.ready_at or started_at
            slot.ready.clear()
            slot.process = None
            if self._stopping:
                return
            delay_s = slot.crashes.died(was_ready=was_ready, ready_s=time.monotonic() - ready_at)
            if delay_s is None or not (was_ready or self._all_ready_once):
                self._give_up(slot, problem)
                return
            logger.warning("process_died", process=slot.name, problem=problem, restart_in_s=delay_s)
            await asyncio.sleep(delay_s)
            await self._spawn(slot)
            slot.num_restarts += 1

    async def _spawn(self, slot: _Slot) -> None:
        async with self._spawning:
            if not self._stopping:
                slot.process = await ChildProcess.start(slot.launch, slot.log)

    async def _until_death(self, slot: _Slot) -> str:
        """Wait for the end of a process, which comes at the latest when it is not ready in time."""
        process = slot.process
        assert process is not None
        ended = asyncio.create_task(process.wait())
        ready = asyncio.create_task(slot.ready.wait())
        try:
            timeout_s = self._policy.ready_timeout_s
            done, _ = await asyncio.wait({ended, ready}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                process.kill()
                await ended
                return f"was not ready after {timeout_s:.0f} s"
            return describe_exit(await ended)
        finally:
            ready.cancel()
            ended.cancel()

    def _give_up(self, slot: _Slot, problem: str) -> None:
        if self._failure is not None and not self._failure.done():
            times = f", {slot.crashes.num_deaths} times in a row" if slot.crashes.num_deaths > 1 else ""
            self._failure.set_result(StageFailed(slot.name, problem + times, slot.log))

    async def _wait_all_ready(self) -> None:
        for slot in self._slots:
            await slot.ready.wait()

    async def _watch_ready(self) -> None:
        seen: Set[int] = frozenset()
        while not self._stopping:  # a cancellation alone may be lost inside the client library
            waiting = [slot for slot in self._slots if not slot.ready.is_set()]
            # Twice in a row: a process that finds that it does not fit to the others leaves at once.
            before, seen = seen, await self._ready_pids() if waiting else frozenset[int]()
            for slot in waiting:
                if slot.process is not None and slot.process.pid in before & seen:
                    slot.ready_at = time.monotonic()
                    slot.ready.set()
                    logger.info("process_ready", process=slot.name, pid=slot.process.pid)
            await asyncio.sleep(READY_POLL_S)

    async def _ready_pids(self) -> Set[int]:
        try:
            return await self._list_ready()
        except ServerError as error:  # it may be back before anybody is given up
            logger.info("readiness_unknown", problem=str(error))
            return frozenset()
