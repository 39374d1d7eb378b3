"""The compressor as a map: a raw chunk in, a sealed one out.

Sealing moves codes, it derives none: the sealed bytes are those the engine computed with. The raw blob is freed when
the commit is through, the sealed one when the commit was refused. Knows nothing about models but the layout.
"""

import asyncio
from contextlib import suppress

import structlog

from kv_store.blob import BlobKind, Compression
from kv_store.codecs.registry import codec_numbered
from kv_store.errors import BlobError, KvStoreError
from kv_store.layout import KvLayout
from kv_store.packing import pages_of
from kv_store.pool import FilePool
from kv_store.ref import BlobRef
from pipeline import faults, wire
from pipeline.boundaries import COMPRESSOR_CLAIMED, SEALED
from pipeline.clock import now_us
from pipeline.errors import WireError
from pipeline.messages import RawChunk, SealedChunk
from pipeline.transport import AddChunk, Delivery, Outcome, Transaction
from stages.common.kv_blobs import BlobMismatchError, ChunkId, KvFormat, release_all

log = structlog.get_logger("compressor")


class CompressorStage:
    """Seals chunks of one model in one pool."""

    name = "compressor"

    def __init__(self, pool: FilePool, layout: KvLayout, compression: Compression) -> None:
        """Wire it up; it owns the blobs of a chunk from claim to commit."""
        self._pool = pool
        self._layout = layout
        self._compression: Compression = compression

    async def handle(self, delivery: Delivery) -> Transaction:
        """Seal one chunk.

        Raises:
            WireError: The payload is not a RawChunk.
            PoolError: The pool cannot take the blob now; the delivery is tried again.
        """
        raw = _claimed(delivery)
        try:
            ref = await asyncio.to_thread(self._seal, raw)
        except (BlobError, BlobMismatchError) as error:
            # Decode computes again what it cannot read, so the request need not fail: pass the reference on.
            log.warning("raw_chunk_unusable", request_id=raw.request_id, chunk=raw.chunk_index, reason=str(error))
            ref = raw.ref
        return _passing_on(delivery, raw, ref)

    async def give_up(self, delivery: Delivery) -> Transaction | None:
        """Pass the reference on as it is, so that decode computes the chunk again and the request need not fail.

        None for what is not a RawChunk.
        """
        try:
            raw = _claimed(delivery)
        except WireError:
            return None
        return _passing_on(delivery, raw, raw.ref)

    async def settled(self, transaction: Transaction, outcome: Outcome) -> None:
        """Free what the outcome leaves without a reader."""
        raw = wire.unpack(transaction.delivery.payload, RawChunk)
        unused = [] if outcome is Outcome.FENCED else [raw.ref]  # fenced: another compressor still needs the raw blob
        # ALREADY is the answer to a commit that was sent again, and then the sealed blob is in use; or somebody else
        # did the same work, and then nobody knows of ours. It stays here either way: the sweeper finds what has no
        # owner once the request has ended.
        if outcome not in (Outcome.OK, Outcome.ALREADY):
            added = [effect for effect in transaction.effects if isinstance(effect, AddChunk)]
            passed_on = [wire.unpack(effect.ref, SealedChunk).ref for effect in added]
            unused += [ref for ref in passed_on if ref != raw.ref]
        for ref in unused:
            with suppress(KvStoreError):  # a blob that cannot be removed is the sweeper's
                await asyncio.to_thread(self._pool.release, ref.name)
        if outcome is Outcome.GONE:  # chunks that were sealed before have lost their reader
            await asyncio.to_thread(release_all, self._pool, raw.request_id, raw.attempt)

    def _seal(self, raw: RawChunk) -> BlobRef:
        with self._pool.read(raw.ref) as (header, payload):
            chunk = ChunkId(
                raw.request_id,
                raw.attempt,
                raw.chunk_index,
                raw.start_token,
                header.num_tokens,
                raw.content_address,
            )
            kv_format = KvFormat(self._layout, codec_numbered(header.codec_id), header.fingerprint)
            kv_format.check(header, BlobKind.PAGED, chunk)
            pages = pages_of(payload, self._layout, kv_format.codec, header.num_tokens)
            ref = kv_format.write_sealed(self._pool, chunk, pages, self._compression)
        faults.reach_in_thread("compressor.sealed")
        return ref


def _claimed(delivery: Delivery) -> RawChunk:
    raw = wire.unpack(delivery.payload, RawChunk)
    return raw.stamped(COMPRESSOR_CLAIMED, now_us(), delivery.consumer, raw.chunk_index)


def _passing_on(delivery: Delivery, raw: RawChunk, ref: BlobRef) -> Transaction:
    stamps = raw.stamped(SEALED, now_us(), delivery.consumer, raw.chunk_index).stamps
    sealed = SealedChunk(chunk_index=raw.chunk_index, ref=ref, content_address=raw.content_address, stamps=stamps)
    add = AddChunk(raw.chunk_index, wire.pack(sealed), substitute=ref == raw.ref)
    return Transaction(delivery, raw.request_id, raw.attempt, (add,), ack=True)
