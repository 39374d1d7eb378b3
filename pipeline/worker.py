"""The harness of stages that map one message to its effects: receive, handle, commit.

Owns a delivery from receive to commit, and what happens to one that cannot be handled. Knows nothing about
what a stage does. Prefill and decode have loops of their own and use `is_poison` and `bury` from here.

    receive -> tries > MAX_DELIVERIES ----------------------------------------> give up
            -> handle -> transaction -> commit -> settled
                      -> WireError -------------------------------------------> bury
                      -> an error that no retry can help ---------------------> give up
                      -> InvalidRequest --------------------------------------> the request fails, no letter
                      -> anything else: left to its lease, so that it is tried
                         again after a while, here or elsewhere; the last time -> give up
    stopping -> the item in work is finished, the others are handed back
    tries > SUSPECT_DELIVERIES -> handled alone, the others are handed back

give up = the stage may have a transaction for what it cannot do, which lets the request go on; else bury.
bury = the request ends with a Failure, and the payload is kept as a dead letter, in one transaction.
"""

import asyncio
import traceback
from collections.abc import Sequence
from typing import Protocol

import structlog

from kv_store.errors import KvStoreError
from pipeline import faults, wire
from pipeline.boundaries import CLAIMED, FINISHED
from pipeline.clock import now_us
from pipeline.errors import InvalidRequest, ServerError, SluiceError, StateDamaged, WireError
from pipeline.keys import MAX_DELIVERIES, SUSPECT_DELIVERIES
from pipeline.leases import Leases
from pipeline.messages import Failure, Stamp, Terminal
from pipeline.transport import DeadLetter, Delivery, Effect, Finish, Outcome, Transaction, Transport

BLOCK_S = 1.0  # how long one read waits for work; a stop is noticed within it
MAX_ITEMS = 8  # taken at a time: saves round trips, and little enough to leave work for other replicas

log = structlog.get_logger("worker")


class MapStage(Protocol):
    """A stage as a function of one delivery."""

    @property
    def name(self) -> str:
        """The stage's word."""
        ...

    async def handle(self, delivery: Delivery) -> Transaction:
        """Do the work and say what it changes; called again for the same entry after a crash."""
        ...

    async def give_up(self, delivery: Delivery) -> Transaction | None:
        """Say what to commit for a delivery that cannot be handled, so that its request goes on; None fails it.

        It must not do what may have taken the process down, and an unreadable payload is None.
        """
        ...

    async def settled(self, transaction: Transaction, outcome: Outcome) -> None:
        """Learn what became of the transaction, and free what it leaves without an owner."""
        ...


async def run_worker(stage: MapStage, transport: Transport, leases: Leases, stopping: asyncio.Event) -> None:
    """Serve until stopping is set; somebody else runs the keeper.

    Raises:
        ServerError: the server refuses what we do, and asking again cannot help.
    """
    worker = _Worker(stage, transport, leases, stopping)
    while not stopping.is_set():
        try:
            await worker.serve(await transport.receive(stage.name, MAX_ITEMS, BLOCK_S))
        except ServerError as error:
            if not error.retryable:
                raise
            log.warning("server_lost", problem=str(error))  # leases run out, entries come again


def is_poison(delivery: Delivery) -> bool:
    """Return whether an entry has taken down, or defeated, everyone who had it."""
    return delivery.tries > MAX_DELIVERIES


async def bury(transport: Transport, delivery: Delivery, failure: Failure) -> Outcome:
    """End the delivery's request with a failure and keep its payload as a dead letter, in one step.

    An unreadable payload names no request; then only the letter is kept.
    """
    reason = f"{failure.code}: {failure.message}"
    log.error("dead_letter", stage=delivery.stage, entry_id=delivery.entry_id, reason=reason)
    transaction = _ending(delivery, failure, DeadLetter(reason))
    if transaction is not None:
        try:
            return (await transport.commit([transaction]))[0]
        except StateDamaged as error:
            reason = f"{reason}; {error}"
    await transport.dead_letter(delivery, reason)
    return Outcome.GONE


def _ending(delivery: Delivery, failure: Failure, *more: Effect, claimed_us: int | None = None) -> Transaction | None:
    identity = wire.read_identity(delivery.payload)
    if identity is None:
        return None
    stamps = wire.read_stamps(delivery.payload)
    if claimed_us is not None and delivery.stage in CLAIMED:
        stamps += (Stamp(boundary=CLAIMED[delivery.stage], at_us=claimed_us, by=delivery.consumer),)
    stamps += (Stamp(boundary=FINISHED, at_us=now_us(), by=delivery.consumer),)
    terminal = wire.pack(Terminal(finish_reason="error", failure=failure, stamps=stamps))
    return Transaction(delivery, *identity, (Finish(terminal, "failed"), *more), ack=True)


class _Worker:
    """One stage's loop body."""

    def __init__(self, stage: MapStage, transport: Transport, leases: Leases, stopping: asyncio.Event) -> None:
        self._stage = stage
        self._transport = transport
        self._leases = leases
        self._stopping = stopping

    async def serve(self, deliveries: Sequence[Delivery]) -> None:
        """Handle deliveries one after the other; on a stop, hand back those that were not begun.

        One that may be what ended its processes is handled alone: if it is, its mates have lost no try by it.
        """
        suspect = next((delivery for delivery in deliveries if delivery.tries > SUSPECT_DELIVERIES), None)
        if suspect is not None and len(deliveries) > 1:
            await self._transport.hand_back([delivery for delivery in deliveries if delivery is not suspect])
            deliveries = [suspect]
        for delivery in deliveries:
            self._leases.hold(delivery)
        try:
            for position, delivery in enumerate(deliveries):
                if self._stopping.is_set():
                    await self._transport.hand_back(deliveries[position:])
                    return
                if self._leases.holds(delivery):  # a slow predecessor may have cost this one its lease
                    await self._serve_one(delivery)
                    self._leases.drop(delivery)
        finally:
            for delivery in deliveries:
                self._leases.drop(delivery)

    async def _serve_one(self, delivery: Delivery) -> None:
        self._leases.progressed()
        if is_poison(delivery):
            await self._give_up(delivery, "too_many_tries", f"given up after {MAX_DELIVERIES} tries")
            return
        claimed_us = now_us()
        try:
            await faults.reach(f"{self._stage.name}.claimed")
            transaction = await self._stage.handle(delivery)
            await faults.reach(f"{self._stage.name}.handled")
            await self._commit(transaction)
        except ServerError:
            raise
        except InvalidRequest as error:
            await self._refuse(delivery, error, claimed_us)
        except WireError as error:
            await self._bury(delivery, error.code, str(error))
        except Exception as error:  # noqa: BLE001 - the one place: a stage must outlive any single message
            await self._failed(delivery, error)

    async def _commit(self, transaction: Transaction) -> None:
        [outcome] = await self._transport.commit([transaction])
        await faults.reach(f"{self._stage.name}.committed")
        if outcome is not Outcome.OK:
            log.info("commit_refused", request_id=transaction.request_id, outcome=outcome)
        await self._stage.settled(transaction, outcome)

    async def _refuse(self, delivery: Delivery, error: InvalidRequest, claimed_us: int) -> None:
        failure = Failure(
            stage=self._stage.name,
            code=error.code,
            message=str(error),
            field=error.field,
            retryable=False,
        )
        transaction = _ending(delivery, failure, claimed_us=claimed_us)
        assert transaction is not None, "a stage that found a wrong field has read the message"
        try:
            [outcome] = await self._transport.commit([transaction])
        except StateDamaged as damaged:  # nothing can be committed for this request
            await self._bury(delivery, error.code, f"{error}; {damaged}")
            return
        await self._stage.settled(transaction, outcome)

    async def _failed(self, delivery: Delivery, error: Exception) -> None:
        known = isinstance(error, SluiceError | KvStoreError)
        # Of an unforeseen error not its text, which may hold a prompt; and where, without the values there.
        problem = str(error) if known else "".join(traceback.format_tb(error.__traceback__)).strip()
        log.error(
            "handling_failed",
            entry_id=delivery.entry_id,
            tries=delivery.tries,
            error=type(error).__name__,
            problem=problem,
        )
        if known and not error.retryable:
            code = error.code if isinstance(error, SluiceError) else "kv_store"
            await self._give_up(delivery, code, str(error))
        elif delivery.tries >= MAX_DELIVERIES:
            message = f"failed {delivery.tries} times, last with {type(error).__name__}"
            await self._give_up(delivery, "stage_failed", message)

    async def _give_up(self, delivery: Delivery, code: str, message: str) -> None:
        try:
            transaction = await self._stage.give_up(delivery)
            if transaction is not None:
                log.error("given_up", entry_id=delivery.entry_id, request_id=transaction.request_id, reason=code)
                await self._commit(transaction)
                return
        except StateDamaged as error:  # nothing can be committed for this request
            message = f"{message}; {error}"
        await self._bury(delivery, code, message)

    async def _bury(self, delivery: Delivery, code: str, message: str) -> None:
        failure = Failure(stage=self._stage.name, code=code, message=message, retryable=False)
        await bury(self._transport, delivery, failure)
