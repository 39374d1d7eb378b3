"""Clears up behind a stack: entries of requests that were cancelled, and registrations of processes that died.

Owns the removal, and the count of what is left in the queues. Knows nothing about stages beyond which message lies in
whose stream.

A cancelled request's entry stays in its stream until a stage takes it and is told so. Where no stage will, at the end
of a stack, it is removed here.
"""

import os
import socket
from collections.abc import Collection
from typing import Any

from pipeline.connect import host_and_pid, open_client
from pipeline.errors import WireError
from pipeline.keys import STAGES, Keys
from pipeline.messages import MESSAGES
from pipeline.queue_state import queues_of
from pipeline.settings import Settings
from pipeline.transport import Process
from pipeline.wire import unpack

PAGE = 500  # entries read at a time


class Leftovers:
    """The queues of one stack, from the side of whoever clears up."""

    def __init__(self, settings: Settings, pool_id: str | None) -> None:
        self._keys = Keys(settings.namespace)
        self._pool_id = pool_id
        self._redis: Any = open_client(settings)

    async def drop_dead_processes(self, processes: Collection[Process]) -> None:
        """Delete the registrations of processes of this host that ended without a goodbye.

        They would run out by themselves, but a new stack with another model would be told that it does not
        fit to them.
        """
        for process in processes:
            if is_dead_here(process):
                await self._redis.delete(self._keys.process(process.stage, process.consumer))

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
            (stage, self._keys.stream(stage, priority, self._pool_id)) for stage, priority in queues_of(self._pool_id)
        ]

    async def _remove(self, stage: str, stream: str, request_ids: Collection[str]) -> int:
        doomed: list[bytes] = []
        start = b"-"
        while entries := await self._redis.xrange(stream, start, b"+", PAGE):
            doomed += [
                entry_id for entry_id, fields in entries if _request_id(stage, fields.get(b"p", b"")) in request_ids
            ]
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


def is_dead_here(process: Process) -> bool:
    """Return whether a registered process was one of this host and has ended without a goodbye."""
    return has_died_here(process.consumer)


def has_died_here(consumer: str) -> bool:
    """Return whether a consumer's name is that of a process of this host that does not run any more."""
    host, pid = host_and_pid(consumer)
    return host == socket.gethostname() and pid is not None and not _is_alive(pid)


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
