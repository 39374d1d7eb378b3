"""Becomes another program that ends with its parent: `python death_guard.py SIGNAL PARENT_PID COMMAND...`.

Owns one process attribute, PR_SET_PDEATHSIG, which outlives exec: a supervisor that dies of SIGKILL still
takes its children along. Run by path with `-I -S`, so it costs milliseconds. The signal belongs to the
*thread* that spawned, so spawn from the main thread. Knows nothing about what it becomes.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def guarded(command: Sequence[str], death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the command line that runs `command` as a child of this process, under the guard."""
    return [sys.executable, "-I", "-S", __file__, str(int(death_signal)), str(os.getpid()), *command]


def main() -> None:
    """Set the signal, look whether the parent died meanwhile, and become the command."""
    death_signal, parent_pid, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it died before the signal was set
        sys.exit("the parent is gone")
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell on purpose
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
