"""What the seam itself does not show, of both kinds of benches: other pools, who has credit in them, ends of leases."""

import re
from typing import Any

from pipeline.connect import open_transport
from pipeline.memory import MemoryTransport
from pipeline.transport import Delivery, Transport, TransportOptions
from tests.pipeline.benches import Bench, MemoryBench, RedisBench

LONG_AGO_MS = 3_600_000  # longer than any lease


async def join_pool(bench: Bench, pool_id: str, **options: Any) -> Transport:
    """A transport in the reach of another pool, named after it."""
    if isinstance(bench, MemoryBench):
        return MemoryTransport(bench.queues, TransportOptions(pool_id, pool_id, **options))
    assert isinstance(bench, RedisBench)
    settings = bench._settings.model_copy(update=options)
    transport = await open_transport(settings, consumer=pool_id, pool_id=pool_id)
    bench._opened.append(transport)
    return transport


async def expire(bench: Bench, delivery: Delivery) -> None:
    """Let the lease of a delivery be over."""
    if isinstance(bench, MemoryBench):
        bench.queues.broker.streams[delivery.stream][delivery.entry_id].renewed_at = float("-inf")
        return
    assert isinstance(bench, RedisBench)
    await bench._raw.xclaim(
        delivery.stream, delivery.stage, delivery.consumer, 0, [delivery.entry_id], idle=LONG_AGO_MS, justid=True
    )


async def credits_of(bench: Bench, pool_id: str) -> dict[str, tuple[int, int]]:
    """Attempt and bytes of each credit of a pool, by request."""
    if isinstance(bench, MemoryBench):
        owned = bench.queues.broker.credits.by_pool.get(pool_id, {})
        return {request_id: (credit.attempt, credit.num_bytes) for request_id, credit in owned.items()}
    assert isinstance(bench, RedisBench)
    fields = await bench._raw.hgetall(bench._keys.credits(pool_id))
    return {request_id.decode(): read_credit(credit)[:2] for request_id, credit in fields.items()}


def read_credit(credit: bytes) -> tuple[int, int, tuple[bytes, bytes] | None]:
    """Attempt, bytes, and the stream and id of the entry to which a credit on the server is tied."""
    match = re.fullmatch(rb"(\d+):(\d+)(?: (\S+) (\S+))?", credit)
    assert match, f"a credit is {credit!r}"
    return int(match[1]), int(match[2]), (match[3], match[4]) if match[3] else None
