"""Both transports behind one handle, so that a contract test can be written once."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from pipeline.connect import open_transport
from pipeline.keys import Keys
from pipeline.memory import MemoryQueues, MemoryTransport
from pipeline.settings import Settings
from pipeline.transport import Delivery, Transport, TransportOptions

POOL = "pool-1"
DEADLINE_S = 20.0  # for things that take milliseconds, on a machine that may be busy
BRIEF_LEASE_S = 0.05


class Bench(Protocol):
    """A set of queues to which a test connects consumers."""

    async def join(self, consumer: str = "a", **options: Any) -> Transport: ...

    async def dead_letters(self, stage: str) -> list[tuple[bytes, str]]: ...

    async def leftovers(self) -> list[str]: ...

    async def state_of(self, request_id: str) -> str | None: ...

    async def close(self) -> None: ...


class MemoryBench:
    def __init__(self) -> None:
        self.queues = MemoryQueues()

    async def join(self, consumer: str = "a", **options: Any) -> Transport:
        return MemoryTransport(self.queues, TransportOptions(consumer, pool_id=POOL, **options))

    async def dead_letters(self, stage: str) -> list[tuple[bytes, str]]:
        return [(letter.payload, letter.reason) for letter in self.queues.broker.dead.get(stage, ())]

    async def leftovers(self) -> list[str]:
        broker = self.queues.broker
        return [f"{name} holds {len(entries)} entries" for name, entries in broker.streams.items() if entries] + [
            f"request {request_id} stays"
            for request_id, request in broker.requests().items()
            if request.expires_at is None or request.chunks or request.plan
        ]

    async def state_of(self, request_id: str) -> str | None:
        request = self.queues.broker.request(request_id)
        return request.state if request else None

    async def close(self) -> None:
        return None


class RedisBench:
    def __init__(self, url: str, namespace: str, raw: Any, leftovers: Callable[[], Awaitable[list[str]]]) -> None:
        self._settings = Settings(redis_url=url, namespace=namespace)
        self._keys = Keys(namespace)
        self._raw = raw
        self._leftovers = leftovers
        self._opened: list[Transport] = []

    async def join(self, consumer: str = "a", **options: Any) -> Transport:
        settings = self._settings.model_copy(update=options)
        transport = await open_transport(settings, consumer=consumer, pool_id=POOL)
        self._opened.append(transport)
        return transport

    async def dead_letters(self, stage: str) -> list[tuple[bytes, str]]:
        entries = await self._raw.xrange(self._keys.dead(stage))
        return [(fields[b"p"], fields[b"reason"].decode()) for _, fields in entries]

    async def leftovers(self) -> list[str]:
        return await self._leftovers()

    async def state_of(self, request_id: str) -> str | None:
        state = await self._raw.hget(self._keys.request(request_id), "state")
        return state.decode() if state else None

    async def close(self) -> None:
        for transport in self._opened:
            await transport.close()


async def take(transport: Transport, stage: str, num_items: int = 1) -> list[Delivery]:
    """Receive exactly so many entries, asking until they are there."""
    deadline = time.monotonic() + DEADLINE_S
    taken: list[Delivery] = []
    while len(taken) < num_items:
        assert time.monotonic() < deadline, f"only {len(taken)} of {num_items} entries of {stage} came"
        taken += await transport.receive(stage, num_items - len(taken), block_s=0.05)
    return taken


async def take_one(transport: Transport, stage: str) -> Delivery:
    """Receive one entry, asking until it is there."""
    return (await take(transport, stage))[0]


async def soon(awaitable: Awaitable[Any]) -> Any:
    """Await something that is due at once."""
    return await asyncio.wait_for(awaitable, DEADLINE_S)
