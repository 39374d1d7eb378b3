"""What decode writes back, so that whoever takes a request over after a crash need not compute it all again.

Whenever a request has filled another chunk's worth of pages, they are sealed into the pool, and their reference goes
out with the tokens of the same step. Written in the engine's thread, between steps: then nothing else writes to the
pages, or gives them to another request. A checkpoint is a convenience: where the pool has no room for one, the request
goes on without.
"""

import structlog

from kv_store.blob import Compression
from kv_store.errors import KvStoreError
from kv_store.pool import FilePool
from pipeline import faults, wire
from pipeline.boundaries import SEALED
from pipeline.clock import now_us
from pipeline.messages import PrefilledPrompt, SealedChunk, Stamp
from pipeline.transport import AddChunk
from stages.common.chunking import checkpoint_start, deep_chunk
from stages.common.kv_blobs import ChunkId, KvFormat
from stages.decode.request import DecodeRequest
from stages.engine.engine import Engine
from stages.engine.sequence import Sequence

log = structlog.get_logger("decode")


class Checkpoints:
    """Writes them for one decode process."""

    def __init__(self, engine: Engine, pool: FilePool, kv_format: KvFormat, compression: Compression) -> None:
        """Wire it up; a blob belongs to its request from the moment it is written."""
        self._engine = engine
        self._pool = pool
        self._format = kv_format
        self._compression: Compression = compression

    def write_due(self, request: DecodeRequest) -> None:
        """Write the request's next checkpoint if its pages are full; call it in the engine's thread."""
        number, message, sequence = request.num_checkpoints, request.message, request.sequence
        if number is None:
            return
        chunk = checkpoint_of(message, number, sequence, sequence.num_computed_tokens, self._format.fingerprint)
        if chunk is None:
            return
        pages = self._engine.cache.pages_of(sequence.block_table, chunk.start_token, chunk.num_tokens)
        try:
            ref = self._format.write_sealed(self._pool, chunk, pages, self._compression)
        except KvStoreError as error:
            log.info("checkpoint_skipped", request_id=message.request_id, reason=str(error))
            request.num_checkpoints = None
            return
        stamp = Stamp(boundary=SEALED, at_us=now_us(), by=request.delivery.consumer, chunk=chunk.index)
        sealed = SealedChunk(chunk_index=chunk.index, ref=ref, content_address=chunk.content_address, stamps=(stamp,))
        request.add_checkpoint(AddChunk(chunk.index, wire.pack(sealed)))
        faults.reach_in_thread("decode.checkpointed")


def checkpoint_of(
    message: PrefilledPrompt, number: int, sequence: Sequence, num_tokens: int, fingerprint: bytes
) -> ChunkId | None:
    """A request's checkpoint `number`, counted from 0; None while the first num_tokens tokens do not fill it."""
    start = checkpoint_start(message.num_prefilled_tokens, number, message.chunk_tokens)
    end = start + message.chunk_tokens
    if end > num_tokens:
        return None
    index = message.num_chunks + number
    return deep_chunk(message.request_id, message.attempt, index, start, sequence.token_ids(0, end), fingerprint)
