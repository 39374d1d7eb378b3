"""How much prefill may put in front of decode: what decode processes say they can hold, below the stack's own bound.

Decode publishes slots and pages with its registration. Prefill takes credit against the sum of the slots before it
computes, and computes nothing that fits into nobody's pages. While no decode process is there, nothing begins: work
piles up where it is cheapest, as token ids in a queue.
"""

from pipeline.clock import Monotonic, monotonic_s
from pipeline.transport import Transport
from stages.common.capacity import Capacity, capacity_of

READ_AHEAD = 2  # credits per slot: one that decodes and one that is ready to take its place
ASK_S = 1.0  # how old the answer may be; processes come and go more seldom


class DecodeRoom:
    """The bounds on requests between prefill and their end in decode."""

    def __init__(
        self, transport: Transport, pool_id: str, max_requests: int, monotonic: Monotonic = monotonic_s
    ) -> None:
        """Ask through a transport about the decode processes of one pool; never more than max_requests."""
        self._transport = transport
        self._pool_id = pool_id
        self._max_requests = max_requests
        self._monotonic = monotonic
        self._asked_at: float | None = None
        self._capacity = Capacity(slots=0, pages=0)

    async def max_requests(self) -> int:
        """How many requests may hold a credit now."""
        return min(self._max_requests, READ_AHEAD * (await self._ask()).slots)

    async def max_pages(self) -> int:
        """Pages of KV cache that one request may need; 0 while no decode process is there."""
        return (await self._ask()).pages

    async def _ask(self) -> Capacity:
        now = self._monotonic()
        if self._asked_at is None or now - self._asked_at >= ASK_S:
            self._capacity = capacity_of(await self._transport.processes(), self._pool_id)
            self._asked_at = now
        return self._capacity
