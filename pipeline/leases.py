"""Keeping what a process works on: leases renewed in time, and the signal that says to stop.

Owns the renewal clock. Knows nothing about what the work is: whoever works tells it what is held, and that
there is progress. Shared by the worker harness and by the loops of prefill and decode.
"""

import asyncio
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

import structlog

from pipeline.errors import ServerError
from pipeline.keys import HANG_LEASES
from pipeline.renewal import Renewal
from pipeline.transport import Delivery

RENEWALS_PER_LEASE = 3  # two may fail, or come late
HANG_TICKS = HANG_LEASES * RENEWALS_PER_LEASE

log = structlog.get_logger("leases")


class Leases(Protocol):
    """What a stage says about its work. All of it belongs to the event loop's thread, but for progressed()."""

    def hold(self, delivery: Delivery) -> None:
        """Renew this delivery from now on."""
        ...

    def drop(self, delivery: Delivery) -> None:
        """Renew it no more: it is done, given up, or left to its lease."""
        ...

    def holds(self, delivery: Delivery) -> bool:
        """Return whether it is being renewed; False after it was found lost."""
        ...

    def progressed(self) -> None:
        """Note that the work moves; may be called from any thread."""
        ...

    async def run(self) -> None:
        """Keep them until cancelled."""
        ...


class LeaseKeeper:
    """Renews the leases of everything held, until the work on it stands still.

    A process whose engine hangs lives on, and so does its event loop. When the loop has come to HANG_LEASES leases'
    worth of renewals without a call of progressed(), renewal stops and another process takes the work over; it
    resumes with progress. After twice as many, on_hung is called. What is counted are the loop's own turns and not
    seconds: a process that was stopped and continued did not run either, and is not hung.

    All methods belong to the event loop's thread, but progressed() may be called from any.
    """

    def __init__(
        self,
        renewal: Renewal,
        lease_s: float,
        on_lost: Callable[[Delivery], None] | None = None,
        on_hung: Callable[[], None] | None = None,
    ) -> None:
        """Prepare it.

        Args:
            renewal: Renews, as every transport can.
            lease_s: How long a lease lasts without renewal.
            on_lost: Is told, at most once, of a delivery that somebody else has now.
            on_hung: Is told, at most once, that the work has stood still for so long that nobody should wait for it.
        """
        self._renewal = renewal
        self._lease_s = lease_s
        self._on_lost = on_lost
        self._on_hung = on_hung
        self._held: dict[tuple[str, str, str], Delivery] = {}
        self._num_progressed = 0
        self._num_seen = 0  # of the progress, at the last tick
        self._ticks_still = 0

    def hold(self, delivery: Delivery) -> None:
        """Renew this delivery from now on."""
        if not self._held:
            self.progressed()  # idle time is not a hang
        self._held[claim_of(delivery)] = delivery

    def drop(self, delivery: Delivery) -> None:
        """Renew it no more: it is done, given up, or left to its lease."""
        self._held.pop(claim_of(delivery), None)

    def holds(self, delivery: Delivery) -> bool:
        """Return whether it is being renewed; False after it was found lost."""
        return claim_of(delivery) in self._held

    def progressed(self) -> None:
        """Note that the work moves."""
        self._num_progressed += 1  # of two threads at once one may not count: it has moved all the same

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            await self.renew()

    async def renew(self) -> None:
        """Renew everything held, once; an unreachable server is tried again next time.

        One call is one tick of the clock by which work stands still.
        """
        deliveries = list(self._held.values())
        if not deliveries or self._stands_still():
            return
        try:
            kept = await self._renewal.renew(deliveries)
        except ServerError as error:
            log.warning("leases_not_renewed", num_held=len(deliveries), problem=str(error))
            self._ticks_still = 0  # the work may be waiting for the server too: that is no hang
            return
        for delivery, still_held in zip(deliveries, kept, strict=True):
            if not still_held and self._held.pop(claim_of(delivery), None):
                log.warning("lease_lost", stream=delivery.stream, entry_id=delivery.entry_id)
                if self._on_lost:
                    self._on_lost(delivery)

    def _stands_still(self) -> bool:
        moved = self._num_progressed != self._num_seen
        self._num_seen = self._num_progressed
        self._ticks_still = 0 if moved else self._ticks_still + 1
        if self._ticks_still == HANG_TICKS:
            log.error("work_stands_still", num_held=len(self._held), num_leases=HANG_LEASES)
        if self._ticks_still >= 2 * HANG_TICKS and self._on_hung is not None:
            on_hung, self._on_hung = self._on_hung, None
            on_hung()
        return self._ticks_still >= HANG_TICKS


def claim_of(delivery: Delivery) -> tuple[str, str, str]:
    """Return what tells this claim on an entry from any other."""
    return delivery.stream, delivery.entry_id, delivery.nonce


@contextmanager
def stop_on_signals() -> Generator[asyncio.Event]:
    """Yield an event that SIGTERM or SIGINT sets; a second signal then ends the process at once."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
        stopping.set()
        log.info("stopping")
        restore()

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield stopping
    finally:
        restore()
