"""Signals to processes that are watched, and stage processes that are started besides those of a stack.

Owns what was stopped, so that it goes on in the end, and the times of deaths and recoveries. Knows nothing about why
anybody is struck.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ops.chaos.history import holds
from ops.stack import Stack, stage_environment
from ops.supervision.process import ChildProcess, Launch, ProcessLog
from ops.supervision.procfile import default_procfile
from pipeline.connect import host_and_pid

READY_TIMEOUT_S = 120.0  # importing torch on a machine that is busy
END_TIMEOUT_S = 20.0
WATCH_S = 0.02


@dataclass(slots=True)
class Death:
    """A process of the stack that ended, and when another one was ready in its place."""

    name: str
    died_at: float
    ready_at: float | None = None


class Deaths:
    """Watches the processes of a stack, whoever ends them; run watch() as a task."""

    def __init__(self, stack: Stack) -> None:
        self.all: list[Death] = []
        self._stack = stack
        self._ready: dict[str, int] = ready_pids(stack)

    async def watch(self) -> None:
        """Note deaths until cancelled."""
        while True:
            self._look(ready_pids(self._stack))
            await asyncio.sleep(WATCH_S)

    @property
    def slowest_start_s(self) -> float:
        """The longest time from a death to a process that was ready in its place."""
        return max((death.ready_at - death.died_at for death in self.all if death.ready_at is not None), default=0.0)

    def _look(self, ready: Mapping[str, int]) -> None:
        now = time.monotonic()
        for name, pid in tuple(self._ready.items()):
            if ready.get(name) != pid:
                self.all.append(Death(name, now))
                del self._ready[name]
        for name in ready.keys() - self._ready.keys():
            for death in self.all:
                if death.name == name and death.ready_at is None:
                    death.ready_at = now
        self._ready = dict(ready)


class Stopped:
    """Processes that were stopped with SIGSTOP; all of them go on in the end."""

    def __init__(self) -> None:
        self._pids: set[int] = set()

    def stop(self, pid: int) -> None:
        """Stop a process with all its threads, and with the helpers that it started."""
        _signal_all(pid, signal.SIGSTOP)
        self._pids.add(pid)

    def resume(self, pid: int) -> None:
        """Let it go on."""
        self._pids.discard(pid)
        with suppress(ProcessLookupError):
            _signal_all(pid, signal.SIGCONT)

    def resume_all(self) -> None:
        """Let all of them go on."""
        for pid in tuple(self._pids):
            self.resume(pid)


def _signal_all(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and its helpers: a stage leads a group of its own."""
    if os.getpgid(pid) == pid:
        os.killpg(pid, number)
    else:
        os.kill(pid, number)


class ExtraStage:
    """A stage process that the stack's supervisor knows nothing about."""

    def __init__(self, process: ChildProcess, log: Path) -> None:
        self._process = process
        self.log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def ended(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Return its exit code when it has ended."""
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()


@asynccontextmanager
async def extra_stage(stack: Stack, stage: str, **variables: str) -> AsyncIterator[ExtraStage]:
    """Run one more process of a stage beside a stack, with its settings but for these variables; it need not get ready.

    In the end it is asked to finish, and killed if it does not.
    """
    path = stack.settings.home / "logs" / f"{stage}-extra.log"
    command = (sys.executable, "-m", f"stages.{stage}")
    environment = stage_environment(stack.settings) | variables
    launch = Launch(command, environment, default_procfile().parent)
    process = await ChildProcess.start(launch, ProcessLog(path, f"{stage}-extra"))
    try:
        yield ExtraStage(process, path)
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def registered(stack: Stack, pid: int) -> None:
    """Return when a process has announced itself to the others."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while pid not in {host_and_pid(process.consumer)[1] for process in await stack.transport.processes()}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} was not ready after {READY_TIMEOUT_S:g} s")
        await asyncio.sleep(WATCH_S)


def pids_of(stack: Stack) -> dict[str, int]:
    """Return the processes of a stack that run at the moment, by name."""
    assert stack.supervisor is not None, "the stack is up"
    return {state.name: state.pid for state in stack.supervisor.states() if state.pid is not None}


def ready_pids(stack: Stack) -> dict[str, int]:
    """Return those that are ready."""
    assert stack.supervisor is not None, "the stack is up"
    return {state.name: state.pid for state in stack.supervisor.states() if state.pid is not None and state.ready}


async def all_ready(stack: Stack) -> None:
    """Return when every process of a stack runs and has announced itself."""
    assert stack.supervisor is not None, "the stack is up"
    supervisor = stack.supervisor
    not_ready = lambda: [state.name for state in supervisor.states() if not state.ready]  # noqa: E731
    await holds(lambda: not not_ready(), READY_TIMEOUT_S, lambda: f"{', '.join(not_ready())} is not ready")


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits for its parent does not."""
    return _state_of(pid) not in {None, "Z", "X"}


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, or has ended."""
    return _state_of(pid) in {None, "Z", "X", "T", "t"}


def _state_of(pid: int) -> str | None:
    """One letter, as proc(5) has it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return None


async def gone(pids: Mapping[str, int], timeout_s: float = END_TIMEOUT_S) -> None:
    """Return when none of the processes runs any more."""
    running = lambda: [name for name, pid in pids.items() if is_running(pid)]  # noqa: E731
    await holds(lambda: not running(), timeout_s, lambda: f"{', '.join(running())} still runs")
