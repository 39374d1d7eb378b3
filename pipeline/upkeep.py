"""What keeps a namespace clean: deadlines, credits, pools, names of consumers and counters, as the server keeps them.

Owns the conversation about them; what happens together is written in scripts/*.lua. Knows nothing about when it is
done: every stage sweeps (stages/common/sweeper.py), and arq's janitor does it for all of them (stages/jobs/janitor.py).
"""

from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Final, cast

import structlog
from redis.asyncio import Redis

from pipeline.clock import Monotonic, monotonic_s
from pipeline.connect import connection_pool
from pipeline.keys import (
    COUNTED_TTL_S,
    COUNTERS_TTL_S,
    HANDBACK,
    MAX_FINISHED,
    POOLED_STAGES,
    POOLS_TTL_S,
    RESULT_TTL_S,
    Keys,
    lanes_of,
)
from pipeline.redis_calls import Arg, RedisCalls, command, commands
from pipeline.server_url import read_address
from pipeline.settings import Settings

PATIENCE_S = 1.0  # bridges a dropped connection; whoever sweeps comes again
NUM_CONNECTIONS = 4  # a sweep uses one, a janitor beside it another
MAX_AUDITED = 200  # credits looked at in one call; there is one for each request between prefill and its end
SCANNED = 1_000  # names of keys in one round trip

log = structlog.get_logger(__name__)

_NEW: Final = "0"  # the cursor of a new scan


class Upkeep:
    """One namespace from the side of whoever clears up. Every call may raise a ServerError; all may be repeated."""

    def __init__(
        self,
        client: Redis,
        address: str,
        keys: Keys,
        *,
        result_ttl_s: int = RESULT_TTL_S,
        patience_s: float = PATIENCE_S,
        monotonic: Monotonic = monotonic_s,
    ) -> None:
        """Wire it up; whoever made the client closes it.

        Args:
            client: Of the transport's server.
            address: What messages call the server.
            keys: Of the namespace.
            result_ttl_s: How long the results of a request stay that is ended here.
            patience_s: How long a call is repeated while the server is away.
            monotonic: The clock of that.
        """
        self._client = client
        self._keys = keys
        self._result_ttl_s = result_ttl_s
        self._calls = RedisCalls(client, address, patience_s, monotonic)
        self._audit_cursors: dict[str, str] = {}

    # Requests

    async def expire(self, terminal: bytes, limit: int) -> list[str]:
        """End up to `limit` requests whose deadline has passed, with that terminal entry; returns their ids."""
        keys = self._keys
        args: list[Arg] = [keys.request(""), keys.results(""), keys.chunks_prefix("").removesuffix(":")]
        args += [terminal, self._result_ttl_s, MAX_FINISHED, limit]
        reply = await self._calls.script("expire", [keys.deadlines(), keys.finished()], args)
        ended, damaged = cast("tuple[list[bytes], list[bytes]]", reply)
        if damaged:
            log.error("deadlines_not_kept", request_ids=[request_id.decode() for request_id in damaged])
        return [request_id.decode() for request_id in ended]

    async def home_of(self, request_id: str) -> str | None:
        """Return the pool in which a request has its credit; None where it has none, or is not known."""
        credits_key = cast("bytes | None", await self._command("HGET", self._keys.request(request_id), "credits"))
        return None if credits_key is None else credits_key.decode().removeprefix(self._keys.credits_prefix())

    # Pools

    async def credits(self, pool_id: str) -> dict[str, int]:
        """Return the requests that may have blobs in a pool, each with the attempt that may."""
        reply = cast("dict[bytes, bytes]", await self._command("HGETALL", self._keys.credits(pool_id)))
        credits_ = ((request_id.decode(), credit.partition(b":")[0]) for request_id, credit in reply.items())
        return {request_id: int(attempt) for request_id, attempt in credits_ if attempt.isdigit()}

    async def audit_credits(self, pool_id: str) -> int:
        """Take back credits of requests that do not exist, have ended, or are on another attempt; returns how many.

        Looks at some of them in one call, and goes on with the others in the next one.
        """
        cursor = self._audit_cursors.get(pool_id, _NEW)
        args: list[Arg] = [self._keys.request(""), cursor, MAX_AUDITED]
        reply = await self._calls.script("audit_credits", [self._keys.credits(pool_id)], args)
        next_cursor, num_taken = cast("tuple[bytes, int]", reply)
        self._audit_cursors[pool_id] = next_cursor.decode()
        return num_taken

    async def pools(self) -> tuple[int, dict[str, int]]:
        """Return the server's time in ms, and when a process of each pool was last announced, likewise."""
        asked = [["TIME"], ["ZRANGE", self._keys.pools(), 0, -1, "WITHSCORES"]]
        time, members = await commands(self._calls, self._client, asked, "pools")
        flat = cast("list[bytes]", members)
        return _ms(time), {pool.decode(): int(seen_ms) for pool, seen_ms in zip(flat[::2], flat[1::2], strict=True)}

    async def find_pools(self) -> int:
        """Put pools that have queues and are not in the index into it, as if seen now; returns how many.

        The index forgets a pool when all processes were gone for a day, and its work may wait for longer. Reads the
        names of all keys of the server, so once in a process's life is often enough.
        """
        found: set[str] = set()
        cursor: object = _NEW
        match = f"{self._keys.namespace}:stream:*"
        while True:
            reply = await self._command("SCAN", cast("Arg", cursor), "MATCH", match, "COUNT", SCANNED)
            cursor, names = cast("tuple[int, list[bytes]]", reply)
            found |= {pool_id for name in names if (pool_id := self._pool_in(name.decode())) is not None}
            if not cursor:
                break
        if not found:
            return 0
        now_ms = _ms(await self._command("TIME"))
        scores: list[Arg] = [word for pool_id in sorted(found) for word in (now_ms, pool_id)]
        num_new = cast("int", await self._command("ZADD", self._keys.pools(), "NX", *scores))
        await self._command("EXPIRE", self._keys.pools(), POOLS_TTL_S)
        return num_new

    async def forget_pool(self, pool_id: str, seen_ms: int) -> bool:
        """Remove the queues and credits of a pool that is gone; False while its queues hold something.

        False, too, where a process of it has announced itself since `seen_ms`.
        """
        streams = [self._keys.stream(stage, lane, pool_id) for stage in POOLED_STAGES for lane in lanes_of(stage)]
        keys = [self._keys.pools(), self._keys.credits(pool_id)]
        keys += [key for stream in streams for key in (stream, self._keys.claims(stream), self._keys.tries(stream))]
        gone = await self._calls.script("forget_pool", keys, [pool_id, seen_ms]) == 1
        if gone:
            self._audit_cursors.pop(pool_id, None)
        return gone

    def _pool_in(self, key: str) -> str | None:
        """The pool that a work stream is named after."""
        words = key.removeprefix(f"{self._keys.namespace}:stream:").split(":")
        if len(words) != 3 or words[0] not in POOLED_STAGES or words[2] not in lanes_of(words[0]):
            return None
        return words[1]

    # Consumers

    async def tidy(self, stage: str, pool_id: str | None, live: Collection[str], idle_s: float) -> int:
        """Delete the names of a stage's consumers that hold nothing, are not among `live`, and long idle.

        Returns how many. The consumer of entries that were handed back stays.
        """
        streams = [self._keys.stream(stage, lane, pool_id) for lane in lanes_of(stage)]
        args: list[Arg] = [stage, HANDBACK, round(1000 * idle_s), *sorted(live)]
        return cast("int", await self._calls.script("tidy", streams, args))

    # Counters

    async def count(self, counts: Mapping[str, int], ticket: str) -> None:
        """Add to the counters, which stay for a week; called again under the same ticket, it adds nothing."""
        keys = [self._keys.counters(), self._keys.counted(ticket)]
        pairs = [word for pair in counts.items() for word in pair]
        await self._calls.script("count", keys, [COUNTERS_TTL_S, COUNTED_TTL_S, *pairs])

    async def counters(self) -> dict[str, int]:
        """Return what all processes counted."""
        return await read_counters(self._calls, self._client, self._keys)

    async def _command(self, *words: Arg) -> object:
        return await command(self._calls, self._client, *words)


@asynccontextmanager
async def open_upkeep(settings: Settings) -> AsyncGenerator[Upkeep]:
    """Yield the upkeep of the namespace of the settings, over connections of its own.

    Raises:
        ServerUrlInvalid: there is no address, or it cannot be read.
    """
    url = settings.redis_url or ""
    # Its calls have a limit of their own; see redis_calls.py.
    client = Redis.from_pool(connection_pool(url, NUM_CONNECTIONS, answer_timeout_s=None))
    try:
        yield Upkeep(client, read_address(url).shown, Keys(settings.namespace), result_ttl_s=settings.result_ttl_s)
    finally:
        await client.aclose()


async def read_counters(calls: RedisCalls, client: Redis, keys: Keys) -> dict[str, int]:
    """Return the counters of a namespace that are not zero.

    Raises:
        ServerError: there is no answer.
    """
    reply = cast("dict[bytes, bytes]", await command(calls, client, "HGETALL", keys.counters()))
    return {name.decode(): int(n) for name, n in reply.items() if int(n)}


def _ms(time: object) -> int:
    seconds, microseconds = cast("tuple[int, int]", time)
    return 1000 * int(seconds) + int(microseconds) // 1000
