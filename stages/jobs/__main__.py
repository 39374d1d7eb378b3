"""Builds the jobs process and runs it."""

import asyncio

from kv_store.pool import FilePool
from pipeline.batch.schedule import BatchScheduler, arq_client
from pipeline.batch.store import BatchStore, store_client
from pipeline.keys import Keys
from pipeline.samples import SampleLog
from pipeline.server_url import read_address
from pipeline.settings import Settings
from stages.common.stage_process import run_stage, stage_process
from stages.gguf.model_files import resolve
from stages.jobs.janitor import Janitor
from stages.jobs.reconcile import reconcile_forever
from stages.jobs.sampler import sample_forever
from stages.jobs.token_names import TokenNames
from stages.jobs.turn import Jobs
from stages.jobs.worker import MAX_JOBS, work

NUM_CONNECTIONS = 2 * MAX_JOBS  # a job that waits for lines holds one, and asks on another


async def serve(settings: Settings) -> None:
    """Drive batches on, and clear up, until told to stop."""
    keys = Keys(settings.namespace)
    with FilePool.open(settings.pool_dir, settings.kv_pool_bytes) as pool:
        async with stage_process("jobs", settings, {}, pool.pool_id) as process:
            assert settings.redis_url is not None, "the transport is open"
            address = read_address(settings.redis_url).shown
            client = store_client(settings.redis_url, NUM_CONNECTIONS)
            scheduling = arq_client(settings.redis_url, keys, answer_timeout_s=None)
            jobs = Jobs(
                store=BatchStore(client, address, keys, strict=settings.durability == "strict"),
                scheduler=BatchScheduler(scheduling, address, keys),
                transport=process.transport,
                names=TokenNames(resolve(settings.model, settings.home)),
                stopping=process.stopping,
                max_queue=settings.max_queue,
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    samples = SampleLog(client, address, keys)
                    sampling = tasks.create_task(sample_forever(samples, pool, process.transport.consumer))
                    reconciling = tasks.create_task(reconcile_forever(jobs))
                    janitor = Janitor(process.sweeper, process.transport, settings)
                    await work(jobs, lambda: arq_client(str(settings.redis_url), keys), janitor)
                    sampling.cancel()
                    reconciling.cancel()
            finally:
                await scheduling.aclose()
                await client.aclose()


if __name__ == "__main__":
    run_stage("jobs", serve)
