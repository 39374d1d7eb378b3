"""Lets a prompt into prefill: one that can be computed here, that somebody still wants, and that has credit.

A credit is for all of a request's KV, and for one of the places that decode has. Whoever waits for one holds its entry,
and makes way for what is more urgent. Knows nothing about how prompts are computed.
"""

import asyncio

from kv_store.pool import FilePool
from pipeline.clock import monotonic_s
from pipeline.keys import RETURNED, Lane
from pipeline.leases import Leases
from pipeline.messages import Failure, TokenizedPrompt
from pipeline.transport import Delivery, Outcome, TakeCredit, Transport
from stages.common.failures import fail
from stages.common.intake import commit_one, still_wanted
from stages.common.kv_blobs import release_all
from stages.engine.kv_cache import PagedKvCache, pages_for
from stages.prefill.handover import Handover
from stages.prefill.room import DecodeRoom

_CREDIT_POLL_S = 0.05  # how often credit is asked for while there is none; an answer takes far longer
_YIELD_S = 0.25  # how often a prompt that waits for credit looks whether a more urgent one has come


class Entrance:
    """Of one prefill process."""

    def __init__(
        self,
        transport: Transport,
        leases: Leases,
        cache: PagedKvCache,
        pool: FilePool,
        handover: Handover,
        room: DecodeRoom,
        *,
        keep_kv: bool,
    ) -> None:
        """Wire it up; it owns none of these."""
        self._transport = transport
        self._leases = leases
        self._cache = cache
        self._pool = pool
        self._handover = handover
        self._room = room
        self._keep_kv = keep_kv

    async def is_open(self) -> bool:
        """Whether it makes sense to take a prompt: while no decode process is there, others may have one."""
        return await self._room.max_requests() > 0

    async def admit(
        self, delivery: Delivery, message: TokenizedPrompt, num_emitted: int, stopping: asyncio.Event
    ) -> bool:
        """Whether the prompt may be computed now; else it has failed, was handed back, or is not wanted any more."""
        failure = self._refusal(message, num_emitted, await self._room.max_pages())
        if failure is not None:
            end = fail(failure, message.stamps, delivery.consumer)
            await self._release_gone(message, await commit_one(self._transport, delivery, message, end, ack=True))
            return False
        if message.max_tokens == 1:  # it ends here, and nobody will read its KV
            return await still_wanted(self._transport, self._pool, delivery, message)
        outcome = await self._wait_for_credit(delivery, message, self._bytes_for(message, num_emitted), stopping)
        await self._release_gone(message, outcome)
        if outcome is Outcome.OK:  # what an earlier holder left of this attempt is of no use, and takes up the credit
            await asyncio.to_thread(release_all, self._pool, message.request_id, message.attempt)
        return outcome is Outcome.OK

    def _refusal(self, message: TokenizedPrompt, num_emitted: int, decode_pages: int) -> Failure | None:
        """Why this stack cannot compute the request, if so."""
        num_prompt = len(message.prompt_token_ids)
        wanted = pages_for(num_prompt + max(num_emitted - 1, 0))
        if wanted > self._cache.num_pages:
            problem = f"needs {wanted} pages of KV cache, and prefill has {self._cache.num_pages}"
            return Failure(stage="prefill", code="kv_cache_too_small", message=problem, retryable=False)
        wanted = pages_for(num_prompt + message.max_tokens)
        if message.max_tokens > 1 and wanted > decode_pages > 0:
            problem = f"needs {wanted} pages of KV cache, and the largest decode process has {decode_pages}"
            return Failure(stage="prefill", code="kv_cache_too_small", message=problem, retryable=True)  # one may come
        needed = self._bytes_for(message, num_emitted)
        if message.max_tokens > 1 and needed > self._pool.quota_bytes:
            problem = f"its KV takes {needed} bytes, and the pool has {self._pool.quota_bytes}"
            return Failure(stage="prefill", code="kv_pool_too_small", message=problem, retryable=False)
        return None

    def _bytes_for(self, message: TokenizedPrompt, num_emitted: int) -> int:
        """Most bytes of the pool that a request takes at a time: the KV of its last token is never needed."""
        num_prompt = len(message.prompt_token_ids)
        if self._keep_kv:
            return self._handover.bytes_for(num_prompt + message.max_tokens - 1, with_checkpoints=True)
        return self._handover.bytes_for(num_prompt + max(num_emitted - 1, 0), with_checkpoints=False)

    async def _wait_for_credit(
        self, delivery: Delivery, message: TokenizedPrompt, num_bytes: int, stopping: asyncio.Event
    ) -> Outcome:
        """The first answer that is not FULL; FULL where the entry was handed back, FENCED where it was lost."""
        look_at = monotonic_s() + _YIELD_S
        while True:
            max_requests = await self._room.max_requests()
            credit = TakeCredit(num_bytes, self._pool.quota_bytes, max_requests)
            outcome = await commit_one(self._transport, delivery, message, credit, ack=False)
            if outcome is not Outcome.FULL:
                return outcome
            if not self._leases.holds(delivery):
                return Outcome.FENCED
            must_leave = stopping.is_set() or max_requests == 0
            if not must_leave and monotonic_s() >= look_at:
                look_at = monotonic_s() + _YIELD_S
                must_leave = await self._should_yield(message)
            if must_leave:
                await self._transport.hand_back([delivery])
                return Outcome.FULL
            self._leases.progressed()  # waiting for others is no hang
            await asyncio.sleep(_CREDIT_POLL_S)

    async def _should_yield(self, message: TokenizedPrompt) -> bool:
        """Whether somebody waits who should be served before this one."""
        if message.num_restarts:
            return False
        lanes: tuple[Lane, ...] = (RETURNED,) if message.priority == "interactive" else (RETURNED, "interactive")
        return any([await self._transport.num_waiting("prefill", lane) > 0 for lane in lanes])

    async def _release_gone(self, message: TokenizedPrompt, outcome: Outcome) -> None:
        """Remove the blobs of a request that has ended: chunks that were sealed already have lost their reader."""
        if outcome is Outcome.GONE:
            await asyncio.to_thread(release_all, self._pool, message.request_id, message.attempt)
