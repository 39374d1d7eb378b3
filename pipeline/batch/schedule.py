"""Scheduling a batch's steps as arq jobs.

Owns how jobs are named and written: an id says batch, step and number, so that one turn is one job however often
it is asked for, and msgpack instead of arq's default, which is pickle. Knows nothing about what steps do.
"""

from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
from arq.connections import ArqRedis

from pipeline.batch.record import STEPS, BatchState, StepName
from pipeline.batch.store import PATIENCE_S, BatchStore
from pipeline.connect import connection_pool
from pipeline.keys import Keys
from pipeline.redis_calls import ANSWER_TIMEOUT_S, RedisCalls, command

NUM_CONNECTIONS = 16
JOB_EXPIRES_MS = 60_000  # the reconciler asks again for one that nobody began


class BatchScheduler:
    """Puts steps into arq's queue."""

    def __init__(self, redis: ArqRedis, address: str, keys: Keys) -> None:
        """Wire it up; whoever made the client closes it."""
        self._redis = redis
        self._calls = RedisCalls(redis, address, PATIENCE_S)
        self._keys = keys

    async def enqueue(self, batch_id: str, step: StepName, number: int) -> None:
        """Ask for one turn of a step; asking twice is as good as once."""
        job_id = f"{self._keys.namespace}:{batch_id}:{step}:{number}"
        await self._calls.call(lambda: self._redis.enqueue_job(step, batch_id, number, _job_id=job_id), "enqueue_job")
        # Jobs of a process that was killed stay in the queue; what is lost with them is asked for again.
        await command(self._calls, self._redis, "PEXPIRE", self._keys.arq(), JOB_EXPIRES_MS)

    async def drive(self, store: BatchStore, batch_id: str, state: BatchState) -> None:
        """Ask for the steps of a state that nobody works on."""
        for step in STEPS.get(state, ()):
            number = await store.revive(batch_id, step)
            if number is not None:
                await self.enqueue(batch_id, step, number)


def arq_client(url: str, keys: Keys, answer_timeout_s: float | None = ANSWER_TIMEOUT_S) -> ArqRedis:
    """Return arq's client for this namespace; aclose() it.

    Args:
        url: Where the server is.
        keys: Of the namespace.
        answer_timeout_s: None for a BatchScheduler, whose calls have a limit of their own.

    Raises:
        ServerUrlInvalid: the address cannot be read.
    """
    client = ArqRedis(
        connection_pool(url, NUM_CONNECTIONS, answer_timeout_s),
        job_serializer=pack_job,
        job_deserializer=unpack_job,
        default_queue_name=keys.arq(),
        expires_extra_ms=JOB_EXPIRES_MS,
    )
    client.auto_close_connection_pool = True  # nobody else has it
    return client


def pack_job(job: dict[str, Any]) -> bytes:
    """Return a job or a result as msgpack; what is neither plain nor small becomes its type's name."""
    return cast("bytes", msgpack.packb(job, use_bin_type=True, default=_named))  # pyright: ignore[reportUnknownMemberType]


def unpack_job(data: bytes) -> dict[str, Any]:
    """Return what pack_job wrote."""
    return cast("dict[str, Any]", msgpack.unpackb(data, raw=False))  # pyright: ignore[reportUnknownMemberType]


def _named(value: object) -> str:
    return type(value).__name__
