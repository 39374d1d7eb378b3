"""Leases kept by a process of their own, for stages whose engine may hold the interpreter for longer than a lease.

Owns that process and the line to it. What it does with leases is leases.py's, as everywhere. It is forked before the
stage has threads or an engine, so it costs a few pages, and it has one connection to the server.

    stage      hold, drop, moved  -->  heartbeat    renews under the stage's name, and stops renewing when the stage
               <--  lost                            has not moved for long; ends when the line does, so it never
                                                    keeps the work of a stage that is dead

A stage that hangs for good is killed by its heartbeat: its own loop may not run any more.
"""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, NoReturn, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import structlog
from redis.asyncio import Redis

from pipeline.connect import connection_pool
from pipeline.errors import SluiceError
from pipeline.keys import Keys
from pipeline.leases import RENEWALS_PER_LEASE, LeaseKeeper, claim_of
from pipeline.redis_calls import RedisCalls
from pipeline.renewal import RedisRenewal
from pipeline.server_url import read_address
from pipeline.settings import Settings
from pipeline.transport import Delivery

READ_BYTES = 64 * 1024
NUM_CONNECTIONS = 1  # there is one renewal at a time
MAX_FRAME_BYTES = 1024 * 1024  # a delivery without its payload has a few hundred

log = structlog.get_logger("heartbeat")


class HeartbeatLost(SluiceError):  # noqa: N818 - reads as the fact it states
    """The process that keeps this one's leases has ended."""

    retryable = True
    code = "heartbeat_lost"


class Heartbeat:
    """The stage's end of the line: a LeaseKeeper that others see no difference to."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, consumer: str, lease_s: float
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._beat_s = lease_s / (2 * RENEWALS_PER_LEASE)  # seldom late for a renewal
        self._held: dict[tuple[str, str, str], Delivery] = {}
        self._has_moved = False
        self._send("consumer", consumer)

    @classmethod
    async def open(cls, line: socket.socket, consumer: str, lease_s: float) -> "Heartbeat":
        """Take over the line that fork_heartbeat returned; run() closes it."""
        reader, writer = await asyncio.open_unix_connection(sock=line)
        return cls(reader, writer, consumer, lease_s)

    def hold(self, delivery: Delivery) -> None:
        """Renew this delivery from now on."""
        self._held[claim_of(delivery)] = delivery
        self._send("hold", delivery.stage, *claim_of(delivery))

    def drop(self, delivery: Delivery) -> None:
        """Renew it no more: it is done, given up, or left to its lease."""
        if self._held.pop(claim_of(delivery), None) is not None:
            self._send("drop", delivery.stage, *claim_of(delivery))

    def holds(self, delivery: Delivery) -> bool:
        """Return whether it is being renewed; False after it was found lost."""
        return claim_of(delivery) in self._held

    def progressed(self) -> None:
        """Note that the work moves; may be called from any thread."""
        self._has_moved = True

    async def run(self) -> None:
        """Pass on what moves, until cancelled.

        Raises:
            HeartbeatLost: the other process has ended.
        """
        reading = asyncio.create_task(self._read())
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=self._beat_s)
                if self._has_moved:
                    self._has_moved = False
                    self._send("moved")
            raise HeartbeatLost("the process that keeps the leases of this one has ended")
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._writer.close()

    def _send(self, *frame: str) -> None:
        self._writer.write(_packed(*frame))

    async def _read(self) -> None:
        async for _, _, stream, entry_id, nonce in _frames(self._reader):
            self._held.pop((stream, entry_id, nonce), None)


def fork_heartbeat(settings: Settings) -> socket.socket:
    """Start the heartbeat of this process, and return the line to it. Call it before there are threads or a loop."""
    ours, theirs = socket.socketpair()
    stage = os.getpid()
    if os.fork() == 0:
        ours.close()
        _beat_until_the_end(theirs, settings, stage)
    theirs.close()
    return ours


def _beat_until_the_end(line: socket.socket, settings: Settings, stage: int) -> NoReturn:
    # Signals to the group are for the stage, which closes the line when it has finished.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    status = os.EX_SOFTWARE
    try:
        asyncio.run(_beat(line, settings, stage))
        status = os.EX_OK
    finally:
        os._exit(status)  # what the stage registered for its end is not this process's to run


async def _beat(line: socket.socket, settings: Settings, stage: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=line)
    # The calls bound their answers themselves (redis_calls.py): a cancellation must end them, or this never ends.
    client = Redis.from_pool(connection_pool(settings.redis_url or "", NUM_CONNECTIONS, answer_timeout_s=None))
    address = read_address(settings.redis_url or "").shown
    # Longer than a lease would be in vain, as for every call of the stage.
    calls = RedisCalls(client, address, settings.lease_s)
    try:
        frames = _frames(reader)
        _, consumer = await anext(frames)
        keeper = LeaseKeeper(
            RedisRenewal(calls, Keys(settings.namespace), consumer),
            settings.lease_s,
            _told(writer),
            lambda: _end_hung(stage),
        )
        async with asyncio.TaskGroup() as tasks:  # if either ends, so does this process, and the stage is told
            beating = tasks.create_task(keeper.run())
            async for frame in frames:
                _apply(keeper, *frame)
            beating.cancel()
    except StopAsyncIteration:  # the stage ended before it began
        pass
    finally:
        writer.close()
        await client.aclose()


def _apply(
    keeper: LeaseKeeper, verb: str, stage: str = "", stream: str = "", entry_id: str = "", nonce: str = ""
) -> None:
    delivery = Delivery(stage, stream, entry_id, nonce, b"", 0)
    match verb:
        case "hold":
            keeper.hold(delivery)
        case "drop":
            keeper.drop(delivery)
        case _:
            keeper.progressed()


def _told(writer: asyncio.StreamWriter) -> Callable[[Delivery], None]:
    def on_lost(delivery: Delivery) -> None:
        writer.write(_packed("lost", delivery.stage, *claim_of(delivery)))

    return on_lost


def _end_hung(stage: int) -> None:
    """End the stage, so that a supervisor starts one that works; its leases have run out by now."""
    log.error("process_hung", pid=stage)
    if os.getppid() == stage:
        os.kill(stage, signal.SIGKILL)  # a thread that hangs in native code hears nothing else


def _packed(*words: str) -> bytes:
    return cast("bytes", msgpack.packb(words))  # pyright: ignore[reportUnknownMemberType]


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[list[str]]:
    """Yield what the other end sends until it closes the line."""
    unpacker = cast("Any", msgpack.Unpacker(max_buffer_size=MAX_FRAME_BYTES))  # pyright: ignore[reportUnknownMemberType]
    with suppress(ConnectionError):
        while data := await reader.read(READ_BYTES):
            unpacker.feed(data)
            for frame in unpacker:
                yield frame
