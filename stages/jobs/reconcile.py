"""Finds out what each batch needs next from its state alone, and asks for it.

The second line behind the steps, which ask for their own successors: a killed process, a lost job, a batch that was
submitted and whose first job never came. Also the clock of batches that expire. A task of the process and not an arq
cron job, because each run of those writes five keys, and this mostly finds nothing to do.
"""

import asyncio

import structlog

from pipeline.errors import ServerError
from stages.jobs.turn import Jobs

INTERVAL_S = 1.0

log = structlog.get_logger("jobs")


async def reconcile_forever(jobs: Jobs) -> None:
    """Look at all batches now and then, until cancelled."""
    while not jobs.stopping.is_set():
        try:
            await reconcile(jobs)
        except ServerError as error:
            log.warning("batches_not_seen", problem=str(error))
        await asyncio.sleep(INTERVAL_S)


async def reconcile(jobs: Jobs) -> None:
    """Look at all batches once."""
    now_ms, batches = await jobs.store.survey()
    for batch in batches:
        state = batch.state
        if state == "in_progress" and batch.deadline_ms and now_ms > batch.deadline_ms:
            state = await jobs.store.move(batch.id, ["in_progress"], "expiring")
            log.info("batch_expiring", batch_id=batch.id)
        await jobs.scheduler.drive(jobs.store, batch.id, state)
