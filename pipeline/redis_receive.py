"""Taking entries of one stage: when to ask, when to sweep for ended leases, and how to wait.

Owns what has to be remembered between calls. Knows nothing about what happens to entries afterwards; who
gets which entry is decided in scripts/receive.lua.

Waiting is a plain XREAD behind the last delivered id. It takes nothing, it only rings: so priorities and
max_items hold exactly, and an entry can never be delivered to a waiter that has just gone away.
"""

import asyncio
import secrets
from typing import Any

from redis.asyncio import Redis

from pipeline.clock import Monotonic
from pipeline.keys import HANDBACK, SWEEPS_PER_LEASE, Keys, lanes_of
from pipeline.redis_calls import LOST, Arg, RedisCalls, read_stream
from pipeline.transport import Delivery, TransportOptions

BLOCK_SLICE_S = 1.0  # longest single wait on the server, far below ANSWER_TIMEOUT_S; hand-backs show within it
MAX_RECEIVE = 1_000  # bounds what one script call does
FAILED_WAIT_PAUSE_S = 0.05  # the next claim waits for the server properly; this only bounds how often
START = "0-0"


class StageReceiver:
    """The reading end of one stage in one process; one call at a time."""

    def __init__(
        self,
        stage: str,
        calls: RedisCalls,
        readers: Redis,
        options: TransportOptions,
        keys: Keys,
        monotonic: Monotonic,
    ) -> None:
        self.streams: list[str] = [keys.stream(stage, lane, options.pool_id) for lane in lanes_of(stage)]
        self._stage = stage
        self._calls = calls
        self._readers = readers
        self._options = options
        self._monotonic = monotonic
        self._script_keys: list[str] = []
        for stream in self.streams:
            self._script_keys += [stream, keys.claims(stream), keys.tries(stream)]
        self._cursors = [START for _ in self.streams]
        self._sweep_at = monotonic()
        # Set while a reply is awaited. Still set at the next call (after an error, or when the call was
        # cancelled), it means that entries may be claimed under it that nobody has seen.
        self._open_nonce: str | None = None

    async def receive(self, max_items: int, block_s: float) -> list[Delivery]:
        """See Transport.receive."""
        if not 1 <= max_items <= MAX_RECEIVE:
            raise ValueError(f"max_items is {max_items}, allowed are 1 to {MAX_RECEIVE}")
        deadline = self._monotonic() + block_s
        while True:
            deliveries, bells = await self._claim(max_items)
            left_s = deadline - self._monotonic()
            if deliveries or left_s <= 0:
                return deliveries
            rang = await self._wait(bells, left_s)
            if not rang and self._monotonic() >= deadline:
                return []  # the next call asks first; asking here as well would be twice for each wait

    async def _claim(self, max_items: int) -> tuple[list[Delivery], list[bytes]]:
        nonce, resent = self._open_nonce or secrets.token_hex(16), self._open_nonce is not None
        self._open_nonce = nonce
        lease_ms = max(1, round(1000 * self._options.lease_s))
        head: list[Arg] = [self._stage, self._options.consumer, HANDBACK, nonce, max_items, lease_ms]
        cursors = self._due_cursors()
        reply: list[Any] = await self._calls.script(
            "receive", self._script_keys, [*head, int(resent), *cursors], [*head, 1, *cursors]
        )
        self._open_nonce = None
        entries, next_cursors, bells = reply
        self._cursors = [cursor.decode() or START for cursor in next_cursors]
        return [self._delivery(entry, nonce) for entry in entries], bells

    def _delivery(self, entry: tuple[int, bytes, bytes, int], nonce: str) -> Delivery:
        number, entry_id, payload, tries = entry
        stream = self.streams[number - 1]
        return Delivery(self._stage, stream, entry_id.decode(), nonce, payload, tries, self._options.consumer)

    def _due_cursors(self) -> list[str]:
        """Return where to sweep: one that is under way goes on, a new one starts a few times per lease."""
        if self._monotonic() >= self._sweep_at:
            self._sweep_at = self._monotonic() + self._options.lease_s / SWEEPS_PER_LEASE
            return self._cursors
        return ["" if cursor == START else cursor for cursor in self._cursors]

    async def _wait(self, bells: list[bytes], left_s: float) -> bool:
        """Wait for a new entry; whether there is one."""
        slice_s = min(left_s, BLOCK_SLICE_S, self._options.lease_s / SWEEPS_PER_LEASE)
        try:
            return bool(await read_stream(self._readers, dict(zip(self.streams, bells, strict=True)), 1, slice_s))
        except LOST:
            await asyncio.sleep(FAILED_WAIT_PAUSE_S)
            return False
