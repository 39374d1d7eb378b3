"""A server for machines (test_protocol_machine.py): its clients, their loop, and a connection that loses replies."""

import asyncio
import secrets
from collections.abc import Coroutine
from itertools import count
from typing import Any, TypeVar

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from pipeline.errors import ServerUnreachable
from pipeline.keys import Keys
from pipeline.redis_streams import RedisStreams
from pipeline.transport import TransportOptions
from tests.leftovers import delete_keys
from tests.pipeline.protocol_model import Entry, Picture, Queue, Who
from tests.pipeline.protocol_view import LEASE_MS, SCRIPT, read_picture

LONG_AGO_MS = 10 * LEASE_MS
LEASE_S = LEASE_MS / 1000  # none ends by itself: the machine says when

T = TypeVar("T")


class RecordingRedis(Redis):
    """Remembers what it sent last; told to, it carries a command out and pretends that the reply was lost."""

    last_words: tuple[Any, ...] = ()
    loses_reply = False

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        reply = await super().execute_command(*words, **options)
        self.last_words = words
        if self.loses_reply:
            self.loses_reply = False
            raise RedisConnectionError("the connection was reset")
        return reply

    def last_args(self) -> tuple[Any, ...]:
        """The arguments of the script that it ran last."""
        return self.last_words[3 + int(self.last_words[2]) :]


class Ground:
    """One after the other, machines use it, each in a namespace of its own."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.commands = RecordingRedis.from_url(url, protocol=2)
        self.raw: Any = Redis.from_url(url, protocol=2)
        self._readers = Redis.from_url(url, protocol=2)
        self._names: list[str] = []
        self._script = self.run(self.raw.script_load(SCRIPT))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def new_keys(self) -> Keys:
        self._names.append(f"m{secrets.token_hex(6)}")
        return Keys(self._names[-1])

    def transport(self, who: Who, keys: Keys, max_queue: int) -> RedisStreams:
        """A consumer whose sweeps are always due, and whose patience for a lost reply is always at its end."""
        options = TransportOptions(who.name, who.pool, lease_s=LEASE_S, max_queue=max_queue)
        readings = count(0, 1000)
        return RedisStreams(
            self.commands, self._readers, "test", options, keys, monotonic=lambda: float(next(readings))
        )

    async def lost(self, call: Coroutine[Any, Any, Any]) -> None:
        """Make a call whose reply is lost."""
        self.commands.loses_reply = True
        with pytest.raises(ServerUnreachable):
            await call

    async def look_at(self, keys: Keys) -> Picture:
        """Everything that is there."""
        return read_picture(await self.raw.evalsha(self._script, 0, f"{keys.namespace}:*"), keys)

    async def end_lease(self, keys: Keys, entry: Entry) -> None:
        """Let the lease of an entry that is held be over."""
        stream = keys.stream(*entry.queue)
        for entry_id, fields in await self.raw.xrange(stream):
            if fields[b"p"] == entry.payload:
                await self.raw.xclaim(
                    stream, entry.queue[0], entry.holder, 0, [entry_id], idle=LONG_AGO_MS, justid=True
                )

    async def destroy_group(self, keys: Keys, queue: Queue) -> None:
        """Do it behind the transport's back."""
        stream = keys.stream(*queue)
        if await self.raw.exists(stream):
            await self.raw.xgroup_destroy(stream, queue[0])

    async def next_millisecond(self) -> None:
        """Wait until an entry cannot get the id of one that is gone with its stream."""
        began_at = await self.raw.time()
        while await self.raw.time() < (began_at[0], began_at[1] - began_at[1] % 1000 + 1000):
            pass

    async def clear(self) -> None:
        """Delete what is left of all machines."""
        while self._names:
            await delete_keys(self.raw, self._names.pop())

    def close(self) -> None:
        self.run(self.clear())
        for client in (self.commands, self._readers, self.raw):
            self.run(client.aclose())
        self._loop.close()
