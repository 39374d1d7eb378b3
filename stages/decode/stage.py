"""Decode as a process: admit requests that fit, step them all together, emit what each step produced.

Two tasks share the running requests. The feeder takes deliveries only while there is a slot, finds pages, loads KV.
The stepper computes; while it computes a step, the emission of the step before is on its way: one round trip a step,
never more than one in flight. A request whose emission is refused is dropped quietly: somebody else has it, or it
has ended. Owns pages from allocation to the end of a request. Knows nothing about Redis.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from pipeline.boundaries import FINISHED
from pipeline.clock import now_us
from pipeline.leases import LeaseKeeper
from pipeline.messages import PrefilledPrompt, Stamp
from pipeline.transport import Delivery, Outcome, Transaction, Transport
from stages.decode.admission import Admission
from stages.decode.request import DecodeRequest, key_of
from stages.decode.stepper import step
from stages.engine.engine import Engine

log = structlog.get_logger("decode")

_BLOCK_S = 1.0  # how long one read waits for work, or for pages; a stop or an end is noticed within it
_KEPT = (Outcome.OK, Outcome.DUPLICATE)


class DecodeStage:
    """Runs until told to stop, then finishes what it has."""

    def __init__(
        self,
        transport: Transport,
        leases: LeaseKeeper,
        engine: Engine,
        admission: Admission,
        max_num_seqs: int,
        num_speculative_tokens: int,
    ) -> None:
        """Wire it up; it owns the running requests and their pages, nothing else."""
        self._transport = transport
        self._leases = leases
        self._engine = engine
        self._admission = admission
        self._max_num_seqs = max_num_seqs
        self._num_speculative_tokens = num_speculative_tokens
        self._running: dict[str, DecodeRequest] = {}
        self._changed = asyncio.Condition()

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set and the running requests have ended."""
        async with asyncio.TaskGroup() as tasks:
            feeder = tasks.create_task(self._feed(stopping), name="feeder")
            await self._step_until(feeder, tasks)

    async def _feed(self, stopping: asyncio.Event) -> None:
        try:
            while not stopping.is_set():
                if not await self._wait_until(lambda: len(self._running) < self._max_num_seqs):
                    continue
                # One at a time: what this process cannot begin at once is better begun by another.
                for delivery in await self._transport.receive("decode", 1, _BLOCK_S):
                    self._leases.hold(delivery)
                    await self._admit(delivery, stopping)
        finally:
            async with self._changed:
                self._changed.notify_all()

    async def _admit(self, delivery: Delivery, stopping: asyncio.Event) -> None:
        message = await self._admission.open(delivery)
        if message is None:
            self._leases.drop(delivery)
            return
        pages = await self._find_pages(delivery, message, stopping)
        if pages is None:
            self._leases.drop(delivery)
            return
        try:
            request = await self._admission.admit(delivery, message, pages)
        except BaseException:
            self._engine.cache.free(pages)
            raise
        async with self._changed:
            self._running[request.key] = request
            self._changed.notify_all()

    async def _find_pages(
        self, delivery: Delivery, message: PrefilledPrompt, stopping: asyncio.Event
    ) -> list[int] | None:
        """Pages for all its tokens, or None when it was handed back, lost, or ended while it waited for them."""
        num_tokens = len(message.prompt_token_ids) + message.max_tokens
        cache = self._engine.cache
        if cache.can_allocate(num_tokens):
            return cache.allocate(num_tokens)
        while not await self._wait_until(lambda: cache.can_allocate(num_tokens)):
            # One entry ahead: it keeps its lease, and nothing more is read until it fits.
            if stopping.is_set():
                await self._transport.hand_back([delivery])
                return None
            if not self._leases.holds(delivery) or not await self._admission.is_wanted(delivery, message):
                return None
        # An end takes the chunks' references along: one not noticed here would be computed again from its prompt.
        return cache.allocate(num_tokens) if await self._admission.is_wanted(delivery, message) else None

    async def _step_until(self, feeder: asyncio.Task[None], tasks: asyncio.TaskGroup) -> None:
        emission: asyncio.Task[None] | None = None
        while not feeder.done() or self._running:
            requests = list(self._running.values())
            if not requests:
                await self._wait_until(lambda: bool(self._running) or feeder.done())
                continue
            await self._engine.compute(step, self._engine, requests, self._num_speculative_tokens)
            self._leases.progressed()
            if emission is not None:
                await emission
            emission = tasks.create_task(self._emit(await self._retire(requests)), name="emission")

    async def _retire(self, requests: Sequence[DecodeRequest]) -> list[Transaction]:
        """Transactions of a step; requests that ended with it, or were lost meanwhile, leave their pages."""
        now = Stamp(boundary=FINISHED, at_us=now_us(), by=self._transport.consumer)
        alive = [request for request in requests if request.key in self._running]
        transactions = [request.emission(now) for request in alive]
        for request in requests:
            if request.finish_reason is not None or request not in alive:
                self._running.pop(request.key, None)
                self._engine.cache.free(request.sequence.block_table)
        async with self._changed:
            self._changed.notify_all()
        return transactions

    async def _emit(self, transactions: Sequence[Transaction]) -> None:
        if not transactions:
            return
        outcomes = await self._transport.commit(transactions)
        for transaction, outcome in zip(transactions, outcomes, strict=True):
            if transaction.ack or outcome not in _KEPT:
                self._leases.drop(transaction.delivery)
            if outcome not in _KEPT and self._running.pop(key_of(transaction.delivery), None) is not None:
                log.info("request_dropped", request_id=transaction.request_id, outcome=outcome)

    async def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition over running requests and pages, at most _BLOCK_S; whether it holds."""
        try:
            async with asyncio.timeout(_BLOCK_S), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True
