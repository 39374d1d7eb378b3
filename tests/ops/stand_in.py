"""A stand-in for a stage: `stand_in.py MODE DIRECTORY`. Ready means a file named after its pid in DIRECTORY/ready.

steady      ready, and ends when told to
stubborn    ready, ignores SIGTERM, and has a child of its own
broken      says two things and ends before it is ready
flawed      ready the first time, broken from the second start on
mute        never ready
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def announce(directory: Path) -> None:
    (directory / "ready" / str(os.getpid())).touch()


def main() -> None:
    mode, directory = sys.argv[1], Path(sys.argv[2])
    if mode == "broken" or (mode == "flawed" and (directory / "flawed").exists()):
        print("reading the model")
        sys.exit("the model has a hole")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else lambda *_: sys.exit(0))
    if mode == "stubborn":
        child = subprocess.Popen(["sleep", "600"])
        (directory / "grandchild").write_text(str(child.pid))
    (directory / "flawed").touch()
    if mode != "mute":
        announce(directory)
    print(f"{os.environ.get('GREETING', 'running')} {mode}")
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
