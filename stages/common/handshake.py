"""Processes announce what their bits depend on, and refuse to work beside one that would compute others.

A registration is also how the supervisor sees that a process is ready, and how anybody sees that it is alive.
"""

import asyncio
from collections.abc import Mapping

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

    def __init__(self, transport: Transport, stage: str, parts: Mapping[str, str]) -> None:
        """Prepare it: `parts` names what must agree; a part that another process does not name is not compared."""
        self._transport = transport
        self._stage = stage
        self._parts = dict(parts)
        self._info = msgpack.packb({"parts": self._parts}) or b""

    async def announce(self) -> None:
        """Register, then compare with everybody: of two that start together, both see the difference.

        Raises:
            FingerprintMismatch: It names the part.
        """
        await self._transport.register(self._stage, self._info, REGISTRATION_TTL_S)
        for other in await self._transport.processes():
            theirs = _parts(other)
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


def _parts(process: Process) -> Mapping[str, str]:
    """What another process announced; one that says nothing that we know has nothing to agree on."""
    try:
        info = msgpack.unpackb(process.info)
    except (ValueError, msgpack.UnpackException):
        return {}
    parts = info.get("parts") if isinstance(info, dict) else None
    return parts if isinstance(parts, dict) else {}
