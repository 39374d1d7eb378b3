"""Sends on what waits for a pool that is gone: no process will ever claim it, so this acts as the pool's stages.

Raw chunks are passed on unsealed, as the compressor does with one that it cannot use, so that requests come together as
planned; those go back to prefill, which computes them again in a pool that is there. Leases, nonces and attempts hold
here as everywhere: where the pool comes back in the middle of it, nothing happens twice.
"""

import structlog

from pipeline import wire
from pipeline.boundaries import COMPRESSOR_CLAIMED, DECODE_CLAIMED, SEALED
from pipeline.clock import now_us
from pipeline.connect import open_transport
from pipeline.counters import REQUESTS_SENT_BACK, Counters
from pipeline.errors import StateDamaged, WireError
from pipeline.keys import MAX_DELIVERIES
from pipeline.messages import Failure, PrefilledPrompt, RawChunk, SealedChunk
from pipeline.settings import Settings
from pipeline.transport import AddChunk, Delivery, Effect, Outcome, Restart, Transaction, Transport
from pipeline.upkeep import Upkeep
from pipeline.worker import bury, is_poison
from stages.common.failures import fail
from stages.common.restart import MAX_RESTARTS, send_back

MAX_ITEMS = 8  # taken at a time: done long before their leases end

log = structlog.get_logger("janitor")


async def salvage(settings: Settings, pool_id: str, upkeep: Upkeep, counters: Counters, limit: int) -> int:
    """Send on up to `limit` entries of a pool that is gone, and return how many that was.

    Raises:
        ServerError: There is no answer; what was taken comes back when its lease has run out.
    """
    # What there is to say about the server, this process said at its start.
    transport = await open_transport(settings, pool_id=pool_id, warn=lambda _: None)
    try:
        salvaging = _Salvage(transport, pool_id, upkeep, counters)
        num_chunks = await salvaging.serve("compressor", limit)  # these first: they complete requests
        num_requests = await salvaging.serve("decode", limit - num_chunks)
    finally:
        await transport.close()
    if num_chunks or num_requests:
        log.warning("pool_salvaged", pool_id=pool_id, num_chunks=num_chunks, num_requests=num_requests)
    return num_chunks + num_requests


class _Salvage:
    """A consumer of one pool's queues that has nothing of the pool."""

    def __init__(self, transport: Transport, pool_id: str, upkeep: Upkeep, counters: Counters) -> None:
        self._transport = transport
        self._pool_id = pool_id
        self._upkeep = upkeep
        self._counters = counters

    async def serve(self, stage: str, limit: int) -> int:
        """Do away with up to `limit` entries of a stage."""
        num_served = 0
        while num_served < limit:
            deliveries = await self._transport.receive(stage, min(MAX_ITEMS, limit - num_served), 0)
            if not deliveries:
                break
            for delivery in deliveries:
                await self._serve_one(delivery)
            num_served += len(deliveries)
        return num_served

    async def _serve_one(self, delivery: Delivery) -> None:
        if delivery.stage == "decode" and is_poison(delivery):  # nothing is done here that a chunk could break
            await self._bury(delivery, "too_many_tries", f"given up after {MAX_DELIVERIES} tries")
            return
        try:
            transaction = await self._transaction(delivery)
            [outcome] = await self._transport.commit([transaction])
        except (WireError, StateDamaged) as error:
            await self._bury(delivery, error.code, str(error))
            return
        if outcome is Outcome.OK and any(isinstance(effect, Restart) for effect in transaction.effects):
            self._counters.add(REQUESTS_SENT_BACK)

    async def _bury(self, delivery: Delivery, code: str, problem: str) -> None:
        failure = Failure(stage=delivery.stage, code=code, message=problem, retryable=False)
        await bury(self._transport, delivery, failure)

    async def _transaction(self, delivery: Delivery) -> Transaction:
        if delivery.stage == "compressor":
            raw = wire.unpack(delivery.payload, RawChunk)
            return Transaction(delivery, raw.request_id, raw.attempt, await self._pass_on(delivery, raw), ack=True)
        message = wire.unpack(delivery.payload, PrefilledPrompt)
        return Transaction(delivery, message.request_id, message.attempt, (_elsewhere(delivery, message),), ack=True)

    async def _pass_on(self, delivery: Delivery, raw: RawChunk) -> tuple[Effect, ...]:
        if await self._upkeep.home_of(raw.request_id) not in (self._pool_id, None):
            return ()  # it was taken over before its prompt was complete, and gets all its chunks in another pool
        stamps = raw.stamped(COMPRESSOR_CLAIMED, now_us(), delivery.consumer, raw.chunk_index)
        stamps = stamps.stamped(SEALED, now_us(), delivery.consumer, raw.chunk_index).stamps
        sealed = SealedChunk(
            chunk_index=raw.chunk_index, ref=raw.ref, content_address=raw.content_address, stamps=stamps
        )
        return (AddChunk(raw.chunk_index, wire.pack(sealed), substitute=True),)


def _elsewhere(delivery: Delivery, message: PrefilledPrompt) -> Effect:
    if message.num_restarts < MAX_RESTARTS:
        return send_back(message)
    problem = f"its KV was lost {message.num_restarts + 1} times, the last time with the pool that held it"
    failure = Failure(stage="decode", code="kv_lost", message=problem, retryable=True)
    return fail(failure, message.stamped(DECODE_CLAIMED, now_us(), delivery.consumer).stamps, delivery.consumer)
