"""Fills a request's pages: what the pool holds is copied, the rest is computed again, with the same bits.

Chunks of prefill come first, then the checkpoints of whoever had the request before. A chunk that is missing, damaged
or another one's is computed in its place, and the chunks behind it are used all the same, since KV depends on tokens
alone. What lies behind the last one is replayed, and compared with what was emitted.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from kv_store.errors import BlobMissing, KvStoreError
from kv_store.packing import PayloadSizeError
from kv_store.pool import FilePool
from pipeline import counters as names
from pipeline import wire
from pipeline.counters import Counters
from pipeline.errors import WireError
from pipeline.leases import Leases
from pipeline.messages import PrefilledPrompt, SealedChunk, Stamp
from pipeline.transport import Transport
from stages.common.chunking import chunks_of
from stages.common.kv_blobs import BlobMismatchError, ChunkId, KvFormat
from stages.decode.checkpoints import checkpoint_of
from stages.engine import stepping
from stages.engine.engine import Engine
from stages.engine.sequence import Sequence

log = structlog.get_logger("decode")

IsWanted = Callable[[], Awaitable[bool]]
_UNUSABLE = (KvStoreError, BlobMismatchError, PayloadSizeError)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was found in the pool.

    Attributes:
        lost: Chunks of prefill that could not be used, in order.
        num_tokens: Positions from 0 on that are in the pages, once the lost ones are computed.
        num_checkpoints: How many checkpoints of earlier holders are in the pages.
        stamps: The way of the chunks of prefill.
    """

    lost: tuple[ChunkId, ...]
    num_tokens: int
    num_checkpoints: int
    stamps: tuple[Stamp, ...]

    @property
    def num_lost_tokens(self) -> int:
        """How many tokens are in lost chunks."""
        return sum(chunk.num_tokens for chunk in self.lost)

    def num_missing_tokens(self, sequence: Sequence) -> int:
        """How many tokens have to be computed: the lost ones, and those behind what is in the pages."""
        return self.num_lost_tokens + sequence.num_tokens - 1 - self.num_tokens


class KvLoader:
    """Loads requests of one decode process; the pages belong to the caller."""

    def __init__(
        self, transport: Transport, leases: Leases, engine: Engine, pool: FilePool, counters: Counters
    ) -> None:
        """Wire it up; it owns none of these."""
        self._transport = transport
        self._leases = leases
        self._engine = engine
        self._pool = pool
        self._counters = counters
        self.format = KvFormat(engine.config.kv_layout, engine.codec, engine.fingerprint.digest())

    async def load(self, message: PrefilledPrompt, sequence: Sequence) -> Loaded:
        """Copy what there is into the sequence's pages; its output tokens are in place."""
        sealed = await self._sealed(message)
        chunks = chunks_of(
            message.request_id,
            message.attempt,
            sequence.token_ids(0, message.num_prefilled_tokens),
            message.chunk_tokens,
            self.format.fingerprint,
        )
        lost = tuple([chunk for chunk in chunks if not await self._copy(sequence, chunk, sealed.get(chunk.index))])
        num_checkpoints, num_tokens = 0, message.num_prefilled_tokens
        while message.num_chunks + num_checkpoints in sealed:
            chunk = checkpoint_of(message, num_checkpoints, sequence, sequence.num_tokens - 1, self.format.fingerprint)
            if chunk is None or not await self._copy(sequence, chunk, sealed[chunk.index]):
                break
            num_checkpoints, num_tokens = num_checkpoints + 1, chunk.start_token + chunk.num_tokens
        stamps = tuple(stamp for chunk in chunks if chunk.index in sealed for stamp in sealed[chunk.index].stamps)
        return Loaded(lost, num_tokens, num_checkpoints, stamps)

    async def complete(self, loaded: Loaded, sequence: Sequence, chunk_tokens: int, is_wanted: IsWanted) -> bool:
        """Compute what the pool did not hold, up to but without the newest token.

        Asks before each piece whether anybody still wants it, and returns False when not.
        """
        for chunk in loaded.lost:
            sequence.num_computed_tokens = chunk.start_token
            if not await self._replay(sequence, chunk.start_token + chunk.num_tokens, chunk_tokens, is_wanted):
                return False
        if loaded.lost:
            self._counters.add(names.KV_RECOMPUTED_TOKENS, loaded.num_lost_tokens)
            log.warning("kv_recomputed", num_tokens=loaded.num_lost_tokens)
        sequence.num_computed_tokens = loaded.num_tokens
        num_replayed = sequence.num_tokens - 1 - loaded.num_tokens
        if num_replayed:
            self._counters.add(names.TOKENS_REPLAYED, num_replayed)
        return await self._replay(sequence, sequence.num_tokens - 1, chunk_tokens, is_wanted)

    async def _sealed(self, message: PrefilledPrompt) -> dict[int, SealedChunk]:
        """The references to its chunks; one that cannot be read counts as missing."""
        sealed: dict[int, SealedChunk] = {}
        for index, data in (await self._transport.chunks(message.request_id, message.attempt)).items():
            try:
                sealed[index] = wire.unpack(data, SealedChunk)
            except WireError as error:
                log.warning("chunk_unreadable", request_id=message.request_id, chunk=index, reason=str(error))
        return sealed

    async def _copy(self, sequence: Sequence, chunk: ChunkId, sealed: SealedChunk | None) -> bool:
        """Copy one chunk into its pages; whether that was possible."""
        if sealed is None:
            self._counters.add(names.KV_MISSING)
            return False
        pages = self._engine.cache.pages_of(sequence.block_table, chunk.start_token, chunk.num_tokens)
        try:
            await asyncio.to_thread(self.format.read_sealed, self._pool, sealed.ref, chunk, pages)
        except _UNUSABLE as error:
            self._counters.add(names.KV_MISSING if isinstance(error, BlobMissing) else names.KV_DAMAGED)
            log.warning("kv_unusable", request_id=chunk.request_id, chunk=chunk.index, reason=str(error))
            return False
        return True

    async def _replay(self, sequence: Sequence, end: int, chunk_tokens: int, is_wanted: IsWanted) -> bool:
        while sequence.num_computed_tokens < end:
            if not await is_wanted():
                return False
            num_tokens = min(chunk_tokens, end - sequence.num_computed_tokens)
            num_different = await self._engine.compute(
                stepping.replay, self._engine.model, self._engine.cache, sequence, num_tokens
            )
            self._leases.progressed()
            if num_different:
                self._counters.add(names.DIVERGENCES, num_different)
                log.error("tokens_diverge", num_different=num_different, num_replayed=num_tokens)
        return True
