"""Brings a prefilled request into the engine: its KV from the pool, its emitted tokens from the result stream.

Whoever had it before, a request goes on after the last token its readers can see. What its blobs no longer hold is
computed here, between the steps of others, or by prefill, where it is much: the bits are the same by construction.
"""

import asyncio

import structlog

from kv_store.pool import FilePool
from pipeline import counters as names
from pipeline.boundaries import DECODE_CLAIMED, KV_LOADED
from pipeline.clock import now_us
from pipeline.counters import Counters
from pipeline.leases import Leases
from pipeline.messages import Failure, PrefilledPrompt, Stamp
from pipeline.transport import Delivery, GiveCredit, Outcome, Transport
from stages.common.draining import Drain
from stages.common.emitted import emitted_tokens
from stages.common.failures import fail
from stages.common.intake import commit_one, open_delivery, still_wanted
from stages.common.kv_blobs import KvFormat, release_all
from stages.common.output_text import OutputText
from stages.common.restart import MAX_RESTARTS, send_back
from stages.common.sampling_spec import end_token_ids, sampling_spec
from stages.decode.kv_loading import KvLoader, Loaded
from stages.decode.request import DecodeRequest
from stages.engine.engine import Engine
from stages.engine.kv_cache import pages_for
from stages.engine.sequence import Sequence
from stages.engine.speculation.prompt_lookup import PromptLookup
from stages.text.tokenizer import Tokenizer

log = structlog.get_logger("decode")

MAX_RECOMPUTED_TOKENS = 512  # lost or to be replayed: a second or two between steps; prefill is there for more


class Admission:
    """Turns deliveries into running requests."""

    def __init__(
        self,
        transport: Transport,
        leases: Leases,
        engine: Engine,
        pool: FilePool,
        tokenizer: Tokenizer,
        counters: Counters,
        *,
        keep_kv: bool,
    ) -> None:
        """Wire it up; it owns none of these. With keep_kv, blobs stay until their request ends."""
        self._transport = transport
        self._engine = engine
        self._pool = pool
        self._tokenizer = tokenizer
        self._counters = counters
        self._keep_kv = keep_kv
        self._loader = KvLoader(transport, leases, engine, pool, counters)

    @property
    def format(self) -> KvFormat:
        """What blobs must agree with."""
        return self._loader.format

    async def open(self, delivery: Delivery) -> PrefilledPrompt | None:
        """The message of a delivery that can be admitted as soon as there are pages; any other ends here."""
        message = await open_delivery(self._transport, self._pool, delivery, PrefilledPrompt)
        if message is None:
            return None
        failure = self._refusal(message)
        if failure is None:
            return message if await self.is_wanted(delivery, message) else None
        stamps = message.stamped(DECODE_CLAIMED, now_us(), delivery.consumer).stamps
        outcome = await commit_one(
            self._transport, delivery, message, fail(failure, stamps, delivery.consumer), ack=True
        )
        if outcome in (Outcome.OK, Outcome.GONE):
            await self.release(message)
        return None

    async def is_wanted(self, delivery: Delivery, message: PrefilledPrompt) -> bool:
        """Whether the request is still open, and ours; one that has gone leaves no blob."""
        return await still_wanted(self._transport, self._pool, delivery, message)

    async def release(self, *messages: PrefilledPrompt) -> None:
        """Remove the blobs of requests that have ended."""
        for message in messages:
            await asyncio.to_thread(release_all, self._pool, message.request_id, message.attempt)

    def _refusal(self, message: PrefilledPrompt) -> Failure | None:
        """Why this process can never go on with the request, if so."""
        if message.fingerprint != self.format.fingerprint:
            # It waited in the queue while the stack was restarted with another model, codec or build.
            problem = "was begun by an engine that computes other bits than the one that runs now; send it again"
            return Failure(stage="decode", code="fingerprint_mismatch", message=problem, retryable=True)
        wanted = pages_for(len(message.prompt_token_ids) + message.max_tokens)
        if wanted > self._engine.cache.num_pages:  # it would wait for ever, and everybody else behind it
            problem = f"needs {wanted} pages of KV cache, and a decode process has {self._engine.cache.num_pages}"
            return Failure(stage="decode", code="kv_cache_too_small", message=problem, retryable=False)
        return None

    async def admit(
        self, delivery: Delivery, message: PrefilledPrompt, pages: list[int], drain: Drain
    ) -> DecodeRequest | None:
        """Load a request into `pages`, which it owns from now on; None, and free pages, where it does not stay."""
        claimed = Stamp(boundary=DECODE_CLAIMED, at_us=now_us(), by=delivery.consumer)
        # Also at its first delivery: one that was handed back, or was sent back to prefill, has been here before.
        output_token_ids = await emitted_tokens(self._transport, message.request_id) or [message.first_token_id]
        if delivery.tries > 1 or len(output_token_ids) > 1:
            self._counters.add(names.REQUESTS_TAKEN_OVER)
        sequence = self._sequence(message, pages, output_token_ids)
        loaded = await self._loader.load(message, sequence)
        if not await self._complete(delivery, message, loaded, sequence, drain):
            self._engine.cache.free(sequence.block_table)
            return None
        text = OutputText(self._tokenizer, message.params.stop)
        for token_id in output_token_ids:
            text.push(token_id)
        stamps = (*message.stamps, *loaded.stamps, claimed)
        stamps = (*stamps, claimed.model_copy(update={"boundary": KV_LOADED, "at_us": now_us()}))
        num_checkpoints = loaded.num_checkpoints if self._keep_kv else None
        return DecodeRequest(delivery, message, sequence, text, stamps, num_checkpoints)

    async def _complete(
        self, delivery: Delivery, message: PrefilledPrompt, loaded: Loaded, sequence: Sequence, drain: Drain
    ) -> bool:
        """Compute what the pool did not hold; False where the request goes on elsewhere, or not at all."""
        if loaded.num_missing_tokens(sequence) > MAX_RECOMPUTED_TOKENS and message.num_restarts < MAX_RESTARTS:
            await self._send_back(delivery, message)
            return False

        async def goes_on() -> bool:
            if drain.is_over():
                await self._transport.hand_back([delivery])
                return False
            return await self.is_wanted(delivery, message)

        if not await self._loader.complete(loaded, sequence, message.chunk_tokens, goes_on):
            return False
        if self._keep_kv:
            return True
        outcome = await commit_one(self._transport, delivery, message, GiveCredit(), ack=False)
        if outcome in (Outcome.OK, Outcome.GONE):
            await self.release(message)
        return outcome is Outcome.OK

    def _sequence(self, message: PrefilledPrompt, pages: list[int], output_token_ids: list[int]) -> Sequence:
        drafter = PromptLookup(message.prompt_token_ids) if message.speculate else None
        if drafter is not None:
            drafter.extend(output_token_ids)
        return Sequence(
            prompt_token_ids=message.prompt_token_ids,
            spec=sampling_spec(message.params),
            max_tokens=message.max_tokens,
            end_token_ids=end_token_ids(message.params, self._tokenizer.vocabulary.end_of_generation_ids),
            block_table=pages,
            output_token_ids=output_token_ids,
            drafter=drafter,
        )

    async def _send_back(self, delivery: Delivery, message: PrefilledPrompt) -> None:
        outcome = await commit_one(self._transport, delivery, message, send_back(message), ack=True)
        log.warning("request_sent_back", request_id=message.request_id, outcome=outcome)
        if outcome is Outcome.OK:
            self._counters.add(names.REQUESTS_SENT_BACK)
        if outcome in (Outcome.OK, Outcome.GONE):
            await self.release(message)
