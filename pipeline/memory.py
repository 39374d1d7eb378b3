"""The transport inside one process.

Owns waiting: one condition wakes everybody when anything has changed. Knows nothing about the rules, which
are memory_broker.py's. Transports that share a broker are consumers of the same queues.
"""

import asyncio
from collections.abc import Sequence

from pipeline.clock import Monotonic, monotonic_s
from pipeline.errors import UnknownRequest
from pipeline.keys import ADMIT_RETRY_S, SWEEPS_PER_LEASE, Keys, Lane, Priority
from pipeline.memory_broker import MemoryBroker
from pipeline.transport import (
    END_STATES,
    Accepted,
    Admission,
    Busy,
    Delivery,
    Exists,
    Finish,
    FinishedRequest,
    Outcome,
    Process,
    ResultEntry,
    Transaction,
    TransportOptions,
)

MAX_WAIT_S = 1.0  # leases end without anybody telling


class MemoryQueues:
    """A broker and the condition that goes with it."""

    def __init__(self, keys: Keys | None = None, monotonic: Monotonic = monotonic_s) -> None:
        self.broker = MemoryBroker(keys or Keys(), monotonic)
        self.changed = asyncio.Condition()


class MemoryTransport:
    """A Transport; see there for what each call promises. Leases follow the broker's clock."""

    def __init__(self, queues: MemoryQueues, options: TransportOptions) -> None:
        self._broker = queues.broker
        self._changed = queues.changed
        self._options = options

    @property
    def consumer(self) -> str:
        """The name under which this process holds entries."""
        return self._options.consumer

    async def admit(
        self, request_id: str, priority: Priority, payload: bytes, attempt: int = 0, timeout_s: float | None = None
    ) -> Admission:
        """Accept a request: create its state and give it to the tokenizer, in one step."""
        if self._broker.request(request_id) is not None:
            return Exists()
        waiting = sum(self._broker.length(stage, priority, None) for stage in ("tokenizer", "prefill"))
        if waiting >= self._options.max_queue:
            return Busy(ADMIT_RETRY_S)
        self._broker.create_request(request_id, attempt, timeout_s)
        self._broker.append("tokenizer", priority, None, payload)
        await self._notify()
        return Accepted()

    async def cancel(self, request_id: str, terminal: bytes) -> bool:
        """End a request now, whoever works on it; False where it had ended already."""
        request = self._broker.request(request_id)
        if request is None:
            raise UnknownRequest(request_id)
        if request.state in END_STATES:
            return False
        self._broker.end_request(request_id, request, Finish(terminal, "cancelled"), self._options)
        await self._notify()
        return True

    async def finished(self, num: int) -> list[FinishedRequest]:
        """Return the last requests that ended, oldest first."""
        return list(self._broker.finished)[-num:] if num else []

    async def receive(self, stage: str, max_items: int, block_s: float) -> list[Delivery]:
        """Take up to max_items entries: interactive before batch, given-up ones before new ones."""
        if max_items < 1:
            raise ValueError(f"max_items is {max_items}")
        deadline = monotonic_s() + block_s
        while True:
            async with self._changed:
                deliveries = self._broker.take(stage, max_items, self._options)
                left_s = deadline - monotonic_s()
                if deliveries or left_s <= 0:
                    return deliveries
                await self._wait(min(left_s, self._options.lease_s / SWEEPS_PER_LEASE))

    async def renew(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Extend the leases; False means lost, which no later renewal can undo."""
        entries = [self._broker.held(delivery) for delivery in deliveries]
        for entry in entries:
            if entry is not None:
                entry.renewed_at = self._broker.monotonic()
        return [entry is not None for entry in entries]

    async def commit(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        """Carry out transactions in order, in one step; a refused one does not touch the others."""
        outcomes = [self._broker.commit(transaction, self._options) for transaction in transactions]
        await self._notify()
        return outcomes

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give entries up unprocessed: claimable at once, not counted as a try."""
        for delivery in deliveries:
            if entry := self._broker.held(delivery):
                entry.nonce = None
                entry.tries -= 1
        await self._notify()

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Move an entry that belongs to no known request to the dead stream, unless it is lost."""
        if self._broker.held(delivery):
            self._broker.bury(delivery, reason)
            self._broker.drop(delivery)

    async def chunks(self, request_id: str, attempt: int) -> dict[int, bytes]:
        """Return the sealed chunks of an attempt by index."""
        request = self._broker.request(request_id)
        return dict(request.chunks) if request and request.attempt == attempt else {}

    async def read_results(self, request_id: str, after: int, block_s: float) -> list[ResultEntry]:
        """Return entries after the first `after` tokens, waiting up to block_s for one."""
        deadline = monotonic_s() + block_s
        while True:
            async with self._changed:
                request = self._broker.request(request_id)
                if request is None:
                    raise UnknownRequest(request_id)
                found = [entry for entry in request.results if entry.offset is None or entry.offset > after]
                left_s = deadline - monotonic_s()
                if found or left_s <= 0:
                    return found
                await self._wait(left_s)

    async def queue_length(self, stage: str, priority: Lane) -> int:
        """Return how many entries wait or are being worked on."""
        return self._broker.length(stage, priority, self._options.pool_id)

    async def num_waiting(self, stage: str, lane: Lane) -> int:
        """Return how many entries nobody works on, apart from those of dead processes."""
        return self._broker.num_waiting(stage, lane, self._options.pool_id)

    async def register(self, stage: str, info: bytes, ttl_s: float) -> None:
        """Announce this process for ttl_s seconds; info replaces what it announced before."""
        self._broker.registrations[stage, self.consumer] = (info, self._broker.monotonic() + ttl_s)

    async def processes(self) -> list[Process]:
        """Return the processes whose registration has not run out, by stage and consumer."""
        now = self._broker.monotonic()
        return [
            Process(stage, consumer, info)
            for (stage, consumer), (info, until) in sorted(self._broker.registrations.items())
            if until > now
        ]

    async def close(self) -> None:
        """Take this process off the list; entries still held stay leased until they expire."""
        for stage, consumer in list(self._broker.registrations):
            if consumer == self.consumer:
                del self._broker.registrations[stage, consumer]

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, timeout_s: float) -> None:
        try:
            # Not wait_for, which on Python 3.11 can swallow a cancellation.
            async with asyncio.timeout(min(timeout_s, MAX_WAIT_S)):
                await self._changed.wait()
        except TimeoutError:
            return
