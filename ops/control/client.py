"""Asking the `sluice up` of a home what runs there, and for more or fewer processes.

Owns the client's side of the control channel and its patience. Knows nothing about how processes are run:
server.py answers.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from ops.control.messages import (
    CONTROL_SOCKET,
    MAX_ANSWER_BYTES,
    MAX_WAIT_S,
    ErrorAnswer,
    ScaleRequest,
    StatusRequest,
    read_answer,
    write_line,
)
from ops.server.sockets import check_socket, socket_directory
from ops.supervision.slot_status import SlotStatus
from pipeline.errors import InvalidRequest, SluiceError

ANSWER_TIMEOUT_S = 10.0  # on top of what the request itself may take


class NotUp(SluiceError):  # noqa: N818 - reads as the fact it states
    """No `sluice up` runs in this home, or it does not answer."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "not_up"


class NotNow(SluiceError):  # noqa: N818
    """`sluice up` could not do what it was asked; the same may work later."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "not_now"


class Refused(SluiceError):  # noqa: N818
    """`sluice up` will never do what it was asked."""

    code: ClassVar[str] = "refused"


async def ask_status(home: Path) -> list[SlotStatus] | None:
    """Return what runs in a home, in the order of the Procfile; None where no `sluice up` does.

    A stack that is just starting may have no processes yet.

    Raises:
        NotUp: there is one, and it does not answer.
        UnsafePlace: its socket is open to others.
    """
    try:
        return await _ask(home, StatusRequest(), ANSWER_TIMEOUT_S)
    except (FileNotFoundError, ConnectionRefusedError):
        return None


async def ask_scale(home: Path, replicas: Mapping[str, int], timeout_s: float) -> list[SlotStatus]:
    """Have so many processes of some stages, and return what runs when all of them are ready or gone.

    After timeout_s seconds it returns what runs then; the change goes on.

    Raises:
        NotUp: no `sluice up` runs in this home.
        Refused: a stage that it does not have, or a number that it does not allow.
        NotNow: it is starting or stopping, or a new process did not stay up.
        UnsafePlace: its socket is open to others.
    """
    if not 0 < timeout_s <= MAX_WAIT_S:
        raise InvalidRequest("timeout", f"is {timeout_s:g} s, allowed are more than 0 to {MAX_WAIT_S:g}")
    request = ScaleRequest(replicas=dict(replicas), timeout_s=timeout_s)
    try:
        return await _ask(home, request, timeout_s + ANSWER_TIMEOUT_S)
    except (FileNotFoundError, ConnectionRefusedError):
        raise not_up(home) from None


def not_up(home: Path) -> NotUp:
    """Return what to say where ask_status() returns None and something had to be there."""
    return NotUp(f"no `sluice up` runs in {home}")


async def _ask(home: Path, request: StatusRequest | ScaleRequest, timeout_s: float) -> list[SlotStatus]:
    path = socket_directory(home, CONTROL_SOCKET) / CONTROL_SOCKET
    check_socket(path)
    try:
        async with asyncio.timeout(timeout_s):
            line = await _exchange(path, write_line(request))
    except TimeoutError:
        raise NotUp(f"`sluice up` in {home} did not answer in {timeout_s:.0f} s") from None
    if not line:
        raise NotUp(f"`sluice up` in {home} ended before it answered")
    answer = read_answer(line)
    if isinstance(answer, ErrorAnswer):
        raise (NotNow if answer.retryable else Refused)(answer.error)
    return list(answer.slots)


async def _exchange(path: Path, line: bytes) -> bytes:
    """Send a line and return the one that comes back, empty where none does."""
    reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_ANSWER_BYTES)
    try:
        writer.write(line)
        return await reader.readline()
    except ConnectionError:  # reset, or a broken pipe where it ended before the line was written
        return b""
    finally:
        writer.close()
