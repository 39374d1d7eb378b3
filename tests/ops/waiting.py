"""Waiting for states of other processes, with a deadline."""

import asyncio
import os
import select
import time
from collections.abc import Callable

DEADLINE_S = 30.0
POLL_S = 0.01


def wait_for_end(pid: int) -> None:
    """Return when the process, which need not be our child, has ended; fail when it does not."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([descriptor], [], [], DEADLINE_S)
        assert ready, f"process {pid} is still there after {DEADLINE_S} s"
    finally:
        os.close(descriptor)


async def holds(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; fail when it does not come to hold."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to hold"
        await asyncio.sleep(POLL_S)
