"""Takes back requests that nobody waits for any more, and counts what is left in the queues.

Owns the removal: a client that leaves early (Ctrl-C, a failed stack) takes its unfinished requests along.
Knows nothing about stages beyond which message lies in whose stream.

    forget(ids)           the requests' state goes: whatever a stage still does for them is refused as GONE,
                          so it drops the work at its next commit
    remove_entries(ids)   after the stages have stopped: the entries that they handed back
"""

import os
import socket
from collections.abc import Collection
from typing import Any, cast

from redis.asyncio import Redis

from pipeline.connect import ANSWER_TIMEOUT_S
from pipeline.errors import WireError
from pipeline.keys import POOLED_STAGES, PRIORITIES, STAGES, Keys
from pipeline.messages import GenerateRequest, PrefilledPrompt, RawChunk, TokenizedPrompt, WorkItem
from pipeline.settings import Settings
from pipeline.transport import Process
from pipeline.wire import unpack

PAGE = 500  # entries read at a time
MESSAGES: dict[str, type[WorkItem]] = {
    "tokenizer": GenerateRequest,
    "prefill": TokenizedPrompt,
    "compressor": RawChunk,
    "decode": PrefilledPrompt,
}


class Leftovers:
    """The queues of one stack, from the side of whoever clears up."""

    def __init__(self, settings: Settings, pool_id: str | None) -> None:
        assert settings.redis_url is not None
        self._keys = Keys(settings.namespace)
        self._pool_id = pool_id
        connect = cast("Any", Redis.from_url)  # pyright: ignore[reportUnknownMemberType]
        self._redis: Any = connect(
            settings.redis_url,
            protocol=2,
            decode_responses=False,
            socket_timeout=ANSWER_TIMEOUT_S,
            socket_connect_timeout=ANSWER_TIMEOUT_S,
            health_check_interval=0,
            retry_on_timeout=False,
        )

    async def drop_dead_processes(self, processes: Collection[Process]) -> None:
        """Delete the registrations of processes of this host that ended without a goodbye.

        They would run out by themselves, but a new stack with another model would be told that it does not
        fit to them.
        """
        for process in processes:
            host, pid = host_and_pid(process)
            if host == socket.gethostname() and pid is not None and not _is_alive(pid):
                await self._redis.delete(self._keys.process(process.stage, process.consumer))

    async def forget(self, request_ids: Collection[str]) -> None:
        """Delete all state of requests; their stages learn it at their next commit."""
        for request_id in request_ids:
            attempt = await self._redis.hget(self._keys.request(request_id), "attempt")
            await self._redis.delete(
                self._keys.request(request_id),
                self._keys.results(request_id),
                self._keys.chunks(request_id, int(attempt or 0)),
            )

    async def remove_entries(self, request_ids: Collection[str]) -> int:
        """Delete what the queues hold for requests; call it when no process of ours works on them."""
        return sum([await self._remove(stage, stream, request_ids) for stage, stream in self._streams()])

    async def count(self, stages: Collection[str] = STAGES) -> int:
        """Return how many entries there are in the queues of these stages."""
        streams = [stream for stage, stream in self._streams() if stage in stages]
        return sum([await self._redis.xlen(stream) for stream in streams])

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()

    def _streams(self) -> list[tuple[str, str]]:
        return [
            (stage, self._keys.stream(stage, priority, self._pool_id))
            for stage in STAGES
            if self._pool_id is not None or stage not in POOLED_STAGES
            for priority in PRIORITIES
        ]

    async def _remove(self, stage: str, stream: str, request_ids: Collection[str]) -> int:
        doomed: list[bytes] = []
        start = b"-"
        while entries := await self._redis.xrange(stream, start, b"+", PAGE):
            doomed += [entry_id for entry_id, fields in entries if _request_id(stage, fields[b"p"]) in request_ids]
            start = b"(" + entries[-1][0]
        if doomed:
            # Undelivered entries too: it costs the server its estimate of the lag, which nothing here reads.
            async with self._redis.pipeline(transaction=True) as together:
                together.xack(stream, stage, *doomed)
                together.xdel(stream, *doomed)
                together.hdel(self._keys.claims(stream), *doomed)
                together.hdel(self._keys.tries(stream), *doomed)
                await together.execute()
        return len(doomed)


def host_and_pid(process: Process) -> tuple[str, int | None]:
    """Return where a registered process runs; its consumer's name is host:pid:random, unless it chose one."""
    name = process.consumer.rsplit(":", 2)
    return name[0], int(name[1]) if len(name) == 3 and name[1].isdigit() else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _request_id(stage: str, payload: bytes) -> str | None:
    try:
        return unpack(payload, MESSAGES[stage]).request_id
    except WireError:
        return None  # a stage's to judge
