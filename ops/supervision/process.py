"""One child process and what it says.

Owns the process (a session of its own, so that Ctrl-C reaches the supervisor alone), the pipe behind its
standard output and error, and its log file. Knows nothing about why it runs or what happens when it ends.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ops.supervision.death_guard import guarded

MAX_LOG_BYTES = 16 * 1024 * 1024  # then the file moves to .1, so a home holds at most twice this per process
MAX_LINE_CHARS = 2000  # of what is kept in memory; the file has it all
KEPT_LINES = 40
READ_BYTES = 65536
DRAIN_TIMEOUT_S = 1.0  # a grandchild may hold the pipe open for ever

Echo = Callable[[str, str], None]
"""Called with the process's name and one line that it wrote."""


class ProcessLog:
    """The output of one process over all its restarts: in a file, its last lines here, and maybe echoed."""

    def __init__(self, path: Path, name: str, echo: Echo | None = None) -> None:
        self.path = path
        self._name = name
        self._echo = echo
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Take bytes as they come."""
        self._append(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._take(line)
        self._partial = self._partial[-READ_BYTES:]  # a line that never ends must not fill the memory

    def end(self) -> None:
        """Take what is there as a line: the process is gone."""
        if self._partial:
            self._take(self._partial)
        self._partial = b""

    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines, each cut to a readable length."""
        return tuple(self._lines)

    def _append(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)
            too_large = file.tell() > MAX_LOG_BYTES
        if too_large:
            self.path.replace(self.path.with_name(self.path.name + ".1"))

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()[:MAX_LINE_CHARS]
        if not text:
            return
        self._lines.append(text)
        if self._echo is not None:
            self._echo(self._name, text)


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a process."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path


class ChildProcess:
    """A running child; it dies with this process, whatever ends this process."""

    def __init__(self, process: asyncio.subprocess.Process, read_fd: int, log: ProcessLog) -> None:
        self._process = process
        self._read_fd = read_fd
        self._log = log
        self._drained = asyncio.Event()
        self._asked_to_finish = False
        asyncio.get_running_loop().add_reader(read_fd, self._read)

    @classmethod
    async def start(cls, launch: Launch, log: ProcessLog) -> Self:
        """Start it. Call this on the main thread: the death signal belongs to the thread that spawns."""
        # Not asyncio's own pipe: its wait() may go on for as long as a grandchild holds the other end.
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        try:
            process = await asyncio.create_subprocess_exec(
                *guarded(launch.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                env=launch.env,
                cwd=launch.cwd,
                start_new_session=True,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        return cls(process, read_fd, log)

    @property
    def pid(self) -> int:
        """The process id, which is also that of its session and group."""
        return self._process.pid

    async def wait(self) -> int:
        """Return the exit code (negative: the signal) when it has ended and its output is in the log."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                await self._drained.wait()
        self._close_pipe()
        return code

    def terminate(self) -> None:
        """Ask it to finish; nothing happens when it was asked before, or has ended."""
        if self._asked_to_finish:
            return  # a second signal would end a stage at once, with its work undone
        self._asked_to_finish = True
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End it and whatever it started, at once."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        try:
            data = os.read(self._read_fd, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._log.feed(data)
        else:
            self._close_pipe()

    def _close_pipe(self) -> None:
        if self._drained.is_set():
            return
        self._drained.set()
        asyncio.get_running_loop().remove_reader(self._read_fd)
        os.close(self._read_fd)
        self._log.end()


def describe_exit(code: int) -> str:
    """Return how a process ended, in words."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
