"""Renewing leases on the server: the one call that both a stage and its heartbeat make.

Owns that call. Knows nothing about when it is made (leases.py).
"""

from collections.abc import Sequence
from typing import Protocol

from pipeline.keys import Keys
from pipeline.redis_calls import Arg, RedisCalls
from pipeline.transport import Delivery


class Renewal(Protocol):
    """Whoever can renew leases; every transport can."""

    async def renew(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Extend the leases; False means lost, which no later renewal can undo."""
        ...


class RedisRenewal:
    """Renews what one consumer holds."""

    def __init__(self, calls: RedisCalls, keys: Keys, consumer: str) -> None:
        self._calls = calls
        self._keys = keys
        self._consumer = consumer

    async def renew(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Extend the leases; False means lost, which no later renewal can undo."""
        if not deliveries:
            return []
        keys = [name for d in deliveries for name in (d.stream, self._keys.claims(d.stream))]
        reply: list[int] = await self._calls.script("renew", keys, [self._consumer, *fences(deliveries)])
        return [held == 1 for held in reply]


def fences(deliveries: Sequence[Delivery]) -> list[Arg]:
    """Return what scripts check a delivery by."""
    return [word for d in deliveries for word in (d.stage, d.entry_id, d.nonce)]
