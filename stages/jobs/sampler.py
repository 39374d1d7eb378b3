"""Samples queues and KV pool for as long as the process runs: often while anything moves, rarely when idle.

Owns the rhythm. Knows nothing about what a sample holds (pipeline/samples.py). Any number of processes may run it
for one pool: the others ask once a second whether they are needed, and take over within a few seconds.
"""

import asyncio

import structlog

from kv_store.errors import KvStoreError
from kv_store.pool import FilePool
from pipeline.errors import ServerError
from pipeline.samples import SampleLog

BUSY_S = 0.25  # finer than a person sees, coarser than anything it could disturb
IDLE_S = 1.0

log = structlog.get_logger("sampler")


async def sample_forever(
    samples: SampleLog, pool: FilePool, sampler: str, *, busy_s: float = BUSY_S, idle_s: float = IDLE_S
) -> None:
    """Sample until cancelled; one round trip each time. A server that is away or full is tried again.

    Args:
        samples: Where samples go.
        pool: The pool whose queues and blobs are looked at.
        sampler: The consumer name of this process.
        busy_s: Time between samples while a queue or the pool holds anything.
        idle_s: Time between samples while nothing does, or while another process samples.

    Raises:
        ServerError: The server refuses what we do, and asking again cannot help.
    """
    failing = False
    while True:
        pause_s = idle_s
        try:
            if await _sample(samples, pool, sampler):
                pause_s = busy_s
            failing = False
        except (ServerError, KvStoreError) as error:
            if not error.retryable:
                raise
            if not failing:
                log.warning("not_sampled", problem=str(error))
            failing = True
        await asyncio.sleep(pause_s)


async def _sample(samples: SampleLog, pool: FilePool, sampler: str) -> bool:
    """Take a sample if it is our turn, and return whether anything moves."""
    usage = await asyncio.to_thread(pool.usage)
    num_entries = await samples.take(sampler, pool.pool_id, usage)
    return num_entries is not None and (num_entries > 0 or usage.num_blobs > 0)
