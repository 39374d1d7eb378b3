"""What a command may do with a stack, whoever runs it.

Owns the clients of one command, and the watch over the stack while they wait. Knows nothing about how the
stack came up: stack.py starts one of its own, running.py uses that of `sluice up`.
"""

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Self, TypeVar

from pipeline.client.client import Client
from pipeline.errors import ServerError, SluiceError
from pipeline.settings import Settings
from pipeline.transport import Transport

STALL_TIMEOUT_S = 300.0  # far above the longest prefill, far below a night
CANCEL_TIMEOUT_S = 5.0  # a server that is gone must not hold up the end

T = TypeVar("T")
Warn = Callable[[str], None]
"""Gets a sentence about what should not be but stops nothing."""


def warn_on_stderr(line: str) -> None:
    """Print a warning where people look for it."""
    print(f"warning: {line}", file=sys.stderr)


class Serving(ABC):
    """A stack that serves requests inside an `async with`, and knows whether it still can."""

    def __init__(self, settings: Settings, warn: Warn = warn_on_stderr) -> None:
        self.settings = settings
        self.startup_s = 0.0
        self.leave_work = False
        """Set it where work in the queues is meant to stay there at the end: a batch goes on the next time."""
        self._warn = warn
        self._transport: Transport | None = None
        self._clients: list[Client] = []
        self._exit = AsyncExitStack()

    @property
    def transport(self) -> Transport:
        """The way to the queues, while the stack is up."""
        assert self._transport is not None, "the stack is not up"
        return self._transport

    async def __aenter__(self) -> Self:
        """Start everything and wait until it is ready.

        Raises:
            SluiceError: what did not start and why; whatever had started is stopped again.
        """
        started_at = time.monotonic()
        async with AsyncExitStack() as starting:
            await self._start(starting)
            self._exit = starting.pop_all()
        self.startup_s = time.monotonic() - started_at
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop everything, in the reverse order."""
        await self._exit.aclose()

    def client(self, stall_timeout_s: float = STALL_TIMEOUT_S) -> Client:
        """Return a client whose unanswered requests end with this stack."""
        client = self._new_client(stall_timeout_s)
        self._clients.append(client)
        return client

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what the work returns, unless the stack fails meanwhile; then the work is cancelled.

        Raises:
            SluiceError: why the stack failed.
        """
        task = asyncio.create_task(work)
        failed = asyncio.create_task(self.wait_failed())
        try:
            await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise failed.result()
            return task.result()
        finally:
            task.cancel()
            failed.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)

    @property
    @abstractmethod
    def greeting(self) -> str:
        """What to say before it is entered."""

    @abstractmethod
    def afterwards(self, batch_id: str) -> str:
        """Return what becomes of a batch when its command ends before it does, as the end of a sentence."""

    @abstractmethod
    async def wait_failed(self) -> SluiceError:
        """Return why the stack cannot go on; never return while it can."""

    @abstractmethod
    async def _start(self, starting: AsyncExitStack) -> None:
        """Start everything, and leave on `starting` how to stop it."""

    def _unfinished(self) -> frozenset[str]:
        return frozenset().union(*(client.unanswered for client in self._clients))

    async def _cancel_unfinished(self) -> None:
        """Cancel what nobody waits for any more, so that the stages drop it instead of finishing it."""
        request_ids = self._unfinished()
        if not request_ids:
            return
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                # Not by the clients that asked: they still tell whose entries are to be removed.
                await self._new_client(CANCEL_TIMEOUT_S).cancel_many(request_ids)
        except (ServerError, TimeoutError) as error:
            problem = str(error) or f"no answer within {CANCEL_TIMEOUT_S:g} s"
            self._warn(f"{len(request_ids)} unfinished requests could not be cancelled: {problem}")

    def _new_client(self, timeout_s: float) -> Client:
        return Client(self.transport, self.settings, patience_s=timeout_s, stall_timeout_s=timeout_s)
