"""Brings a prefilled request into the engine: its KV from the pool, its emitted tokens from the result stream.

A blob that is missing or damaged is computed again here, from the prompt: the bits are the same by construction, and
it is counted. A request that somebody else began is continued after the last token its readers can see.
"""

import asyncio
from collections.abc import Sequence as Tokens

import structlog

from kv_store.errors import KvStoreError
from kv_store.packing import PayloadSizeError
from kv_store.pool import FilePool
from pipeline import wire
from pipeline.boundaries import DECODE_CLAIMED, KV_LOADED
from pipeline.clock import now_us
from pipeline.errors import UnknownRequest
from pipeline.leases import LeaseKeeper
from pipeline.messages import Delta, Failure, PrefilledPrompt, SealedChunk, Stamp
from pipeline.transport import Delivery, Outcome, Transaction, Transport
from stages.common.chunking import chunks_of
from stages.common.failures import fail
from stages.common.intake import open_delivery, still_wanted
from stages.common.kv_blobs import BlobMismatchError, ChunkId, KvFormat, release_all
from stages.common.output_text import OutputText
from stages.common.sampling_spec import end_token_ids, sampling_spec
from stages.decode.request import DecodeRequest
from stages.engine import stepping
from stages.engine.engine import Engine
from stages.engine.kv_cache import pages_for
from stages.engine.sequence import Sequence
from stages.engine.speculation.prompt_lookup import PromptLookup
from stages.text.tokenizer import Tokenizer

log = structlog.get_logger("decode")

_UNUSABLE = (KvStoreError, BlobMismatchError, PayloadSizeError)


class Admission:
    """Turns deliveries into running requests."""

    def __init__(
        self, transport: Transport, leases: LeaseKeeper, engine: Engine, pool: FilePool, tokenizer: Tokenizer
    ) -> None:
        """Wire it up; it owns none of these."""
        self._leases = leases
        self._transport = transport
        self._engine = engine
        self._pool = pool
        self._tokenizer = tokenizer
        self._format = KvFormat(engine.config.kv_layout, engine.codec, engine.fingerprint.digest())

    async def open(self, delivery: Delivery) -> PrefilledPrompt | None:
        """The message of a delivery that can be admitted as soon as there are pages; any other ends here."""
        message = await open_delivery(self._transport, self._pool, delivery, PrefilledPrompt)
        if message is None:
            return None
        failure = self._refusal(message)
        if failure is None:
            return message if await self.is_wanted(delivery, message) else None
        stamps = message.stamped(DECODE_CLAIMED, now_us(), delivery.consumer).stamps
        effects = (fail(failure, stamps, delivery.consumer),)
        [outcome] = await self._transport.commit(
            [Transaction(delivery, message.request_id, message.attempt, effects, ack=True)]
        )
        if outcome in (Outcome.OK, Outcome.GONE):
            await asyncio.to_thread(release_all, self._pool, message.request_id, message.attempt)
        return None

    async def is_wanted(self, delivery: Delivery, message: PrefilledPrompt) -> bool:
        """Whether the request is still open, and ours; one that has gone leaves no blob."""
        return await still_wanted(self._transport, self._pool, delivery, message)

    def _refusal(self, message: PrefilledPrompt) -> Failure | None:
        """Why this process can never go on with the request, if so."""
        if message.fingerprint != self._format.fingerprint:
            # It waited in the queue while the stack was restarted with another model, codec or build.
            problem = "was begun by an engine that computes other bits than the one that runs now; send it again"
            return Failure(stage="decode", code="fingerprint_mismatch", message=problem, retryable=True)
        wanted = pages_for(len(message.prompt_token_ids) + message.max_tokens)
        if wanted > self._engine.cache.num_pages:  # it would wait for ever, and everybody else behind it
            problem = f"needs {wanted} pages of KV cache, and a decode process has {self._engine.cache.num_pages}"
            return Failure(stage="decode", code="kv_cache_too_small", message=problem, retryable=False)
        return None

    async def admit(self, delivery: Delivery, message: PrefilledPrompt, pages: list[int]) -> DecodeRequest:
        """Load a request into `pages`, which it owns from now on."""
        claimed = Stamp(boundary=DECODE_CLAIMED, at_us=now_us(), by=delivery.consumer)
        output_token_ids = [message.first_token_id]
        if delivery.tries > 1:
            output_token_ids = await self._emitted(message) or output_token_ids
        sequence = self._sequence(message, pages)
        chunk_stamps = await self._load(message, sequence)
        await self._replay(sequence, output_token_ids, message.chunk_tokens)
        text = OutputText(self._tokenizer, message.params.stop)
        for token_id in output_token_ids:
            text.push(token_id)
        loaded = claimed.model_copy(update={"boundary": KV_LOADED, "at_us": now_us()})
        stamps = (*message.stamps, *chunk_stamps, claimed, loaded)
        return DecodeRequest(delivery, message, sequence, text, stamps)

    def _sequence(self, message: PrefilledPrompt, pages: list[int]) -> Sequence:
        vocabulary = self._tokenizer.vocabulary
        return Sequence(
            prompt_token_ids=message.prompt_token_ids,
            spec=sampling_spec(message.params),
            max_tokens=message.max_tokens,
            end_token_ids=end_token_ids(message.params, vocabulary.end_of_generation_ids),
            block_table=pages,
            drafter=PromptLookup(message.prompt_token_ids) if message.speculate else None,
        )

    async def _emitted(self, message: PrefilledPrompt) -> list[int]:
        """Tokens that readers can already see."""
        token_ids: list[int] = []
        while True:
            try:
                entries = await self._transport.read_results(message.request_id, len(token_ids), 0)
            except UnknownRequest:  # taken back a moment ago; the next commit is told
                return token_ids
            deltas = [wire.unpack(entry.data, Delta) for entry in entries if entry.offset is not None]
            if not deltas:
                return token_ids
            for delta in deltas:
                token_ids.extend(delta.token_ids)

    async def _load(self, message: PrefilledPrompt, sequence: Sequence) -> tuple[Stamp, ...]:
        """Copy the chunks into the sequence's pages; what cannot be used is computed."""
        stored = await self._transport.chunks(message.request_id, message.attempt)
        chunks = chunks_of(
            message.request_id,
            message.attempt,
            message.prompt_token_ids,
            message.chunk_tokens,
            self._format.fingerprint,
        )
        stamps: list[Stamp] = []
        usable = True
        for chunk in chunks:
            if chunk.index not in stored:
                usable = False
                continue
            sealed = wire.unpack(stored[chunk.index], SealedChunk)
            stamps.extend(sealed.stamps)
            usable = usable and await self._load_chunk(sequence, chunk, sealed)
        # The chunks are in the pages or will be computed: either way nobody needs the blobs any more.
        await asyncio.to_thread(release_all, self._pool, message.request_id, message.attempt)
        await self._compute_rest(sequence, message.chunk_tokens)
        return tuple(stamps)

    async def _load_chunk(self, sequence: Sequence, chunk: ChunkId, sealed: SealedChunk) -> bool:
        first = pages_for(chunk.start_token)
        indices = sequence.block_table[first : first + pages_for(chunk.num_tokens)]
        pages = [self._engine.cache.page(index) for index in indices]
        try:
            await asyncio.to_thread(self._format.read_sealed, self._pool, sealed.ref, chunk, pages)
        except _UNUSABLE as error:
            log.warning("kv_unusable", request_id=chunk.request_id, chunk=chunk.index, reason=str(error))
            return False
        sequence.num_computed_tokens += chunk.num_tokens
        return True

    async def _compute_rest(self, sequence: Sequence, chunk_tokens: int) -> None:
        missing = len(sequence.prompt_token_ids) - sequence.num_computed_tokens
        if missing:
            log.warning("kv_recomputed", num_tokens=missing)
        while sequence.num_computed_tokens < len(sequence.prompt_token_ids):
            await self._engine.compute(
                stepping.prefill_chunk, self._engine.model, self._engine.cache, sequence, chunk_tokens
            )
            self._leases.progressed()

    async def _replay(self, sequence: Sequence, output_token_ids: Tokens[int], chunk_tokens: int) -> None:
        """Compute the KV of all emitted tokens but the newest, which the next step computes."""
        sequence.output_token_ids.extend(output_token_ids)
        if sequence.drafter is not None:
            sequence.drafter.extend(output_token_ids)
        while sequence.num_computed_tokens < sequence.num_tokens - 1:
            await self._engine.compute(stepping.replay, self._engine.model, self._engine.cache, sequence, chunk_tokens)
            self._leases.progressed()
