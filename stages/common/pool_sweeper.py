"""Removes from a pool what nobody will: unfinished files of dead writers, and blobs of requests that have ended.

A blob belongs to a request and an attempt, which its name says (kv_blobs.py), and these have a credit for as long as
anybody may read it. Credits are taken before the first blob is written. So blobs are listed first and credits are read
then: a blob whose owner has no credit by then will never be read. Removing is idempotent, so any number of processes
may do it at once.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import structlog

from kv_store.pool import FilePool
from pipeline.counters import ORPHANS_REMOVED, Counters
from pipeline.upkeep import Upkeep
from stages.common.kv_blobs import owner_in, owner_of
from stages.common.pool_mark import PoolMark

log = structlog.get_logger("sweeper")

P = ParamSpec("P")
T = TypeVar("T")


class PoolSweeper:
    """Clears one pool on behalf of one stack."""

    def __init__(self, pool: FilePool, mark: PoolMark, upkeep: Upkeep, counters: Counters) -> None:
        """Wire it up; it owns none of these."""
        self.pool_id = pool.pool_id
        self._pool = pool
        self._mark = mark
        self._upkeep = upkeep
        self._counters = counters

    async def sweep(self) -> None:
        """Look through the pool once.

        Raises:
            ServerError: There is no answer; nothing that might be in use was removed.
            KvStoreError: The pool cannot be looked at.
        """
        num_files = await _in_thread(self._pool.sweep_temporaries, 0.0)  # a living writer holds a lock on its file
        num_blobs = await self._remove_orphans()
        if num_files or num_blobs:
            self._counters.add(ORPHANS_REMOVED, num_files + num_blobs)
            log.info("orphans_removed", num_blobs=num_blobs, num_unfinished=num_files)

    async def _remove_orphans(self) -> int:
        names = await _in_thread(self._pool.names)
        # Looked at after the names: whatever is in the list was written under a mark that is seen now, or by a process
        # that has died.
        if not names or not self._mark.is_alone():
            return 0
        credits_ = await self._upkeep.credits(self.pool_id)
        owners = {owner_of(request_id, attempt) for request_id, attempt in credits_.items()}
        orphans = [name for name in names if (owner := owner_in(name)) is not None and owner not in owners]
        return await _in_thread(self._release, orphans) if orphans else 0

    def _release(self, names: Sequence[str]) -> int:
        return sum(self._pool.release(name) for name in names)


async def _in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what the work returns. Cancelled, it ends when the work does, whose pool must stay open so long."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
