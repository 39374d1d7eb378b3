"""Decode as a process: admit requests that fit, step them all together, emit what each step produced.

Two tasks share the running requests. The feeder takes deliveries only while there is a slot, finds pages, loads KV.
The stepper computes; while it computes a step, the emission of the step before is on its way: one round trip a step,
never more than one in flight. A request whose emission is refused is dropped quietly: somebody else has it, or it
has ended. Owns pages from allocation to the end of a request. Knows nothing about Redis.

Told to stop, it goes on for DRAIN_S with what it has, and hands the rest over: whoever takes that finds its KV in the
pool and its tokens in the result stream.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from pipeline import counters as names
from pipeline import faults
from pipeline.boundaries import FINISHED
from pipeline.clock import now_us
from pipeline.counters import Counters
from pipeline.errors import ServerError, StateDamaged, WireError
from pipeline.keys import SUSPECT_DELIVERIES
from pipeline.leases import Leases
from pipeline.messages import Failure, PrefilledPrompt, Stamp
from pipeline.transport import Delivery, Outcome, Transaction, Transport
from pipeline.worker import bury
from stages.common.draining import Drain
from stages.decode.admission import Admission
from stages.decode.checkpoints import Checkpoints
from stages.decode.request import DecodeRequest, key_of
from stages.decode.stepper import step
from stages.engine.engine import Engine

log = structlog.get_logger("decode")

DRAIN_S = 5.0  # most answers that are nearly done get done; a handed-over one costs less than a second
_BLOCK_S = 1.0  # how long one read waits for work, or for pages; a stop or an end is noticed within it
_KEPT = (Outcome.OK, Outcome.DUPLICATE)
_OVER = (Outcome.GONE, Outcome.ALREADY)


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """How many requests are stepped at a time, and how many tokens a drafter may propose for each."""

    max_num_seqs: int
    num_speculative_tokens: int


class DecodeStage:
    """Runs until told to stop."""

    def __init__(
        self,
        transport: Transport,
        leases: Leases,
        engine: Engine,
        admission: Admission,
        checkpoints: Checkpoints,
        counters: Counters,
        limits: DecodeLimits,
    ) -> None:
        """Wire it up; it owns the running requests and their pages, nothing else."""
        self._transport = transport
        self._leases = leases
        self._engine = engine
        self._admission = admission
        self._checkpoints = checkpoints
        self._counters = counters
        self._limits = limits
        self._running: dict[str, DecodeRequest] = {}
        self._changed = asyncio.Condition()

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set and the running requests have ended, or were handed over."""
        async with asyncio.TaskGroup() as tasks:
            drain = Drain(stopping, DRAIN_S)
            feeder = tasks.create_task(self._feed(stopping, drain), name="feeder")
            await self._step_until(feeder, drain, tasks)

    # Taking requests

    async def _feed(self, stopping: asyncio.Event, drain: Drain) -> None:
        try:
            while not stopping.is_set():
                try:
                    await self._feed_one(stopping, drain)
                except ServerError as error:
                    if not error.retryable:
                        raise
                    log.warning("server_lost", problem=str(error))  # leases run out, entries come again
        finally:
            await self._notify()

    async def _feed_one(self, stopping: asyncio.Event, drain: Drain) -> None:
        if not await self._wait_until(lambda: len(self._running) < self._limits.max_num_seqs):
            return
        # One at a time: what this process cannot begin at once is better begun by another.
        for delivery in await self._transport.receive("decode", 1, _BLOCK_S):
            self._leases.hold(delivery)
            request = None
            try:
                request = await self._admit(delivery, stopping, drain)
            except StateDamaged as error:  # its lease runs out; it is buried when that does not help
                log.error("state_damaged", entry_id=delivery.entry_id, problem=str(error))  # noqa: TRY400
            except WireError as error:  # of its result stream
                failure = Failure(stage="decode", code=error.code, message=str(error), retryable=False)
                await bury(self._transport, delivery, failure)
            finally:
                if request is None:
                    self._leases.drop(delivery)

    async def _admit(self, delivery: Delivery, stopping: asyncio.Event, drain: Drain) -> DecodeRequest | None:
        await faults.reach("decode.claimed")
        message = await self._admission.open(delivery)
        if message is None:
            return None
        suspect = delivery.tries > SUSPECT_DELIVERIES  # each time nobody lived to emit a token of it
        if suspect and not await self._hold_until(lambda: not self._running, delivery, message, stopping):
            return None
        pages = await self._find_pages(delivery, message, stopping)
        if pages is None:
            return None
        try:
            request = await self._admission.admit(delivery, message, pages, drain)
        except BaseException:
            self._engine.cache.free(pages)
            raise
        if request is None:
            return None
        await faults.reach("decode.loaded")
        self._running[request.key] = request
        await self._notify()
        while suspect and request.key in self._running and not request.has_moved:
            await self._wait_until(lambda: request.has_moved or request.key not in self._running)
        return request

    async def _find_pages(
        self, delivery: Delivery, message: PrefilledPrompt, stopping: asyncio.Event
    ) -> list[int] | None:
        """Pages for all its tokens, or None when it was handed back, lost, or ended while it waited for them."""
        num_tokens = len(message.prompt_token_ids) + message.max_tokens
        cache = self._engine.cache
        if not await self._hold_until(lambda: cache.can_allocate(num_tokens), delivery, message, stopping):
            return None
        return cache.allocate(num_tokens)

    async def _hold_until(
        self, condition: Callable[[], bool], delivery: Delivery, message: PrefilledPrompt, stopping: asyncio.Event
    ) -> bool:
        """Keep an entry until a condition holds; False when it was handed back, lost, or ended meanwhile.

        One entry ahead: it keeps its lease, and nothing more is read until it fits.
        """
        if condition():
            return True
        while not await self._wait_until(condition):
            if stopping.is_set() or await self._should_yield(message):
                await self._transport.hand_back([delivery])
                return False
            if not self._leases.holds(delivery) or not await self._admission.is_wanted(delivery, message):
                return False
        # An end takes the chunks' references along: one not noticed here would be computed again from its prompt.
        return await self._admission.is_wanted(delivery, message)

    async def _should_yield(self, message: PrefilledPrompt) -> bool:
        """Whether a more urgent request waits behind one that waits."""
        return message.priority == "batch" and await self._transport.num_waiting("decode", "interactive") > 0

    # Stepping

    async def _step_until(self, feeder: asyncio.Task[None], drain: Drain, tasks: asyncio.TaskGroup) -> None:
        emission: asyncio.Task[None] | None = None
        while not feeder.done() or self._running:
            if drain.is_over() and feeder.done():
                break
            requests = list(self._running.values())
            if not requests:
                await self._wait_until(lambda: bool(self._running) or feeder.done())
                continue
            await self._engine.compute(
                step, self._engine, requests, self._limits.num_speculative_tokens, self._checkpoints
            )
            self._leases.progressed()
            if emission is not None:
                await emission
            emission = tasks.create_task(self._emit(await self._retire(requests)), name="emission")
        if emission is not None:
            await emission
        await self._hand_over()

    async def _retire(self, requests: Sequence[DecodeRequest]) -> list[tuple[Transaction, PrefilledPrompt]]:
        """Transactions of a step; requests that ended with it, or were lost meanwhile, leave their pages."""
        now = Stamp(boundary=FINISHED, at_us=now_us(), by=self._transport.consumer)
        alive = {request.key for request in requests if request.key in self._running}
        emissions = [(request.emission(now), request.message) for request in requests if request.key in alive]
        over = [request for request in requests if request.finish_reason is not None or request.key not in alive]
        for request in over:
            self._running.pop(request.key, None)
            self._engine.cache.free(request.sequence.block_table)
        if over:
            await self._notify()
        return emissions

    async def _emit(self, emissions: Sequence[tuple[Transaction, PrefilledPrompt]]) -> None:
        if not emissions:
            return
        await faults.reach("decode.emitting")
        outcomes = await self._commit([transaction for transaction, _ in emissions])
        await faults.reach("decode.emitted")
        over: list[PrefilledPrompt] = []
        has_changed = False
        for (transaction, message), outcome in zip(emissions, outcomes, strict=True):
            key = key_of(transaction.delivery)
            if outcome in _KEPT and not transaction.ack:
                if key in self._running and not self._running[key].has_moved:
                    self._running[key].has_moved = has_changed = True
                continue
            has_changed = True
            self._leases.drop(transaction.delivery)
            if outcome in _OVER or outcome in _KEPT:
                over.append(message)
            if outcome not in _KEPT and self._running.pop(key, None) is not None:
                if outcome is Outcome.FENCED:  # else it was cancelled, which is nothing rare
                    self._counters.add(names.COMMITS_REFUSED)
                log.info("request_dropped", request_id=transaction.request_id, outcome=outcome)
        if has_changed:
            await self._notify()
        await self._admission.release(*over)

    async def _commit(self, transactions: Sequence[Transaction]) -> Sequence[Outcome]:
        """Outcomes; FENCED also where nobody knows what happened: the lease runs out, and whoever takes it sees."""
        try:
            return await self._transport.commit(transactions)
        except StateDamaged as error:
            log.error("state_damaged", problem=str(error))  # noqa: TRY400
            return [Outcome(word) if word else Outcome.FENCED for word in error.outcomes]
        except ServerError as error:
            if not error.retryable:
                raise
            log.warning("server_lost", problem=str(error), num_requests=len(transactions))
            return [Outcome.FENCED] * len(transactions)

    async def _hand_over(self) -> None:
        """Give up what is not finished: others go on with it at once."""
        requests = list(self._running.values())
        self._running.clear()
        for request in requests:
            self._leases.drop(request.delivery)
            self._engine.cache.free(request.sequence.block_table)
        if not requests:
            return
        log.info("handed_over", num_requests=len(requests))
        try:
            await self._transport.hand_back([request.delivery for request in requests])
        except ServerError as error:
            log.warning("not_handed_over", problem=str(error))  # their leases run out

    async def _notify(self) -> None:
        """Let those look again who wait for a condition; not after each step, because most change none."""
        async with self._changed:
            self._changed.notify_all()

    async def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition over running requests and pages, at most _BLOCK_S; whether it holds."""
        try:
            async with asyncio.timeout(_BLOCK_S), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True
