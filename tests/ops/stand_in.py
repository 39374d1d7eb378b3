"""A stand-in for a stage: `stand_in.py MODE DIRECTORY`. Ready means a file named after its pid in DIRECTORY/ready.

steady      ready, and ends when told to
held        ready; told to end, says so in DIRECTORY/asked, ends when DIRECTORY/go is there, and says that in left
stubborn    ready, ignores SIGTERM, and has a child of its own
broken      says two things and ends before it is ready
flawed      ready the first time, broken from the second start on
poisoned    ready the first time, killed before it is ready on the next five starts, then steady
mute        never ready
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.01
DEADLINE_S = 60.0


def announce(directory: Path) -> None:
    (directory / "ready" / str(os.getpid())).touch()


def leave(directory: Path) -> None:
    """End when allowed to; like a stage, at once when told a second time."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    say_when(directory / "asked")
    deadline = time.monotonic() + DEADLINE_S
    while not (directory / "go").exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    say_when(directory / "left")
    sys.exit(0)


def say_when(directory: Path) -> None:
    """Leave a file named after this process; whole from its first moment on."""
    path = directory / str(os.getpid())
    directory.mkdir(exist_ok=True)
    path.with_suffix(".new").write_text(str(time.monotonic_ns()))
    path.with_suffix(".new").rename(path)


def main() -> None:
    mode, directory = sys.argv[1], Path(sys.argv[2])
    if mode == "broken" or (mode == "flawed" and (directory / "flawed").exists()):
        print("reading the model")
        sys.exit("the model has a hole")
    if mode == "poisoned":
        num_starts = len(list(directory.glob("start-*")))
        (directory / f"start-{num_starts}").touch()
        if 1 <= num_starts <= 5:
            os.kill(os.getpid(), signal.SIGKILL)
    on_term: dict[str, Callable[..., object] | signal.Handlers] = {
        "stubborn": signal.SIG_IGN,
        "held": lambda *_: leave(directory),
    }
    signal.signal(signal.SIGTERM, on_term.get(mode, lambda *_: sys.exit(0)))
    if mode == "stubborn":
        child = subprocess.Popen(["sleep", "600"])
        (directory / "grandchild").write_text(str(child.pid))
    if mode == "flawed":
        (directory / "flawed").touch()
    if mode != "mute":
        announce(directory)
    print(f"{os.environ.get('GREETING', 'running')} {mode}")
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
