"""Prefill as a process: one prompt after the other, chunk by chunk, each chunk handed on while the next one computes.

Before it takes a prompt it waits until decode has caught up and the pool has room: work piles up where it is cheapest,
as token ids in a queue. After the last chunk it samples token 0 and commits everything at once: the token for the
reader, the last chunk, the plan that lets decode begin. A request that ends with token 0 never reaches decode.
"""

import asyncio
from dataclasses import dataclass

import structlog

from kv_store.errors import PoolFull
from kv_store.pool import FilePool
from kv_store.ref import BlobRef
from pipeline import wire
from pipeline.boundaries import CHUNK_COMPUTED, FINISHED, FIRST_TOKEN, PREFILL_CLAIMED
from pipeline.clock import monotonic_s, now_us
from pipeline.errors import ServerError
from pipeline.keys import PRIORITIES
from pipeline.leases import LeaseKeeper
from pipeline.messages import Failure, PrefilledPrompt, Stamp, TokenizedPrompt
from pipeline.transport import Delivery, Effect, Emit, Finish, Outcome, Plan, Transaction, Transport
from stages.common import results
from stages.common.chunking import chunks_of
from stages.common.failures import fail
from stages.common.intake import open_delivery, still_wanted
from stages.common.kv_blobs import ChunkId, release_all
from stages.common.output_text import OutputText
from stages.common.sampling_spec import end_token_ids, sampling_spec
from stages.engine import stepping
from stages.engine.engine import Engine
from stages.engine.sampling import SampledToken, sample
from stages.engine.sequence import EndReason, Sequence
from stages.prefill.handover import Handover
from stages.text.tokenizer import Tokenizer

log = structlog.get_logger("prefill")

_BLOCK_S = 1.0  # how long one read waits for work; a stop is noticed within it
_ROOM_POLL_S = 0.01  # how often decode's queue and the pool are looked at while they are full
_ASK_S = 1.0  # how often it is asked whether a prompt that waits for room is still wanted
_KEPT = (Outcome.OK, Outcome.DUPLICATE)


class LostRequestError(Exception):
    """The request ended or went to somebody else while it was computed: drop it quietly."""


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """What prefill may put in front of decode, and how prompts are cut."""

    chunk_tokens: int
    max_decode_queue: int


class PrefillStage:
    """Runs until told to stop, then finishes the prompt it is at."""

    def __init__(
        self,
        transport: Transport,
        leases: LeaseKeeper,
        engine: Engine,
        pool: FilePool,
        tokenizer: Tokenizer,
        handover: Handover,
        limits: PrefillLimits,
    ) -> None:
        """Wire it up; it owns the pages of the prompt it computes, nothing else."""
        self._transport = transport
        self._leases = leases
        self._engine = engine
        self._pool = pool
        self._tokenizer = tokenizer
        self._handover = handover
        self._limits = limits
        self._handing_over = asyncio.Lock()  # one chunk at a time, so that they leave in order

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set."""
        while not stopping.is_set():
            try:
                await self._serve_next(stopping)
            except ServerError as error:
                if not error.retryable:
                    raise
                log.warning("server_lost", problem=str(error))  # leases run out, entries come again

    async def _serve_next(self, stopping: asyncio.Event) -> None:
        if not await self._has_room():
            await asyncio.sleep(_ROOM_POLL_S)
            return
        for delivery in await self._transport.receive("prefill", 1, _BLOCK_S):
            self._leases.hold(delivery)
            try:
                await self._serve(delivery, stopping)
            finally:
                self._leases.drop(delivery)

    async def _has_room(self) -> bool:
        """Whether decode has caught up and the pool could take another chunk."""
        lengths = [await self._transport.queue_length("decode", priority) for priority in PRIORITIES]
        room = self._pool.free_bytes() >= self._handover.room_bytes
        return room and sum(lengths) < self._limits.max_decode_queue

    async def _serve(self, delivery: Delivery, stopping: asyncio.Event) -> None:
        opened = await open_delivery(self._transport, self._pool, delivery, TokenizedPrompt)
        if opened is None or not await self._is_open(delivery, opened):
            return
        if opened.max_tokens > 1 and not await self._wait_for_pool(delivery, opened, stopping):
            return
        message = opened.stamped(PREFILL_CLAIMED, now_us(), delivery.consumer)
        sequence = self._sequence(message)
        try:
            await self._compute(delivery, message, sequence)
        except LostRequestError as lost:
            log.info("request_dropped", request_id=message.request_id, outcome=str(lost))
        except PoolFull as error:
            failure = Failure(stage="prefill", code="kv_pool_full", message=str(error), retryable=True)
            effects = (fail(failure, message.stamps, delivery.consumer),)
            await self._commit(delivery, message, effects, ack=True)
        finally:
            self._engine.cache.free(sequence.block_table)

    async def _is_open(self, delivery: Delivery, message: TokenizedPrompt) -> bool:
        """Whether anybody still wants it, before it takes long to compute."""
        return await still_wanted(self._transport, self._pool, delivery, message)

    async def _wait_for_pool(self, delivery: Delivery, message: TokenizedPrompt, stopping: asyncio.Event) -> bool:
        """Wait until the pool has room for the whole prompt: half a prompt in a full pool helps nobody."""
        needed = self._handover.bytes_for(len(message.prompt_token_ids))
        if needed > self._pool.quota_bytes:
            problem = f"the KV of its prompt takes {needed} bytes, and the pool has {self._pool.quota_bytes}"
            failure = Failure(stage="prefill", code="kv_pool_too_small", message=problem, retryable=False)
            await self._commit(delivery, message, (fail(failure, message.stamps, delivery.consumer),), ack=True)
            return False
        asked_at = monotonic_s()
        while self._pool.free_bytes() < needed:
            if stopping.is_set():
                await self._transport.hand_back([delivery])
                return False
            if not self._leases.holds(delivery):
                return False
            if monotonic_s() - asked_at >= _ASK_S:
                if not await self._is_open(delivery, message):
                    return False
                asked_at = monotonic_s()
            self._leases.progressed()  # waiting for others is no hang
            await asyncio.sleep(_ROOM_POLL_S)
        return True

    def _sequence(self, message: TokenizedPrompt) -> Sequence:
        return Sequence(
            prompt_token_ids=message.prompt_token_ids,
            spec=sampling_spec(message.params),
            max_tokens=message.max_tokens,
            end_token_ids=end_token_ids(message.params, self._tokenizer.vocabulary.end_of_generation_ids),
            block_table=self._engine.cache.allocate(len(message.prompt_token_ids)),
        )

    async def _compute(self, delivery: Delivery, message: TokenizedPrompt, sequence: Sequence) -> None:
        *earlier, last = chunks_of(
            message.request_id,
            message.attempt,
            message.prompt_token_ids,
            self._limits.chunk_tokens,
            self._handover.format.fingerprint,
        )
        try:
            async with asyncio.TaskGroup() as handovers:
                for chunk in earlier:
                    await self._engine.compute(
                        stepping.prefill_chunk,
                        self._engine.model,
                        self._engine.cache,
                        sequence,
                        chunk.num_tokens,
                    )
                    self._leases.progressed()
                    if message.max_tokens > 1:  # else it ends here, and nobody will read its KV
                        computed = _computed(delivery, chunk, now_us())
                        handovers.create_task(self._publish(delivery, message, sequence, chunk, computed))
                token, text, reason = await self._engine.compute(self._last_chunk, message, sequence, last)
                self._leases.progressed()
        except* LostRequestError as lost:
            raise LostRequestError(str(lost.exceptions[0])) from lost
        except* PoolFull as full:
            raise full.exceptions[0] from full
        message = message.stamped(FIRST_TOKEN, now_us(), delivery.consumer)
        await self._finish(delivery, message, sequence, last, results.emit(0, [token], text.first), text, reason)

    def _last_chunk(
        self, message: TokenizedPrompt, sequence: Sequence, chunk: ChunkId
    ) -> "tuple[SampledToken, FirstText, EndReason | None]":
        """In the engine's thread: compute, sample token 0, and see whether the request ends with it."""
        logits = stepping.prefill_chunk(self._engine.model, self._engine.cache, sequence, chunk.num_tokens)
        token = sample(logits[0], sequence.spec, 0, sequence.history)
        reason = sequence.append(token)
        text = OutputText(self._tokenizer, message.params.stop)
        piece, stopped = text.push(token.token_id)
        return token, FirstText(piece, text), "stop" if stopped else reason

    async def _finish(
        self,
        delivery: Delivery,
        message: TokenizedPrompt,
        sequence: Sequence,
        last: ChunkId,
        first_token: Emit,
        text: "FirstText",
        reason: EndReason | None,
    ) -> None:
        if reason is not None:
            stamps = message.stamped(FINISHED, now_us(), delivery.consumer).stamps
            end = results.finish(reason, text.rest.finish(), sequence, stamps)
            await self._commit(delivery, message, (first_token, end), ack=True)
            return
        computed = _computed(delivery, last, message.stamps[-1].at_us)
        chunk_effect, ref = await self._handover.effect(message, sequence, last, computed)
        plan = self._plan(message, sequence, last.index + 1)
        await self._commit(delivery, message, (first_token, chunk_effect, plan), ack=True, ref=ref)

    def _plan(self, message: TokenizedPrompt, sequence: Sequence, num_chunks: int) -> Plan:
        prefilled = PrefilledPrompt(
            request_id=message.request_id,
            attempt=message.attempt,
            priority=message.priority,
            prompt_token_ids=message.prompt_token_ids,
            first_token_id=sequence.output_token_ids[0],
            params=message.params,
            max_tokens=message.max_tokens,
            num_chunks=num_chunks,
            chunk_tokens=self._limits.chunk_tokens,
            fingerprint=self._handover.format.fingerprint,
            speculate=message.speculate,
            stamps=message.stamps,
        )
        return Plan(num_chunks, message.priority, wire.pack(prefilled))

    async def _publish(
        self, delivery: Delivery, message: TokenizedPrompt, sequence: Sequence, chunk: ChunkId, computed: Stamp
    ) -> None:
        async with self._handing_over:
            effect, ref = await self._handover.effect(message, sequence, chunk, computed)
            await self._commit(delivery, message, (effect,), ack=False, ref=ref)

    async def _commit(
        self,
        delivery: Delivery,
        message: TokenizedPrompt,
        effects: tuple[Effect, ...],
        *,
        ack: bool,
        ref: BlobRef | None = None,
    ) -> None:
        transaction = Transaction(delivery, message.request_id, message.attempt, effects, ack)
        [outcome] = await self._transport.commit([transaction])
        # ALREADY may be the answer to a commit that was sent again: then the blob is in use.
        if outcome not in (Outcome.OK, Outcome.ALREADY) and ref is not None:
            await self._handover.discard(ref)
        finished = outcome is Outcome.OK and any(isinstance(effect, Finish) for effect in effects)
        if finished or outcome is Outcome.GONE:  # chunks that were sealed already have lost their reader
            await asyncio.to_thread(release_all, self._pool, message.request_id, message.attempt)
        if outcome not in _KEPT:
            raise LostRequestError(outcome)


def _computed(delivery: Delivery, chunk: ChunkId, at_us: int) -> Stamp:
    return Stamp(boundary=CHUNK_COMPUTED, at_us=at_us, by=delivery.consumer, chunk=chunk.index)


@dataclass(frozen=True, slots=True)
class FirstText:
    """What token 0 completed, and the text object that holds the rest."""

    first: str
    rest: OutputText
