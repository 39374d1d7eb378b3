"""The control channel of `sluice up`: a socket in its home, on which it says what runs and changes it.

Owns the socket, closed to other users, and its clients: few at a time, each with one request of bounded size that
has to come soon. Knows nothing about how processes are run.

Whoever asks to scale and leaves before the answer has still asked: the change is not taken back.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self

import structlog

from ops.control.messages import (
    CONTROL_SOCKET,
    MAX_REQUEST_BYTES,
    Answer,
    ErrorAnswer,
    ScaleRequest,
    SlotsAnswer,
    StatusRequest,
    read_request,
    write_line,
)
from ops.server.sockets import private_directory, socket_directory
from ops.supervision.supervisor import NotScalable, Supervisor
from pipeline.errors import SluiceError

MAX_CLIENTS = 16
REQUEST_TIMEOUT_S = 5.0  # for a request to arrive, and for an answer to leave

logger = structlog.get_logger("control")


class ControlServer:
    """Answers inside an `async with`; whoever enters it holds the home's UpLock."""

    def __init__(
        self, home: Path, supervisor: Callable[[], Supervisor | None], request_timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        """Prepare it; `supervisor` returns None until there is one."""
        self._home = home
        self._supervisor = supervisor
        self._request_timeout_s = request_timeout_s
        self._directory = home
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            UnsafePlace: the socket's directory is somebody else's.
        """
        self._directory = socket_directory(self._home, CONTROL_SOCKET)
        if self._directory != self._home:
            private_directory(self._directory)
        listener = _listener(self._directory / CONTROL_SOCKET)
        self._server = await asyncio.start_unix_server(self._meet, sock=listener, limit=MAX_REQUEST_BYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Hang up on everybody, and take the socket away."""
        assert self._server is not None
        self._server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        (self._directory / CONTROL_SOCKET).unlink(missing_ok=True)
        if self._directory != self._home:
            with contextlib.suppress(OSError):  # not empty: somebody keeps things there
                self._directory.rmdir()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            answer = await self._answer(reader)
            if answer is None:
                return
            writer.write(write_line(answer))
            async with asyncio.timeout(self._request_timeout_s):
                await writer.drain()
        except (ConnectionError, TimeoutError):
            logger.info("control_client_left")
        except asyncio.CancelledError:  # by __aexit__ alone; passed on, Python 3.11 would log it as an error
            logger.info("control_client_dismissed")
        finally:
            self._clients.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> Answer | None:
        """Return what to say to a client; None where it said nothing."""
        if len(self._clients) > MAX_CLIENTS:
            return ErrorAnswer(error=f"{MAX_CLIENTS} others are being served; try again", retryable=True)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                line = await reader.readline()
        except TimeoutError:
            return ErrorAnswer(error=f"no request came in {self._request_timeout_s:g} s", retryable=True)
        except ValueError:  # how a StreamReader says that its limit is reached
            return ErrorAnswer(error=f"request: has more than {MAX_REQUEST_BYTES} bytes", retryable=False)
        if not line:
            return None
        try:
            return await self._carry_out(read_request(line))
        except SluiceError as error:
            return ErrorAnswer(error=str(error), retryable=error.retryable)

    async def _carry_out(self, request: StatusRequest | ScaleRequest) -> SlotsAnswer:
        supervisor = self._supervisor()
        if isinstance(request, ScaleRequest):
            if supervisor is None:
                raise NotScalable("the stack is starting; it is scaled while it runs")
            supervisor.scale(request.replicas)
            await supervisor.wait_settled(request.replicas.keys(), request.timeout_s)
        return SlotsAnswer(slots=tuple(supervisor.states() if supervisor is not None else ()))


def _listener(path: Path) -> socket.socket:
    """Return a socket bound to a path, of mode 0600 from its first moment on."""
    path.unlink(missing_ok=True)  # of one that was killed: the home's lock says that it is gone
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listener.fileno(), 0o600)  # Linux: bind() gives the file this mode, less the umask
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    return listener
