"""Hands one computed chunk on: its pages into the pool, its reference into the queue.

Two ways with one result: a raw blob for the compressor, or, where prefill seals itself, a sealed blob at once. A full
pool is waited for. Knows nothing about how chunks are computed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kv_store.blob import HEADER_BYTES, Compression
from kv_store.errors import InvalidValue, KvStoreError, PoolFull
from kv_store.layout import PAGE_TOKENS
from kv_store.packing import PageArrays, packed_bytes, paged_bytes
from kv_store.pool import FilePool
from kv_store.ref import BlobRef
from pipeline import wire
from pipeline.boundaries import CHUNK_WRITTEN, SEALED
from pipeline.clock import monotonic_s, now_us
from pipeline.messages import RawChunk, SealedChunk, Stamp, TokenizedPrompt
from pipeline.transport import AddChunk, Effect, Publish
from stages.common.kv_blobs import ChunkId, KvFormat
from stages.engine.engine import Engine
from stages.engine.sequence import Sequence

# A request that writes has credit, so a pool that stays full for this long has less memory than its quota.
POOL_WAIT_S = 30.0
_POOL_POLL_S = 0.02

Waiting = Callable[[], Awaitable[None]]


class Handover:
    """Writes chunks; one per process."""

    def __init__(
        self, engine: Engine, pool: FilePool, *, chunk_tokens: int, seal: bool, compression: Compression
    ) -> None:
        """Choose the way: `seal` writes sealed blobs without the compressor's hop.

        Raises:
            InvalidValue: The pool's quota has no room for a chunk of chunk_tokens, so that no prompt could ever pass.
        """
        layout, codec = engine.config.kv_layout, engine.codec
        # The compressor writes the sealed blob before it frees the raw one. It must find room for it even when the
        # pool is full of raw blobs, because then its work is the only one that can make any.
        sealed_bytes = HEADER_BYTES + packed_bytes(layout, codec, chunk_tokens)
        self.room_bytes = (
            sealed_bytes if seal else sealed_bytes + HEADER_BYTES + paged_bytes(layout, codec, chunk_tokens)
        )
        if pool.quota_bytes < self.room_bytes:
            raise InvalidValue(
                "kv_pool_bytes", pool.quota_bytes, f"at least {self.room_bytes} for chunks of {chunk_tokens} tokens"
            )
        self._chunk_tokens = chunk_tokens
        self._engine = engine
        self._pool = pool
        self._seal = seal
        self._compression: Compression = compression
        self.format = KvFormat(engine.config.kv_layout, engine.codec, engine.fingerprint.digest())

    def bytes_for(self, num_tokens: int, *, with_checkpoints: bool) -> int:
        """Most bytes of the pool that so many tokens take at a time: all of it sealed, and one chunk raw as well.

        Checkpoints begin at a page's edge, so the first one overlaps with the last chunk of prefill.
        """
        layout, codec = self._engine.config.kv_layout, self._engine.codec
        num_chunks = -(-num_tokens // self._chunk_tokens) + int(with_checkpoints)
        num_stored = num_tokens + (PAGE_TOKENS - 1 if with_checkpoints else 0)
        sealed_bytes = num_chunks * HEADER_BYTES + packed_bytes(layout, codec, num_stored)
        return max(sealed_bytes, self.room_bytes) if self._seal else sealed_bytes + self.room_bytes

    async def effect(
        self, message: TokenizedPrompt, sequence: Sequence, chunk: ChunkId, computed: Stamp, waiting: Waiting
    ) -> tuple[Effect, BlobRef]:
        """Write the chunk's blob; returns the effect that makes it known, and its reference.

        `computed` says when and by whom the chunk was computed; its stamps begin with it. `waiting` is awaited again
        and again while the pool takes nothing, and may raise what ends the wait.

        Raises:
            KvStoreError: The pool took nothing for POOL_WAIT_S, or never will.
        """
        ref = await self._write(chunk, self._pages(sequence, chunk), waiting)
        written = computed.model_copy(update={"boundary": CHUNK_WRITTEN, "at_us": now_us()})
        stamps = (computed, written)
        if self._seal:
            stamps = (*stamps, written.model_copy(update={"boundary": SEALED}))
            sealed = SealedChunk(chunk_index=chunk.index, ref=ref, content_address=chunk.content_address, stamps=stamps)
            return AddChunk(chunk.index, wire.pack(sealed)), ref
        raw = RawChunk(
            request_id=chunk.request_id,
            attempt=chunk.attempt,
            priority=message.priority,
            chunk_index=chunk.index,
            start_token=chunk.start_token,
            ref=ref,
            content_address=chunk.content_address,
            stamps=stamps,
        )
        return Publish("compressor", message.priority, wire.pack(raw)), ref

    async def discard(self, ref: BlobRef) -> None:
        """Give up a blob whose effect did not happen."""
        await asyncio.to_thread(self._pool.release, ref.name)

    def _pages(self, sequence: Sequence, chunk: ChunkId) -> list[PageArrays]:
        return self._engine.cache.pages_of(sequence.block_table, chunk.start_token, chunk.num_tokens)

    async def _write(self, chunk: ChunkId, pages: list[PageArrays], waiting: Waiting) -> BlobRef:
        deadline = monotonic_s() + POOL_WAIT_S
        while True:
            try:
                return await self._write_owned(chunk, pages)
            except KvStoreError as error:  # full, or locked by a process that stands still
                if not error.retryable or monotonic_s() > deadline:
                    raise
            await waiting()
            await asyncio.sleep(_POOL_POLL_S)

    async def _write_owned(self, chunk: ChunkId, pages: list[PageArrays]) -> BlobRef:
        """Write in a thread; when this is cancelled, the thread goes on, and what it writes is released."""
        writing = asyncio.create_task(asyncio.to_thread(self._write_now, chunk, pages))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            with suppress(KvStoreError):
                await self.discard(await writing)
            raise

    def _write_now(self, chunk: ChunkId, pages: list[PageArrays]) -> BlobRef:
        if self._seal:
            return self.format.write_sealed(self._pool, chunk, pages, self._compression)
        free_bytes = self._pool.free_bytes()
        if free_bytes < self.room_bytes:
            raise PoolFull(self.room_bytes, free_bytes, self._pool.quota_bytes)
        return self.format.write_raw(self._pool, chunk, pages)
