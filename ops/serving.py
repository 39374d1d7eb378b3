"""What a command may do with a stack, whoever runs it.

Owns the sessions of one command, and the watch over the stack while they wait. Knows nothing about how the
stack came up: stack.py starts one of its own, running.py uses that of `sluice up`.
"""

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Self, TypeVar

from redis.exceptions import RedisError

from ops.leftovers import Leftovers
from ops.session import STALL_TIMEOUT_S, Session
from pipeline.errors import SluiceError
from pipeline.settings import Settings
from pipeline.transport import Transport

FORGET_TIMEOUT_S = 5.0  # a server that is gone must not hold up the end

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
        self._warn = warn
        self._transport: Transport | None = None
        self._sessions: list[Session] = []
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

    def session(self, stall_timeout_s: float = STALL_TIMEOUT_S) -> Session:
        """Return a session whose unfinished requests end with this stack."""
        session = Session(self.transport, stall_timeout_s=stall_timeout_s)
        self._sessions.append(session)
        return session

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

    @abstractmethod
    async def wait_failed(self) -> SluiceError:
        """Return why the stack cannot go on; never return while it can."""

    @abstractmethod
    async def _start(self, starting: AsyncExitStack) -> None:
        """Start everything, and leave on `starting` how to stop it."""

    def _unfinished(self) -> frozenset[str]:
        return frozenset().union(*(session.unfinished for session in self._sessions))

    async def _forget_unfinished(self, leftovers: Leftovers) -> None:
        """Take back what nobody waits for any more, so that the stages drop it instead of finishing it."""
        if not self._unfinished():
            return
        try:
            async with asyncio.timeout(FORGET_TIMEOUT_S):
                await leftovers.forget(self._unfinished())
        except (RedisError, OSError) as error:
            self._warn(f"{len(self._unfinished())} unfinished requests could not be taken back: {error}")
