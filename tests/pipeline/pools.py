"""What the seam itself does not show, of both kinds of benches: other pools, and who has credit in them."""

import re
from typing import Any

from pipeline.connect import open_transport
from pipeline.memory import MemoryTransport
from pipeline.transport import Transport, TransportOptions
from tests.pipeline.benches import Bench, MemoryBench, RedisBench


async def join_pool(bench: Bench, pool_id: str, **options: Any) -> Transport:
    """A transport in the reach of another pool, named after it."""
    if isinstance(bench, MemoryBench):
        return MemoryTransport(bench.queues, TransportOptions(pool_id, pool_id, **options))
    assert isinstance(bench, RedisBench)
    settings = bench._settings.model_copy(update=options)
    transport = await open_transport(settings, consumer=pool_id, pool_id=pool_id)
    bench._opened.append(transport)
    return transport


async def credits_of(bench: Bench, pool_id: str) -> dict[str, tuple[int, int]]:
    """Attempt and bytes of each credit of a pool, by request."""
    if isinstance(bench, MemoryBench):
        owned = bench.queues.broker.credits.get(pool_id, {})
        return {request_id: (credit.attempt, credit.num_bytes) for request_id, credit in owned.items()}
    assert isinstance(bench, RedisBench)
    return credits_in(await bench._raw.hgetall(bench._keys.credits(pool_id)))


def credits_in(fields: dict[bytes, bytes]) -> dict[str, tuple[int, int]]:
    """The same from the fields of a pool's hash on the server."""
    found: dict[str, tuple[int, int]] = {}
    for request_id, credit in fields.items():
        match = re.fullmatch(rb"(\d+):(\d+)", credit)
        assert match, f"the credit of {request_id!r} is {credit!r}"
        found[request_id.decode()] = (int(match[1]), int(match[2]))
    return found
