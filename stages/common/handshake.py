"""Processes announce what their bits depend on, and refuse to work beside one that would compute others.

A registration is also how the supervisor sees that a process is ready, and how anybody sees that it is alive, which
pool it reaches and how much it takes (capacity.py). It is a msgpack map:

    parts   map of what must agree      pool    id of its pool, or nil
    slots   decode: most requests at a time     pages   decode: of its KV cache
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgpack
import structlog

from pipeline.errors import ServerError, SluiceError
from pipeline.transport import Process, Transport

log = structlog.get_logger("handshake")

REGISTRATION_TTL_S = 15.0  # a killed process is forgotten after this
_RENEWALS_PER_TTL = 3  # two may fail


class FingerprintMismatch(SluiceError):  # noqa: N818 - reads as the fact it states
    """Another live process of this stack would compute other bits."""

    code = "fingerprint_mismatch"

    def __init__(self, part: str, ours: str, theirs: str, other: Process) -> None:
        super().__init__(
            f"this process has {part} {ours}, but {other.stage} ({other.consumer}) has {theirs}; "
            f"all processes of a stack need the same"
        )
        self.part = part


class Registration:
    """One process's announcement."""

    def __init__(
        self,
        transport: Transport,
        stage: str,
        parts: Mapping[str, str],
        pool_id: str | None = None,
        *,
        capacity: Mapping[str, int] | None = None,
    ) -> None:
        """Prepare it.

        Args:
            transport: Registers.
            stage: The stage's word.
            parts: What must agree; a part that another process does not name is not compared.
            pool_id: The pool that this process reaches.
            capacity: How much it takes at a time, where others go by it: `slots` and `pages` of decode.
        """
        self._transport = transport
        self._stage = stage
        self._parts = dict(parts)
        self._info = msgpack.packb({"parts": self._parts, "pool": pool_id, **(capacity or {})}) or b""

    async def announce(self) -> None:
        """Register, then compare with everybody: of two that start together, both see the difference.

        Raises:
            FingerprintMismatch: It names the part.
        """
        await self._transport.register(self._stage, self._info, REGISTRATION_TTL_S)
        for other in await self._transport.processes():
            theirs = read_announcement(other).parts
            for part, ours in self._parts.items():
                if theirs.get(part, ours) != ours:
                    raise FingerprintMismatch(part, ours, theirs[part], other)

    async def keep(self) -> None:
        """Renew the registration until cancelled; an unreachable server is tried again next time.

        Raises:
            FingerprintMismatch: While this registration had lapsed, a process that computes other bits came in.
        """
        while True:
            await asyncio.sleep(REGISTRATION_TTL_S / _RENEWALS_PER_TTL)
            try:
                await self.announce()
            except ServerError as error:
                if not error.retryable:
                    raise
                log.warning("registration_not_renewed", problem=str(error))


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a process said of itself; what it did not say, or not in our words, is left out."""

    parts: Mapping[str, str] = field(default_factory=dict[str, str])
    pool_id: str | None = None
    slots: int = 0
    pages: int = 0


def read_announcement(process: Process) -> Announcement:
    """Return what another process announced; it may be of another version, or no process of ours."""
    try:
        info = msgpack.unpackb(process.info)
    except (ValueError, TypeError, msgpack.UnpackException):
        return Announcement()
    if not isinstance(info, dict):
        return Announcement()
    parts, pool_id = info.get("parts"), info.get("pool")
    return Announcement(
        parts=parts if isinstance(parts, dict) else {},
        pool_id=pool_id if isinstance(pool_id, str) else None,
        slots=_count(info.get("slots")),
        pages=_count(info.get("pages")),
    )


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
