"""The second line behind the sweepers: does for the whole namespace what each of them does for its own stage and pool.

And what no stage can do for itself: a pool of a host that is gone has no process left that would. Its work goes to the
pools that are there (salvage.py), and it is forgotten.

An arq cron job (worker.py): of several jobs processes one does it each time, and a run that is lost is not missed.
Everything in it may be repeated, or happen twice at once. Each run does a bounded part; the next one goes on.
"""

from collections.abc import Collection, Mapping

import structlog

from kv_store.errors import KvStoreError
from pipeline.errors import SluiceError
from pipeline.keys import POOLED_STAGES, STAGES
from pipeline.settings import Settings
from pipeline.transport import Process, Transport
from stages.common.handshake import REGISTRATION_TTL_S, read_announcement
from stages.common.sweeper import Sweeper
from stages.jobs.salvage import salvage

INTERVAL_S = 5  # of a minute; a sweeper does the urgent things far more often
TIMEOUT_S = 60  # a run takes milliseconds, and seconds where a pool is gone
POOL_GONE_S = 2 * REGISTRATION_TTL_S  # a host that is only cut off has been away for as long as its registrations last
MAX_SALVAGED = 200  # entries in one run

log = structlog.get_logger("janitor")


class Janitor:
    """Of one jobs process."""

    def __init__(self, sweeper: Sweeper, transport: Transport, settings: Settings) -> None:
        """Wire it up; it owns none of these."""
        self.name = f"{settings.namespace}:janitor"  # arq makes key names of it
        self._sweeper = sweeper
        self._transport = transport
        self._settings = settings
        self._knows_pools = False
        self._is_at_it = False

    async def clean(self) -> None:
        """Do one run; what fails is left to the next one."""
        if self._is_at_it:  # the one before has much to do
            return
        self._is_at_it = True
        try:
            await self._clean()
        except (SluiceError, KvStoreError) as error:
            log.warning("not_cleaned", problem=str(error))
        finally:
            self._is_at_it = False

    async def _clean(self) -> None:
        upkeep = self._sweeper.upkeep
        if not self._knows_pools:
            await upkeep.find_pools()
            self._knows_pools = True
        await self._sweeper.expire()
        processes = await self._transport.processes()
        now_ms, seen_ms = await upkeep.pools()
        await self._tidy(processes, seen_ms)
        await self._send_elsewhere(gone_pools(now_ms, seen_ms, processes), seen_ms)
        await self._sweeper.sweep_pool()

    async def _tidy(self, processes: Collection[Process], pools: Collection[str]) -> None:
        live = {process.consumer for process in processes}
        for stage in STAGES:
            for pool_id in pools if stage in POOLED_STAGES else (None,):
                await self._sweeper.tidy(stage, pool_id, live)
        for pool_id in pools:
            await self._sweeper.audit(pool_id)

    async def _send_elsewhere(self, gone: Collection[str], seen_ms: Mapping[str, int]) -> None:
        left = MAX_SALVAGED
        for pool_id in gone:
            left -= await salvage(self._settings, pool_id, self._sweeper.upkeep, self._sweeper.counters, left)
            if left <= 0:
                return
            if await self._sweeper.upkeep.forget_pool(pool_id, seen_ms[pool_id]):
                log.warning("pool_forgotten", pool_id=pool_id)


def gone_pools(now_ms: int, seen_ms: Mapping[str, int], processes: Collection[Process]) -> list[str]:
    """Return the pools that no process announces any more, while decode of another pool could take their work.

    Args:
        now_ms: The server's time.
        seen_ms: Each pool's last sign of life, likewise.
        processes: Those that are registered.
    """
    said = [(process.stage, read_announcement(process).pool_id) for process in processes]
    announced = {pool_id for _, pool_id in said}
    if not any(stage == "decode" and pool_id is not None for stage, pool_id in said):
        return []
    # A sign that lies far ahead is of before the server's clock was set back: those who live give a new one.
    gone_ms = 1000 * POOL_GONE_S
    return [pool_id for pool_id, at_ms in seen_ms.items() if pool_id not in announced and abs(now_ms - at_ms) > gone_ms]
