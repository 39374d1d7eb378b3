"""Prefill as a process: one prompt after the other, chunk by chunk, each chunk handed on while the next one computes.

Before it computes a prompt it takes credit for all of the request's KV, and waits while there is none: work piles up
where it is cheapest, as token ids in a queue. After the last chunk it samples token 0 and commits everything at once:
the token for the reader, the last chunk, the plan that lets decode begin. A request that ends with token 0 never
reaches decode. Of one that was sent back, the output that is out already is computed along with the prompt, and nothing
is chosen again.
"""

import asyncio
from dataclasses import dataclass

import structlog

from kv_store.errors import KvStoreError, PoolFull
from kv_store.pool import FilePool
from kv_store.ref import BlobRef
from pipeline import faults, wire
from pipeline.boundaries import CHUNK_COMPUTED, FINISHED, FIRST_TOKEN, PREFILL_CLAIMED
from pipeline.clock import now_us
from pipeline.errors import ServerError, StateDamaged, WireError
from pipeline.leases import Leases
from pipeline.messages import Failure, PrefilledPrompt, Stamp, TokenizedPrompt
from pipeline.transport import Delivery, Effect, Finish, Outcome, Plan, Transport
from pipeline.worker import bury
from stages.common import results
from stages.common.chunking import chunks_of
from stages.common.draining import Drain
from stages.common.emitted import emitted_tokens
from stages.common.failures import fail
from stages.common.intake import commit_one, open_delivery
from stages.common.kv_blobs import ChunkId, release_all
from stages.common.output_text import OutputText
from stages.common.sampling_spec import end_token_ids, sampling_spec
from stages.engine import stepping
from stages.engine.engine import Engine
from stages.engine.sampling import sample
from stages.engine.sequence import EndReason, Sequence
from stages.prefill.entrance import Entrance
from stages.prefill.handover import Handover
from stages.prefill.room import DecodeRoom
from stages.text.tokenizer import Tokenizer

log = structlog.get_logger("prefill")

DRAIN_S = 5.0  # most prompts are through by then; what was computed of another one is lost
_BLOCK_S = 1.0  # how long one read waits for work; a stop is noticed within it
_CLOSED_S = 0.25  # how often it is asked whether decode is there, while it is not
_KEPT = (Outcome.OK, Outcome.DUPLICATE)


class LostRequestError(Exception):
    """The request ended or went to somebody else while it was computed: drop it quietly."""


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """What prefill may put in front of decode, and how prompts are cut.

    With keep_kv a request's blobs stay until it ends, and so does its credit.
    """

    chunk_tokens: int
    max_decode_queue: int
    keep_kv: bool = True


class PrefillStage:
    """Runs until told to stop; then it finishes the prompt it is at, or hands it back when that takes too long."""

    def __init__(
        self,
        transport: Transport,
        leases: Leases,
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
        room = DecodeRoom(transport, pool.pool_id, limits.max_decode_queue)
        self._entrance = Entrance(transport, leases, engine.cache, pool, handover, room, keep_kv=limits.keep_kv)
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
        if not await self._entrance.is_open():
            await asyncio.sleep(_CLOSED_S)
            return
        for delivery in await self._transport.receive("prefill", 1, _BLOCK_S):
            self._leases.hold(delivery)
            try:
                await self._serve(delivery, stopping)
            except LostRequestError as lost:
                log.info("request_dropped", entry_id=delivery.entry_id, outcome=str(lost))
            except StateDamaged as error:  # its lease runs out; it is buried when that does not help
                log.error("state_damaged", entry_id=delivery.entry_id, problem=str(error))  # noqa: TRY400
            except WireError as error:  # of its result stream
                failure = Failure(stage="prefill", code=error.code, message=str(error), retryable=False)
                await bury(self._transport, delivery, failure)
            finally:
                self._leases.drop(delivery)

    async def _serve(self, delivery: Delivery, stopping: asyncio.Event) -> None:
        await faults.reach("prefill.claimed")
        opened = await open_delivery(self._transport, self._pool, delivery, TokenizedPrompt)
        if opened is None:
            return
        emitted = await emitted_tokens(self._transport, opened.request_id) if opened.num_restarts else []
        if not await self._entrance.admit(delivery, opened, len(emitted), stopping):
            return
        await faults.reach("prefill.credited")
        message = opened.stamped(PREFILL_CLAIMED, now_us(), delivery.consumer)
        sequence = self._sequence(message, emitted)
        hold = _Hold(self._transport, self._leases, delivery, Drain(stopping, DRAIN_S))
        try:
            await self._compute(hold, message, sequence, emitted)
        except KvStoreError as error:
            code = "kv_pool_full" if isinstance(error, PoolFull) else "kv_pool_failed"
            failure = Failure(stage="prefill", code=code, message=str(error), retryable=error.retryable)
            effects = (fail(failure, message.stamps, delivery.consumer),)
            await self._commit(delivery, message, effects, ack=True)
        finally:
            self._engine.cache.free(sequence.block_table)

    def _sequence(self, message: TokenizedPrompt, emitted: list[int]) -> Sequence:
        """What the engine takes for a prompt: also the output that is out, but for its newest token."""
        token_ids = (*message.prompt_token_ids, *emitted[:-1])
        return Sequence(
            prompt_token_ids=token_ids,
            spec=sampling_spec(message.params),
            max_tokens=message.max_tokens,
            end_token_ids=end_token_ids(message.params, self._tokenizer.vocabulary.end_of_generation_ids),
            block_table=self._engine.cache.allocate(len(token_ids)),
        )

    async def _compute(self, hold: "_Hold", message: TokenizedPrompt, sequence: Sequence, emitted: list[int]) -> None:
        *earlier, last = chunks_of(
            message.request_id,
            message.attempt,
            sequence.prompt_token_ids,
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
                    await faults.reach("prefill.computed")
                    if message.max_tokens > 1:
                        computed = _computed(hold.delivery, chunk, now_us())
                        handovers.create_task(self._publish(hold, message, sequence, chunk, computed))
                    else:  # it ends here, and nobody will read its KV
                        await self._commit(hold.delivery, message, (), ack=False)
                    await hold.keep()
                first = await self._engine.compute(self._last_chunk, message, sequence, last, emitted)
                self._leases.progressed()
                await faults.reach("prefill.computed")
        except ExceptionGroup as group:  # whatever ends one of them ends all, and is dealt with as if it were alone
            raise _cause_of(group) from group
        await self._finish(hold, message.stamped(FIRST_TOKEN, now_us(), hold.delivery.consumer), sequence, last, first)

    def _last_chunk(
        self, message: TokenizedPrompt, sequence: Sequence, chunk: ChunkId, emitted: list[int]
    ) -> "FirstToken":
        """In the engine's thread: compute, sample token 0, and see whether the request ends with it."""
        logits = stepping.prefill_chunk(self._engine.model, self._engine.cache, sequence, chunk.num_tokens)
        if emitted:
            return FirstToken(emitted[0], (), None, "")
        token = sample(logits[0], sequence.spec, 0, sequence.history)
        reason = sequence.append(token)
        text = OutputText(self._tokenizer, message.params.stop)
        piece, stopped = text.push(token.token_id)
        reason = "stop" if stopped else reason
        effects = (results.emit(0, [token], piece),)
        return FirstToken(token.token_id, effects, reason, text.finish() if reason else "")

    async def _finish(
        self, hold: "_Hold", message: TokenizedPrompt, sequence: Sequence, last: ChunkId, first: "FirstToken"
    ) -> None:
        delivery = hold.delivery
        if first.reason is not None:
            stamps = message.stamped(FINISHED, now_us(), delivery.consumer).stamps
            end = results.finish(first.reason, first.rest, sequence, stamps)
            await self._commit(delivery, message, (*first.effects, end), ack=True)
            return
        computed = _computed(delivery, last, message.stamps[-1].at_us)
        chunk_effect, ref = await self._handover.effect(message, sequence, last, computed, hold.keep)
        await faults.reach("prefill.finishing")
        plan = self._plan(message, first.token_id, last)
        await self._commit(delivery, message, (*first.effects, chunk_effect, plan), ack=True, ref=ref)
        await faults.reach("prefill.finished")

    def _plan(self, message: TokenizedPrompt, first_token_id: int, last: ChunkId) -> Plan:
        prefilled = PrefilledPrompt(
            request_id=message.request_id,
            attempt=message.attempt,
            priority=message.priority,
            prompt_token_ids=message.prompt_token_ids,
            first_token_id=first_token_id,
            params=message.params,
            max_tokens=message.max_tokens,
            num_prefilled_tokens=last.start_token + last.num_tokens,
            num_chunks=last.index + 1,
            chunk_tokens=self._limits.chunk_tokens,
            fingerprint=self._handover.format.fingerprint,
            speculate=message.speculate,
            num_restarts=message.num_restarts,
            stamps=message.stamps,
        )
        return Plan(last.index + 1, message.priority, wire.pack(prefilled))

    async def _publish(
        self, hold: "_Hold", message: TokenizedPrompt, sequence: Sequence, chunk: ChunkId, computed: Stamp
    ) -> None:
        async with self._handing_over:
            effect, ref = await self._handover.effect(message, sequence, chunk, computed, hold.keep)
            await faults.reach("prefill.written")
            await self._commit(hold.delivery, message, (effect,), ack=False, ref=ref)
            await faults.reach("prefill.handed_over")

    async def _commit(
        self,
        delivery: Delivery,
        message: TokenizedPrompt,
        effects: tuple[Effect, ...],
        *,
        ack: bool,
        ref: BlobRef | None = None,
    ) -> None:
        outcome = await commit_one(self._transport, delivery, message, *effects, ack=ack)
        # ALREADY may be the answer to a commit that was sent again: then the blob is in use.
        if outcome not in (Outcome.OK, Outcome.ALREADY) and ref is not None:
            await self._handover.discard(ref)
        finished = outcome is Outcome.OK and any(isinstance(effect, Finish) for effect in effects)
        if finished or outcome is Outcome.GONE:  # chunks that were sealed already have lost their reader
            await asyncio.to_thread(release_all, self._pool, message.request_id, message.attempt)
        if outcome not in _KEPT:
            raise LostRequestError(outcome)


class _Hold:
    """A prompt in hand: what keeps it, and what may end that between two pieces of work."""

    def __init__(self, transport: Transport, leases: Leases, delivery: Delivery, drain: Drain) -> None:
        self.delivery = delivery
        self._transport = transport
        self._leases = leases
        self._drain = drain

    async def keep(self) -> None:
        """Note that the work moves, or waits for others, which is no hang.

        Raises:
            LostRequestError: Somebody else has it; or this process stops, and it was handed back.
        """
        self._leases.progressed()
        if not self._leases.holds(self.delivery):
            raise LostRequestError("lost its lease")
        if self._drain.is_over():
            await self._transport.hand_back([self.delivery])
            raise LostRequestError("handed back")


def _cause_of(group: ExceptionGroup[Exception]) -> Exception:
    """The one error to go by: a lost request needs nothing more, whatever else went wrong with it."""
    lost = group.subgroup(LostRequestError)
    error: Exception = group if lost is None else lost
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _computed(delivery: Delivery, chunk: ChunkId, at_us: int) -> Stamp:
    return Stamp(boundary=CHUNK_COMPUTED, at_us=at_us, by=delivery.consumer, chunk=chunk.index)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Token 0, and what there is to say of it: nothing more where it is out already.

    Attributes:
        token_id: The token.
        effects: How its readers get it.
        reason: Why the request ends with it, or None.
        rest: Text held back until that end.
    """

    token_id: int
    effects: tuple[Effect, ...]
    reason: EndReason | None
    rest: str
