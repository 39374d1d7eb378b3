"""The sweeper of every stage: on a clock and not on new work, so that what is left over goes also when nothing comes.

Owns the rhythm, and what is done each time: hand on what this process counted, end requests whose deadline has passed,
clear the pool; now and then also names of dead consumers and credits without an owner. Knows nothing about the work of
the stage. A request that ends here is noticed by its holder at its next commit, like one that was cancelled.

arq's janitor (stages/jobs/janitor.py) does the same for all stages and pools, as the second line.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import ExitStack, asynccontextmanager
from typing import Final

import structlog

from kv_store.errors import KvStoreError, PoolRefused
from kv_store.pool import FilePool
from pipeline import wire
from pipeline.boundaries import FINISHED
from pipeline.clock import now_us
from pipeline.counters import CONSUMERS_REMOVED, CREDITS_RELEASED, REQUESTS_EXPIRED, Counters
from pipeline.errors import ServerError, ServerRefused, SluiceError
from pipeline.keys import POOLED_STAGES, STAGES
from pipeline.messages import Failure, Stamp, Terminal
from pipeline.server_url import read_address
from pipeline.settings import Settings
from pipeline.transport import Transport
from pipeline.upkeep import Upkeep, open_upkeep
from stages.common.handshake import REGISTRATION_TTL_S
from stages.common.pool_mark import PoolMark
from stages.common.pool_sweeper import PoolSweeper

MIN_INTERVAL_S: Final = 0.25  # one round trip each: unnoticeable beside the work
MAX_INTERVAL_S: Final = 2.0
SWEEPS_PER_TIDY: Final = 8  # names and credits that are left over cost a few bytes until then
MAX_EXPIRED: Final = 100  # in one sweep; the next one goes on
CONSUMER_IDLE_S: Final = 3 * REGISTRATION_TTL_S  # a process that is away for so long is not registered either
LAST_FLUSH_S: Final = 1.0  # of a process that ends: its grace is for its work

log = structlog.get_logger("sweeper")


class Sweeper:
    """What one process clears up; it owns nothing but the counts that have not arrived yet."""

    def __init__(
        self, stage: str, transport: Transport, upkeep: Upkeep, counters: Counters, pool: PoolSweeper | None
    ) -> None:
        """Wire it up; `pool` is that of this process, where it has one."""
        self.upkeep = upkeep
        self.counters = counters
        self._stage = stage
        self._transport = transport
        self._pool = pool
        self._unsent: tuple[str, Mapping[str, int]] | None = None
        self._num_sweeps = 0

    async def sweep(self) -> None:
        """Clear up once, as far as it is this stage's.

        Raises:
            ServerError: There is no answer.
            KvStoreError: The pool cannot be looked at; everything else is done.
        """
        await self.flush()
        await self.expire()
        if self._num_sweeps % SWEEPS_PER_TIDY == 0:
            await self._tidy_own()
        self._num_sweeps += 1
        await self.sweep_pool()

    async def flush(self) -> None:
        """Hand on what this process counted; what got no answer is sent again under the same ticket."""
        if self._unsent is not None:
            await self._send(*self._unsent)
        counts = self.counters.take()
        if counts:
            await self._send(secrets.token_hex(8), counts)

    async def _send(self, ticket: str, counts: Mapping[str, int]) -> None:
        self._unsent = (ticket, counts)
        try:
            await self.upkeep.count(counts, ticket)
        except ServerRefused as error:  # a foreign key under the counters' name is no reason to end a stage
            log.error("counts_refused", counts=dict(counts), problem=str(error))  # noqa: TRY400
        self._unsent = None

    async def expire(self) -> None:
        """End requests whose deadline has passed."""
        ended = await self.upkeep.expire(self._deadline_exceeded(), MAX_EXPIRED)
        if ended:
            self.counters.add(REQUESTS_EXPIRED, len(ended))
            log.info("requests_expired", request_ids=ended)

    async def sweep_pool(self) -> None:
        """Clear the pool of this process, where it has one."""
        if self._pool is not None:
            await self._pool.sweep()

    async def tidy(self, stage: str, pool_id: str | None, live: Collection[str]) -> None:
        """Remove the names of a stage's dead consumers; `live` are those of processes that are registered."""
        num_removed = await self.upkeep.tidy(stage, pool_id, live, CONSUMER_IDLE_S)
        if num_removed:
            self.counters.add(CONSUMERS_REMOVED, num_removed)
            log.info("consumers_removed", of=stage, num_removed=num_removed)

    async def audit(self, pool_id: str) -> None:
        """Take back credits of a pool that no request owns."""
        num_released = await self.upkeep.audit_credits(pool_id)
        if num_released:
            self.counters.add(CREDITS_RELEASED, num_released)
            log.warning("credits_released", pool_id=pool_id, num_released=num_released)

    async def _tidy_own(self) -> None:
        pool_id = None if self._pool is None else self._pool.pool_id
        if self._stage in STAGES and (pool_id is not None or self._stage not in POOLED_STAGES):
            live = {process.consumer for process in await self._transport.processes()}
            await self.tidy(self._stage, pool_id, live)
        if pool_id is not None:
            await self.audit(pool_id)

    def _deadline_exceeded(self) -> bytes:
        problem = "the request was not finished within its time limit, and was given up"
        failure = Failure(stage="deadline", code="deadline_exceeded", message=problem, retryable=True)
        stamps = (Stamp(boundary=FINISHED, at_us=now_us(), by=self._transport.consumer),)
        return wire.pack(Terminal(finish_reason="error", failure=failure, stamps=stamps))


async def sweep_forever(sweeper: Sweeper, interval_s: float) -> None:
    """Sweep until cancelled; what does not work now is tried again next time, and said once.

    Raises:
        ServerError: The server refuses what we do, and asking again cannot help.
    """
    failing = False
    while True:
        try:
            await sweeper.sweep()
            failing = False
        except (SluiceError, KvStoreError) as error:
            if isinstance(error, ServerError) and not error.retryable:
                raise
            if not failing:
                log.warning("not_swept", problem=str(error))
            failing = True
        await asyncio.sleep(interval_s)


def interval_s(lease_s: float) -> float:
    """Return how often to sweep where leases last that long: what a dead process left is gone soon after its work."""
    return min(max(lease_s / 4, MIN_INTERVAL_S), MAX_INTERVAL_S)


@asynccontextmanager
async def sweeping(stage: str, settings: Settings, transport: Transport, pool_id: str | None) -> AsyncIterator[Sweeper]:
    """Yield the sweeper of a process; at the end what was counted is handed on, if the server is there.

    Raises:
        KvStoreError: The pool cannot be opened.
    """
    counters = Counters()
    async with open_upkeep(settings) as upkeep:
        with ExitStack() as opened:
            pool = None if pool_id is None else _pool_sweeper(settings, pool_id, upkeep, counters, opened)
            sweeper = Sweeper(stage, transport, upkeep, counters, pool)
            try:
                yield sweeper
            finally:
                await _flush_last(sweeper)


def _pool_sweeper(
    settings: Settings, pool_id: str, upkeep: Upkeep, counters: Counters, opened: ExitStack
) -> PoolSweeper:
    pool = opened.enter_context(FilePool.open(settings.pool_dir, settings.kv_pool_bytes))
    if pool.pool_id != pool_id:  # somebody put another directory in its place a moment ago
        raise PoolRefused(str(settings.pool_dir), "pool id", pool.pool_id, pool_id)
    stack = f"{read_address(settings.redis_url or '').shown} {settings.namespace}"
    return PoolSweeper(pool, opened.enter_context(PoolMark(settings.pool_dir, stack)), upkeep, counters)


async def _flush_last(sweeper: Sweeper) -> None:
    try:
        async with asyncio.timeout(LAST_FLUSH_S):
            await sweeper.flush()
    except (ServerError, TimeoutError) as error:
        log.info("counts_lost", problem=str(error) or type(error).__name__)
