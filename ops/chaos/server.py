"""The stack's server, killed, frozen, emptied or set back while everybody uses it.

Owns the server's process and its keeper's, which starts it again, and the files between two lives of the server.
Knows nothing about what is stored.
"""

import asyncio
import shutil
import signal
import time
from collections.abc import Callable
from os import kill
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from ops.chaos.history import holds
from ops.chaos.processes import END_TIMEOUT_S, Stopped, is_running

AOF = "appendonlydir"
BACK_TIMEOUT_S = 60.0
POLL_S = 0.02


class ChaosServer:
    """The embedded server of a home, through a client that the caller closes."""

    def __init__(self, redis: Any, home: Path, stopped: Stopped) -> None:
        self.data = home / "valkey"
        self._redis = redis
        self._stopped = stopped

    async def pid(self) -> int:
        """Return its process id."""
        return (await self._redis.info("server"))["process_id"]

    async def memory_bytes(self) -> int:
        """Return what it uses of its memory."""
        return (await self._redis.info("memory"))["used_memory"]

    async def kill(self, change: Callable[[], None] | None = None) -> float:
        """Kill it, change its files if wanted while nobody runs on them, and return the seconds until it answers."""
        pid = await self.pid()
        keeper = _parent(pid)
        started_at = time.monotonic()
        if change is not None:
            self._stopped.stop(keeper)  # it would start the next one at once
        kill(pid, signal.SIGKILL)
        if change is not None:
            await holds(lambda: not is_running(pid), END_TIMEOUT_S, lambda: "the server did not end")
            change()
            self._stopped.resume(keeper)
        await self._back(pid)
        return time.monotonic() - started_at

    async def freeze(self) -> int:
        """Stop it with all its threads; returns whom to resume."""
        pid = await self.pid()
        self._stopped.stop(pid)
        return pid

    def empty(self) -> None:
        """Remove its files: whoever starts on them has no data."""
        shutil.rmtree(self.data / AOF)

    def copy_to(self, directory: Path) -> None:
        """Copy its files as they are now, which is a state that it was in."""
        shutil.copytree(self.data / AOF, directory)

    def set_back_to(self, directory: Path) -> None:
        """Put a copy in the place of its files."""
        self.empty()
        shutil.copytree(directory, self.data / AOF)

    async def _back(self, before: int) -> None:
        deadline = time.monotonic() + BACK_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                if await self.pid() != before:
                    return
            except (RedisError, OSError):
                pass
            await asyncio.sleep(POLL_S)
        raise TimeoutError(f"the server did not come back in {BACK_TIMEOUT_S:g} s")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
