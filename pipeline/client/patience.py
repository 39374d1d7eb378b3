"""How long a client waits: for a server that is away, and for requests in which nothing moves.

Owns both limits, so that no wait is endless. Knows nothing about what is called or waited for.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pipeline.client.errors import Stalled
from pipeline.clock import Monotonic
from pipeline.errors import ServerUnreachable

PATIENCE_S = 60.0  # a server that is restarted reads some GB of its files in this time
STALL_TIMEOUT_S = 3600.0  # far above any queue that is worth waiting for
RETRY_S = 0.25

T = TypeVar("T")


class Patience:
    """Shared by everything that one client waits for: where one request moves, the others are not stuck."""

    def __init__(self, outage_s: float, stall_s: float, monotonic: Monotonic) -> None:
        self.now = monotonic
        self._outage_s = outage_s
        self._stall_s = stall_s
        self._moved_at = monotonic()

    async def call(self, send: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call, which must allow it, while the server is away.

        Raises:
            ServerUnreachable: it stayed away.
        """
        task = asyncio.current_task()
        num_cancellations = task.cancelling() if task else 0
        if num_cancellations:
            # One that has not arrived yet, because it was asked for while the task ran, arrives here. After that they
            # are known: what the task does to clear up is not to be disturbed.
            await asyncio.sleep(0)
        deadline = self.now() + self._outage_s
        while True:
            try:
                result = await send()
            except ServerUnreachable:
                if self.now() >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                # On Python 3.11, asyncio.wait_for, through which the client library sends, returns instead of raising
                # when what it waits for is done in the same moment. A loop of such calls would never end.
                if task and task.cancelling() > num_cancellations:
                    raise asyncio.CancelledError
                return result

    def moved(self) -> None:
        """Take note of a sign of life."""
        self._moved_at = self.now()

    def check(self, waiting_since: float, problem: str) -> None:
        """Raise Stalled where nothing has moved for too long, since then or later."""
        stood_s = self.now() - max(self._moved_at, waiting_since)
        if stood_s >= self._stall_s:
            raise Stalled(problem, stood_s)
