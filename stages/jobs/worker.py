"""Runs arq's worker for the steps of batches and for the janitor, through outages of the server.

Owns the list of arq functions and their limits, and when the janitor comes. arq's worker ends when its connection does,
so here it is made anew. A step's job may run for longer than arq keeps it to itself only where the step's own lease
keeps others out (turn.py); tries are arq's to count and not to limit, since a step that fails says so in the batch's
state.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import structlog
from arq.connections import ArqRedis
from arq.cron import CronJob, cron
from arq.worker import Function, Worker, func
from redis.exceptions import RedisError

from pipeline.batch.record import StepName
from pipeline.batch.schedule import JOB_EXPIRES_MS, pack_job, unpack_job
from stages.jobs.cancel import cancel
from stages.jobs.collect import collect
from stages.jobs.feed import feed
from stages.jobs.finalise import finalise
from stages.jobs.janitor import INTERVAL_S, TIMEOUT_S, Janitor
from stages.jobs.turn import Jobs, Step, take_turn
from stages.jobs.validate import validate

STEP_FUNCTIONS: Mapping[StepName, Step] = {
    "validate": validate,
    "feed": feed,
    "collect": collect,
    "cancel": cancel,
    "expire": cancel,
    "finalise": finalise,
}
MAX_JOBS = 16  # of all batches together; most of the time each is two
STEP_TIMEOUT_S = 60  # a slice of time and what a slow disk adds
FILE_TIMEOUT_S = 1800  # one pass over a file of gigabytes
POLL_S = 0.1  # how long a step waits for arq to see it
MAX_TRIES = 1000
RECONNECT_S = 0.5
CANCEL_AGAIN_S = 1.0  # longer than it takes to put things in order after a cancellation

log = structlog.get_logger("jobs")

NewClient = Callable[[], ArqRedis]


class _Worker(Worker):
    """Arq's worker, whose queue goes away with those that work on it."""

    async def run_cron(self, n: datetime, delay: float, num_windows: int = 2) -> None:
        """Ask for cron jobs that are due, a moment ahead; where nobody comes for one, it must not stay for ever."""
        before = [job.next_run for job in self.cron_jobs]
        await super().run_cron(n, delay, num_windows)
        if [job.next_run for job in self.cron_jobs] != before:
            await self.pool.pexpire(self.queue_name, JOB_EXPIRES_MS)


async def work(jobs: Jobs, new_client: NewClient, janitor: Janitor | None = None) -> None:
    """Work until told to stop; with a janitor, be the one who comes when it is time, or stand by."""
    while not jobs.stopping.is_set():
        client = new_client()
        worker = _worker(jobs, client, janitor)
        running = asyncio.create_task(worker.async_run())
        stopping = asyncio.create_task(jobs.stopping.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                _explain(running)
                await asyncio.sleep(RECONNECT_S)
            else:
                await _finish_jobs(worker, running)
        finally:
            await _end(worker, running, stopping)


def _worker(jobs: Jobs, client: ArqRedis, janitor: Janitor | None) -> Worker:
    return _Worker(
        [_function(jobs, name, step) for name, step in STEP_FUNCTIONS.items()],
        cron_jobs=[] if janitor is None else [_cron(janitor)],
        redis_pool=client,
        queue_name=client.default_queue_name,  # it would be arq's own
        handle_signals=False,  # ours say it to the whole process
        max_jobs=MAX_JOBS,
        keep_result=0,  # what a step came to is in the batch's record; a kept result would block its id
        poll_delay=POLL_S,
        max_tries=MAX_TRIES,
        job_serializer=pack_job,
        job_deserializer=unpack_job,
        log_results=False,
    )


def _function(jobs: Jobs, name: StepName, step: Step) -> Function:
    async def run(ctx: dict[Any, Any], batch_id: str, number: int) -> None:  # noqa: ARG001 - arq passes it
        await take_turn(jobs, name, step, batch_id, number)

    timeout_s = FILE_TIMEOUT_S if name in {"validate", "finalise"} else STEP_TIMEOUT_S
    return func(run, name=name, timeout=timeout_s)


def _cron(janitor: Janitor) -> CronJob:
    async def run(ctx: dict[Any, Any]) -> None:  # noqa: ARG001 - arq passes it
        await janitor.clean()

    seconds = set(range(0, 60, INTERVAL_S))
    return cron(run, name=janitor.name, second=seconds, run_at_startup=True, timeout=TIMEOUT_S)


def _explain(running: "asyncio.Task[None]") -> None:
    error = running.exception()
    if error is None:
        return
    if not isinstance(error, RedisError | OSError):
        raise error
    log.warning("arq_worker_lost_server", problem=str(error) or type(error).__name__)


async def _finish_jobs(worker: Worker, running: "asyncio.Task[None]") -> None:
    """Let the jobs that run come to their end, which they do when they see that the process is stopping."""
    worker.burst, worker.max_burst_jobs = True, 0  # in arq's words: take no more, and return when these are done
    await asyncio.wait({running}, timeout=STEP_TIMEOUT_S)


async def _end(worker: Worker, *tasks: "asyncio.Task[Any]") -> None:
    pending = {*tasks, *worker.tasks.values()}
    while pending:  # again and again: on Python 3.11 a cancellation in the middle of a call may get lost
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, *worker.tasks.values(), return_exceptions=True)
    await _close(worker)


async def _close(worker: Worker) -> None:
    try:
        await worker.pool.aclose()
    except (RedisError, OSError) as error:
        log.info("left_without_goodbye", problem=str(error))
