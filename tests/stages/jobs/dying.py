"""Jobs processes that kill themselves, each at one point of one step.

Reads [namespace, url, directory, point] as JSON lines, starts a process for each, and writes [point, signal] when that
has ended. They are forks of this one, which has imported everything and has no thread; their waits are short, and they
are without what the other stages need.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest

from pipeline.batch import directory, input_index, journal
from pipeline.batch.directory import BatchDirectory
from pipeline.batch.store import BatchStore
from pipeline.logs import configure_logs
from pipeline.redis_streams import RedisStreams
from pipeline.settings import Settings
from stages.jobs import output
from stages.jobs.output import OutputFiles
from tests.stages.jobs.bench import JobsBench
from tests.stages.jobs.conftest import shorten_waits


@dataclass(frozen=True, slots=True)
class Point:
    """Right before a call, or right after it, when it is called for the num-th time."""

    owner: Any
    name: str
    num: int = 1
    after: bool = False


POINTS = {
    "validate: the index is half written": Point(input_index, "_mark_duplicates"),
    "validate: the index is in place": Point(BatchStore, "move"),
    "validate: it has begun": Point(BatchStore, "move", after=True),
    "feed: a line is fed": Point(BatchStore, "feed", 2, after=True),
    "feed: the last line is fed": Point(BatchStore, "feed", 4, after=True),
    "collect: lines without a record": Point(journal, "_write", 2),
    "collect: recorded and not acknowledged": Point(journal, "_write", 2, after=True),
    "finalise: the output is half written": Point(OutputFiles, "write", 2, after=True),
    "finalise: the output is written": Point(OutputFiles, "put_in_place"),
    "finalise: the output is in place": Point(output, "_sync_directory"),
    "finalise: the files are half removed": Point(directory.shutil, "rmtree"),
    "finalise: the files are removed": Point(BatchDirectory, "remove", after=True),
    "cancel: a line is cancelled": Point(RedisStreams, "cancel", after=True),
    "expire: a line is cancelled": Point(RedisStreams, "cancel", after=True),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: Point) -> None:
    """Put the trap in the place of the call."""
    call: Callable[..., Any] = getattr(point.owner, point.name)
    num_calls = 0

    def is_due() -> bool:
        nonlocal num_calls
        num_calls += 1
        return num_calls == point.num

    async def wait_for_it(*args: Any, **kwargs: Any) -> Any:
        due = is_due()
        if due and not point.after:
            die()
        result = await call(*args, **kwargs)
        if due:
            die()
        return result

    def do_it(*args: Any, **kwargs: Any) -> Any:
        due = is_due()
        if due and not point.after:
            die()
        result = call(*args, **kwargs)
        if due:
            die()
        return result

    setattr(point.owner, point.name, wait_for_it if iscoroutinefunction(call) else do_it)


async def work(namespace: str, url: str, directory: str) -> None:
    settings = Settings(redis_url=url, namespace=namespace, home=Path(directory) / "home")
    async with JobsBench(settings, Path(directory), None) as bench, bench.working():
        await asyncio.sleep(60)  # longer than anything lets it live


def watch(namespace: str, url: str, directory: str, point: str) -> None:
    """Start one and say how it ended."""
    victim = os.fork()
    if victim == 0:
        arm(POINTS[point])
        asyncio.run(work(namespace, url, directory))
        os._exit(1)
    _, status = os.waitpid(victim, 0)
    os.write(sys.stdout.fileno(), f"{json.dumps([point, os.waitstatus_to_exitcode(status)])}\n".encode())


if __name__ == "__main__":
    configure_logs("jobs", "error")
    shorten_waits(pytest.MonkeyPatch())
    for line in sys.stdin:
        if os.fork() == 0:
            watch(*json.loads(line))
            os._exit(0)
