"""What the queues and the KV pool held, a few times a second: the log that traces, `top` and memory figures read.

Owns the form of a sample and both ends of its stream. Knows nothing about when samples are taken
(stages/jobs/sampler.py).

    entry   <ms>-<n>   the server's time
    pool    id of the pool
    kv      bytes used, quota, number of blobs
    {stage}:{priority}   the four numbers of queue_state.py; only of queues that have entries
"""

from dataclasses import dataclass
from typing import Final, cast

from redis.asyncio import Redis

from kv_store.pool import PoolUsage
from pipeline.clock import Monotonic, monotonic_s
from pipeline.errors import StateDamaged
from pipeline.keys import HANDBACK, MAX_SAMPLES, SAMPLES_TTL_S, Keys
from pipeline.queue_state import QUEUES, QueueState
from pipeline.redis_calls import Arg, RedisCalls, command

_LOCK_MS: Final = 3_000  # three samples of an idle stack: a sampler that died is replaced within them


@dataclass(frozen=True, slots=True)
class Sample:
    """All queues around one pool, and the pool, in one moment; a queue that is not here was empty."""

    at_us: int
    """Epoch, by the server's clock, to the millisecond."""
    pool_id: str
    kv_used_bytes: int
    kv_quota_bytes: int
    num_blobs: int
    queues: tuple[QueueState, ...] = ()

    def num_waiting(self, stage: str) -> int:
        """Return how many entries of all priorities wait for a stage."""
        return sum(queue.num_waiting for queue in self.queues if queue.stage == stage)

    def num_held(self, stage: str) -> int:
        """Return how many a stage works on."""
        return sum(queue.num_held for queue in self.queues if queue.stage == stage)


class SampleLog:
    """The stream of samples in one namespace; any number of processes may write and read it."""

    def __init__(
        self, client: Redis, address: str, keys: Keys, *, patience_s: float = 0, monotonic: Monotonic = monotonic_s
    ) -> None:
        """Use a client that answers at once; whoever made it closes it.

        Args:
            client: Of the transport's server (connect.open_client).
            address: What error messages call the server.
            keys: Of the stack.
            patience_s: How long a call is repeated while the server is away; by default not at all.
            monotonic: The clock of that.
        """
        self._client = client
        self._keys = keys
        self._calls = RedisCalls(client, address, patience_s, monotonic)

    async def take(self, sampler: str, pool_id: str, usage: PoolUsage) -> int | None:
        """Append a sample of now, and return how many entries all queues have; None where somebody else samples.

        One round trip. `sampler` is this process's consumer name.

        Raises:
            ServerError: there is no answer, or no memory for a sample.
        """
        keys = [self._keys.sampler(pool_id), self._keys.samples()]
        keys += [self._keys.stream(stage, priority, pool_id) for stage, priority in QUEUES]
        args: list[Arg] = [sampler, _LOCK_MS, MAX_SAMPLES, SAMPLES_TTL_S, HANDBACK]
        args += [pool_id, f"{usage.used_bytes} {usage.quota_bytes} {usage.num_blobs}"]
        args += [word for stage, priority in QUEUES for word in (_field(stage, priority), stage)]
        word, num_entries = cast("tuple[bytes, int]", await self._calls.script("sample", keys, args))
        return num_entries if word == b"taken" else None

    async def read(self, since_us: int, until_us: int) -> list[Sample]:
        """Return the samples of a time, both ends included, oldest first; there are at most about MAX_SAMPLES.

        Raises:
            StateDamaged: an entry is no sample.
        """
        since, until = f"{since_us // 1000}-0", f"{-(-until_us // 1000)}"
        return [_sample(*entry) for entry in await self._entries("XRANGE", since, until)]

    async def last(self) -> Sample | None:
        """Return the newest sample.

        Raises:
            StateDamaged: it is no sample.
        """
        entries = await self._entries("XREVRANGE", "+", "-", "COUNT", 1)
        return _sample(*entries[0]) if entries else None

    async def _entries(self, name: str, *words: Arg) -> list[tuple[bytes, dict[bytes, bytes]]]:
        reply = await command(self._calls, self._client, name, self._keys.samples(), *words)
        return cast("list[tuple[bytes, dict[bytes, bytes]]]", reply)


def _field(stage: str, priority: str) -> str:
    return f"{stage}:{priority}"


def _sample(entry_id: bytes, fields: dict[bytes, bytes]) -> Sample:
    try:
        used_bytes, quota_bytes, num_blobs = (int(word) for word in fields[b"kv"].split())
        found = ((queue, fields.get(_field(*queue).encode())) for queue in QUEUES)
        queues = tuple(QueueState.parse(*queue, numbers) for queue, numbers in found if numbers)
        at_us = 1000 * int(entry_id.partition(b"-")[0])
        return Sample(at_us, fields[b"pool"].decode(), used_bytes, quota_bytes, num_blobs, queues)
    except (KeyError, ValueError) as error:
        raise StateDamaged((f"sample {entry_id.decode(errors='replace')}: {error!r}",)) from None
