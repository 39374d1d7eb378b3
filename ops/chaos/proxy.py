"""A proxy between processes and their server, which loses, holds back and delays what they say to each other.

Owns connections in pairs and what happens to bytes on their way. Knows the protocol only so far as this: a connection
asks, then it is answered, so what comes from the client first after an answer is a new request.

    open      bytes go through, answers after `delay_s()` where that is set
    frozen    nothing goes through and nothing is closed: a network that lost its way. What was under way stays under
              way: it arrives when the proxy is opened again, also where whoever sent it has hung up meanwhile
    cut       connections are closed, and new ones at once: a server that is not there
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

READ_BYTES = 65536
HEAD_BYTES = 4096
"""What is kept of a request to choose by: a script's digest, its keys, and the first of its arguments."""

Chooses = Callable[[bytes], bool]
"""Says of the head of a request whether it is meant."""


class Proxy:
    """Listens at a unix socket and passes everything on to another; use it in an `async with`."""

    def __init__(self, url: str, socket: Path) -> None:
        """Stand before the server at a unix:// address, and listen at a socket."""
        self.delay_s: Callable[[], float] | None = None
        """Called for each answer; how long to hold it back."""
        self.num_answers = 0
        """That went through."""
        self.num_lost = 0
        """Answers that were lost."""
        self._target = url.removeprefix("unix://")
        self._socket = socket
        self._open = asyncio.Event()
        self._open.set()
        self._is_cut = False
        self._lose: list[tuple[Chooses, int]] = []
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The address for SLUICE_REDIS_URL."""
        return f"unix://{self._socket}"

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def freeze(self) -> None:
        """Let nothing through until it is opened."""
        self._open.clear()

    def cut(self) -> None:
        """Close all connections, and every new one, until it is opened."""
        self._is_cut = True
        for connection in tuple(self._connections):
            connection.cancel()

    def open(self) -> None:
        """Let everything through again."""
        self._is_cut = False
        self._open.set()

    def lose_answer(self, chooses: Chooses, times: int = 1) -> None:
        """Lose the answer to the next requests that are chosen: they get through, then their connection is closed."""
        self._lose.append((chooses, times))

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accepted, str(self._socket))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._socket.unlink(missing_ok=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            if self._is_cut:
                return
            server_reader, server_writer = await asyncio.open_unix_connection(self._target)
            with contextlib.closing(server_writer):
                await self._connect(_Pair(reader, writer, server_reader, server_writer))

    async def _connect(self, pair: "_Pair") -> None:
        """Pass bytes on in both directions until the answers end; what was asked before that has arrived."""
        asking = asyncio.create_task(self._pass_requests(pair))
        answering = asyncio.create_task(self._pass_answers(pair))
        try:
            await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (asking, answering):
                task.cancel()
            await asyncio.gather(asking, answering, return_exceptions=True)

    async def _pass_requests(self, pair: "_Pair") -> None:
        while data := await pair.from_client.read(READ_BYTES):
            await self._open.wait()
            if pair.was_answered:
                pair.head, pair.was_answered = b"", False
            pair.head = (pair.head + data)[:HEAD_BYTES]
            pair.to_server.write(data)
            await pair.to_server.drain()

    async def _pass_answers(self, pair: "_Pair") -> None:
        while data := await pair.from_server.read(READ_BYTES):
            await self._open.wait()
            if self._loses(pair.head):
                self.num_lost += 1
                return
            if self.delay_s is not None:
                await asyncio.sleep(self.delay_s())
            self.num_answers += 1
            pair.was_answered = True
            pair.to_client.write(data)
            await pair.to_client.drain()

    def _loses(self, head: bytes) -> bool:
        for position, (chooses, times) in enumerate(self._lose):
            if chooses(head):
                self._lose[position : position + 1] = [(chooses, times - 1)] if times > 1 else []
                return True
        return False


class _Pair:
    """The two ends of one connection, and the request that is under way in it."""

    def __init__(
        self,
        from_client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        self.from_client = from_client
        self.to_client = to_client
        self.from_server = from_server
        self.to_server = to_server
        self.head = b""
        self.was_answered = False
