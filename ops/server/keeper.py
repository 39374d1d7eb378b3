"""Keeps one embedded server running for as long as somebody uses it, and not longer.

Owns the server process, its lock and both sockets. A user is a connection: `sluice run` twice at once shares
one server, and a user that dies of SIGKILL is a closed connection, so nothing is ever counted wrong. Detached
from whoever started it, since that one may leave first. Run by path with `-I -S`: the standard library only,
a small process. Knows nothing about Redis beyond PING.

    user connects            -> "ready" when the server answers, or "failed <why>"
    user says "bye"          -> "shared" when others stay; else "stopping", and the end of the connection
                                when the server is gone
    user's connection ends   -> the same, without words
    the server dies          -> started again; after MAX_CRASHES in a row every connection ends

    python keeper.py FIRST_USER_FD DIRECTORY KEEPER_SOCKET SERVER_SOCKET LOG SERVER_COMMAND...
"""

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

LOCK_TIMEOUT_S = 40.0  # longer than an earlier server may take to stop
READY_TIMEOUT_S = 120.0  # an append-only file of gigabytes takes a while to load
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05
WATCH_S = 0.5  # how often a healthy server's process is looked at
MAX_CRASHES = 5
CALM_S = 60.0  # a server that ran this long starts with a clean record
TAIL_BYTES = 2000
TAIL_LINES = 5


class ServerFailed(Exception):  # noqa: N818 - reads as the fact it states
    """The server did not come up; says why."""


class Keeper:
    """One server, its users, and the loop between them."""

    def __init__(self, directory: Path, keeper_socket: Path, server_socket: Path, log: Path) -> None:
        self.directory = directory
        self.keeper_socket = keeper_socket
        self.server_socket = server_socket
        self.log = log
        self.selector = selectors.DefaultSelector()
        self.users: dict[socket.socket, bool] = {}  # whether it was told that the server is ready
        self.listener: socket.socket | None = None
        self.server: subprocess.Popen[bytes] | None = None
        self.stopping = False

    def run(self, first_user: socket.socket, command: list[str]) -> None:
        """Serve until the last user has left or the server cannot be kept up."""
        self._add(first_user)
        try:
            lock = self._take_lock()
            self._listen()
            self._start(command, lock)
            self._watch(command, lock)
        except (ServerFailed, OSError) as error:
            for user in self.users:
                self._say(user, f"failed {error}")
        finally:
            self._end()

    def _take_lock(self) -> int:
        """Hold the data directory; the server inherits the lock, so not even its orphan can have company."""
        lock = os.open(self.directory / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ServerFailed(f"another server holds {self.directory}") from None
                time.sleep(POLL_S)
            else:
                return lock

    def _listen(self) -> None:
        directory = self.keeper_socket.parent
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ServerFailed(f"{directory} is not a directory of this user alone")
        for path in (self.keeper_socket, self.server_socket):
            path.unlink(missing_ok=True)  # of a keeper that was killed; the lock says it is gone
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.keeper_socket))
        self.listener.listen(128)
        self.listener.settimeout(0)
        self.selector.register(self.listener, selectors.EVENT_READ)

    def _watch(self, command: list[str], lock: int) -> None:
        num_crashes, started_at = 0, time.monotonic()
        while not self.stopping:
            if self.server is None or self.server.poll() is None:
                self._greet()
                self._serve_users(WATCH_S)
                continue
            num_crashes = 1 if time.monotonic() > started_at + CALM_S else num_crashes + 1
            if num_crashes > MAX_CRASHES:
                raise ServerFailed(f"it crashed {num_crashes} times in a row")
            time.sleep(0.1 * 2**num_crashes)
            started_at = time.monotonic()
            with contextlib.suppress(ServerFailed):  # then it counts as the next crash
                self._start(command, lock)

    def _start(self, command: list[str], lock: int) -> None:
        """Start the server and wait until it answers, or until everybody left."""
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        offset = os.fstat(log).st_size
        try:
            self.server = subprocess.Popen(  # noqa: S603 - the command comes from ops/server/valkey.py
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                pass_fds=(lock,),
            )
        finally:
            os.close(log)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self.stopping and not self._answers():
            if self.server.poll() is not None:
                raise ServerFailed(f"it ended with code {self.server.returncode}: {self._tail(offset)}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"no answer in {READY_TIMEOUT_S:.0f} s: {self._tail(offset)}")
            self._serve_users(POLL_S)

    def _answers(self) -> bool:
        """Return whether the server takes commands; one that is loading its file answers with an error."""
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.settimeout(1.0)
            probe.connect(str(self.server_socket))
            probe.sendall(b"PING\r\n")
            return probe.recv(64).startswith(b"+PONG")
        return False

    def _tail(self, offset: int) -> str:
        with self.log.open("rb") as file:
            file.seek(max(offset, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return " | ".join(said[-TAIL_LINES:]) or "it said nothing"

    def _serve_users(self, timeout_s: float) -> None:
        for key, _ in self.selector.select(timeout_s):
            peer = cast("socket.socket", key.fileobj)
            if peer in self.users:
                self._hear(peer)
                continue
            with contextlib.suppress(OSError):  # it changed its mind
                self._add(peer.accept()[0])

    def _add(self, user: socket.socket) -> None:
        user.settimeout(0)
        self.users[user] = False
        self.selector.register(user, selectors.EVENT_READ)

    def _greet(self) -> None:
        for user in [user for user, told in self.users.items() if not told]:
            self.users[user] = True
            self._say(user, "ready")

    def _hear(self, user: socket.socket) -> None:
        """A user said bye or is gone; either way it counts no longer."""
        try:
            said_bye = bool(user.recv(64))
        except OSError:
            said_bye = False
        self.stopping = len(self.users) == 1
        if said_bye:
            self._say(user, "stopping" if self.stopping else "shared")
        if not (self.stopping and said_bye):  # the last one waits for the end of its connection
            self._drop(user)

    def _say(self, user: socket.socket, line: str) -> None:
        with contextlib.suppress(OSError):  # it is gone, and select says so next
            user.sendall(line.replace("\n", " ").encode() + b"\n")

    def _drop(self, user: socket.socket) -> None:
        del self.users[user]
        self.selector.unregister(user)
        user.close()

    def _end(self) -> None:
        """Stop the server and take the sockets away; the connections end with this process, last of all."""
        if self.server is not None and self.server.poll() is None:
            self.server.terminate()
            try:
                self.server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()
        if self.listener is not None:
            for path in (self.keeper_socket, self.server_socket):
                path.unlink(missing_ok=True)
            if self.keeper_socket.parent != self.directory:
                self.keeper_socket.parent.rmdir()


def main() -> None:
    """Detach from the starter, then keep."""
    fd, directory, keeper_socket, server_socket, log, *command = sys.argv[1:]
    if os.fork() != 0:
        os._exit(0)  # the starter has nothing to wait for
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the terminal's, and meant for the users
    os.umask(0o077)
    keeper = Keeper(Path(directory), Path(keeper_socket), Path(server_socket), Path(log))
    signal.signal(signal.SIGTERM, lambda *_: setattr(keeper, "stopping", True))
    guard = str(Path(__file__).parents[1] / "supervision" / "death_guard.py")
    guarded = [sys.executable, "-I", "-S", guard, str(int(signal.SIGTERM)), str(os.getpid()), *command]
    keeper.run(socket.socket(fileno=int(fd)), guarded)


if __name__ == "__main__":
    main()
