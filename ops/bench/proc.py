"""What the kernel knows about a process: CPU time by what its threads are for, and memory. Linux only.

Owns the reading of /proc and which thread is which. Knows nothing about stacks.

    loop      the main thread: the event loop, and with it the conversation with the server
    engine    the thread that the engine names, and those that it starts: computing
    helpers   all others: blobs, tokenizing, and whatever else the event loop hands to a thread

Threads that have ended count as helpers, because only the sum of a process knows about them.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ENGINE_THREAD: Final = "engine"  # stages/engine/engine.py; not imported, because that loads torch
MIB: Final = 1024**2
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """CPU time, user and system together, since a process began, or between two readings."""

    loop_s: float = 0.0
    engine_s: float = 0.0
    helpers_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the sum."""
        return self.loop_s + self.engine_s + self.helpers_s

    def __sub__(self, before: "CpuSeconds") -> "CpuSeconds":
        # Helpers are what is left of a sum that is rounded; so little may be less than nothing.
        helpers_s = max(self.helpers_s - before.helpers_s, 0.0)
        return CpuSeconds(self.loop_s - before.loop_s, self.engine_s - before.engine_s, helpers_s)


def cpu_seconds(pid: int, proc: Path = _PROC) -> CpuSeconds:
    """Return what a process has used so far, to a hundredth of a second for each thread.

    Raises:
        FileNotFoundError: there is no such process.
    """
    _, total_s = _stat(proc / str(pid) / "stat")
    loop_s = engine_s = 0.0
    for task in (proc / str(pid) / "task").iterdir():
        try:
            name, used_s = _stat(task / "stat")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended a moment ago
        if task.name == str(pid):
            loop_s += used_s
        elif name == ENGINE_THREAD:
            engine_s += used_s
    # Threads were read after the process, so they may have used a little more by then.
    return CpuSeconds(loop_s, engine_s, max(total_s - loop_s - engine_s, 0.0))


def resident_mib(pid: int, proc: Path = _PROC) -> float | None:
    """Return the memory that a process has in use, shared pages included; None where there is no such process."""
    try:
        pages = int((proc / str(pid) / "statm").read_text("utf-8").split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def _stat(path: Path) -> tuple[str, float]:
    """Return name and CPU seconds; the name may hold spaces and parentheses (proc_pid_stat(5))."""
    before, _, after = path.read_text("utf-8", errors="replace").rpartition(")")
    fields = after.split()  # from field 3, the state, on
    ticks = int(fields[11]) + int(fields[12])  # utime and stime
    return before.partition("(")[2], ticks / os.sysconf("SC_CLK_TCK")
