"""A stack at one moment, as far as its server and its pool know it: processes, queues, KV, requests, dead letters.

Owns the questions and the typed answers; `sluice status`, `sluice top` and metrics read the same ones. Knows nothing
about supervisors, or about how anything is shown.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, cast

from redis.asyncio import Redis

from kv_store.pool import FilePool
from pipeline.batch.record import BatchRecord
from pipeline.batch.store import BatchStore
from pipeline.clock import Monotonic, monotonic_s
from pipeline.connect import host_and_pid
from pipeline.finished_log import EndedRequest, FinishedLog
from pipeline.keys import STAGES, Keys
from pipeline.queue_state import QueueState, read_queues
from pipeline.redis_calls import RedisCalls, command, commands
from pipeline.samples import SampleLog
from pipeline.upkeep import read_counters

NUM_ENDED_BATCHES: Final = 3
FRESH_S: Final = 5.0  # several samples of an idle stack; an older one says nothing about now


@dataclass(frozen=True, slots=True)
class ServerState:
    """The Redis or Valkey server."""

    address: str
    """Without a password."""
    version: str
    used_memory_bytes: int
    max_memory_bytes: int | None
    """None where it has no limit."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A registered process; host and pid are None where it chose its own name."""

    stage: str
    consumer: str
    host: str | None
    pid: int | None
    expires_in_s: float
    """Until its registration runs out, unless it is renewed."""


@dataclass(frozen=True, slots=True)
class KvState:
    """The pool of KV blobs."""

    pool_id: str
    used_bytes: int
    quota_bytes: int
    num_blobs: int
    promised_bytes: int = 0
    """What requests between prefill and their end may fill, full or not: prefill waits when it is all."""
    num_promised: int = 0
    """How many requests that are."""


@dataclass(frozen=True, slots=True)
class Overview:
    """A stack at one moment."""

    at_us: int
    """Epoch, by the server's clock."""
    namespace: str
    server: ServerState
    processes: tuple[ProcessState, ...]
    queues: tuple[QueueState, ...]
    """All of them; without those of compressor and decode where no pool is known."""
    kv: KvState | None
    """None where nobody samples and the pool is not on this host."""
    dead: Mapping[str, int]
    """Dead letters by stage, where there are any."""
    ended: tuple[EndedRequest, ...]
    """The last requests that ended, oldest first."""
    batches: tuple[BatchRecord, ...] = ()
    """Those that go on and the last few that ended, oldest first."""
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """What should be rare and happened lately (counters.py); nothing that is zero."""

    def num_waiting(self, stage: str) -> int:
        """Return how many entries of all priorities wait for a stage."""
        return sum(queue.num_waiting for queue in self.queues if queue.stage == stage)

    def num_held(self, stage: str) -> int:
        """Return how many a stage works on."""
        return sum(queue.num_held for queue in self.queues if queue.stage == stage)

    def num_ended(self, state: str) -> int:
        """Return how many of the last requests ended like that."""
        return sum(request.state == state for request in self.ended)


class Observer:
    """Looks at one stack, once or again and again."""

    def __init__(
        self,
        client: Redis,
        address: str,
        keys: Keys,
        pool: FilePool | None = None,
        *,
        patience_s: float = 0,
        monotonic: Monotonic = monotonic_s,
    ) -> None:
        """Use a client that answers at once, and the pool where it is on this host; whoever made them closes them.

        Args:
            client: Of the transport's server (connect.open_client).
            address: What messages call the server.
            keys: Of the stack.
            pool: The stack's pool. Without it, samples say which pool there is and what it holds.
            patience_s: How long a call is repeated while the server is away; by default not at all.
            monotonic: The clock of that.
        """
        self.samples = SampleLog(client, address, keys, patience_s=patience_s, monotonic=monotonic)
        self._client = client
        self._address = address
        self._keys = keys
        self._pool = pool
        self._calls = RedisCalls(client, address, patience_s, monotonic)
        self._finished = FinishedLog(self._calls, client, keys)
        self._batches = BatchStore(client, address, keys, patience_s=patience_s, monotonic=monotonic)

    async def look(self) -> Overview:
        """Return the stack as it is now, in a handful of round trips.

        Raises:
            ServerError: there is no answer.
            KvStoreError: the pool cannot be looked at.
        """
        dead = [("XLEN", self._keys.dead(stage)) for stage in STAGES]
        time, info, *num_dead = await commands(self._calls, self._client, [("TIME",), ("INFO",), *dead], "overview")
        at_us = 1_000_000 * int(time[0]) + int(time[1])
        kv = await self._kv(at_us)
        return Overview(
            at_us=at_us,
            namespace=self._keys.namespace,
            server=_server(self._address, cast("Mapping[str, object]", info)),
            processes=await self._processes(),
            queues=tuple(await read_queues(self._calls, self._keys, kv.pool_id if kv is not None else None)),
            kv=kv,
            dead={stage: num for stage, num in zip(STAGES, num_dead, strict=True) if num},
            ended=await self._finished.read(),
            batches=tuple(await self._batches.recent(NUM_ENDED_BATCHES)),
            counters=await read_counters(self._calls, self._client, self._keys),
        )

    async def _kv(self, at_us: int) -> KvState | None:
        """The pool itself knows best what it holds, its sampler what it may hold.

        Where other pools are sampled and this one is not, it is one that the stack does not use.
        """
        recent = {sample.pool_id: sample for sample in await self.samples.read(at_us - round(1e6 * FRESH_S), at_us)}
        if self._pool is None or (recent and self._pool.pool_id not in recent):
            if not recent:
                return None
            last = list(recent.values())[-1]
            used = (last.kv_used_bytes, last.kv_quota_bytes, last.num_blobs)
            return KvState(last.pool_id, *used, *await self._promised(last.pool_id))
        usage = await asyncio.to_thread(self._pool.usage)
        sample = recent.get(self._pool.pool_id)
        quota_bytes = usage.quota_bytes if sample is None else sample.kv_quota_bytes
        used = (usage.used_bytes, quota_bytes, usage.num_blobs)
        return KvState(self._pool.pool_id, *used, *await self._promised(self._pool.pool_id))

    async def _promised(self, pool_id: str) -> tuple[int, int]:
        """The bytes of all credits of a pool, and how many there are."""
        reply = await command(self._calls, self._client, "HVALS", self._keys.credits(pool_id))
        sizes = [int(credit.split(b" ")[0].rpartition(b":")[2]) for credit in cast("list[bytes]", reply)]
        return sum(sizes), len(sizes)

    async def _processes(self) -> tuple[ProcessState, ...]:
        members = cast("set[bytes]", await command(self._calls, self._client, "SMEMBERS", self._keys.processes()))
        named = sorted(member.decode().partition(":")[::2] for member in members)
        if not named:
            return ()
        asked = [("PTTL", self._keys.process(stage, consumer)) for stage, consumer in named]
        ttls_ms = await commands(self._calls, self._client, asked, "processes")
        return tuple(
            ProcessState(stage, consumer, *host_and_pid(consumer), ttl_ms / 1000)
            for (stage, consumer), ttl_ms in zip(named, ttls_ms, strict=True)
            if ttl_ms >= 0
        )


def _server(address: str, info: Mapping[str, object]) -> ServerState:
    valkey = info.get("valkey_version")
    version = f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', '(unknown version)')}"
    limit = int(str(info.get("maxmemory", 0)))
    return ServerState(address, version, int(str(info.get("used_memory", 0))), limit or None)
