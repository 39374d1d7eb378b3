"""Whole stacks of real processes for tests: each with a home and a pool of its own, and nothing of it left after."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest
from redis.asyncio import Redis

from kv_store.pool import FilePool
from ops.server.valkey import EmbeddedValkey
from ops.serving import Serving
from ops.stack import Stack
from ops.supervision.crashes import RestartPolicy
from pipeline.batch.results import Completion
from pipeline.client.answers import Answer
from pipeline.client.asks import NewRequest
from pipeline.messages import Delta, TokenLogprobs
from pipeline.params import parse_params
from pipeline.settings import PREFIX, Settings

DEADLINE_S = 60.0  # starting a process imports torch, on a machine that may be busy
POLL_S = 0.001
QUICK = RestartPolicy(first_delay_s=0.05, max_delay_s=0.2)


@dataclass(frozen=True, slots=True)
class Result:
    """What must not depend on how, or how often, the work was done."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str

    @classmethod
    def of(cls, answer: Answer) -> "Result":
        done = answer.outcome
        assert isinstance(done, Completion), done
        return cls(done.token_ids, done.text, done.logprobs, done.finish_reason)


@asynccontextmanager
async def running_stack(
    caches: Path, replicas: Mapping[str, int] | None = None, models: Mapping[str, Path] | None = None, **fields: object
) -> AsyncIterator[Stack]:
    """Run a stack in a new home; when it has stopped, nothing of it may be left.

    Args:
        caches: compiled code and folded weights, shared among homes.
        replicas: processes of each stage.
        models: files to link into the home, by name.
        fields: settings.
    """
    # Short, because a socket's path has at most 107 bytes.
    home, pool = Path(tempfile.mkdtemp(prefix="sl-")), Path(tempfile.mkdtemp(prefix="sl-pool-", dir=_memory()))
    warnings: list[str] = []
    try:
        (home / "cache").symlink_to(caches)
        (home / "models").mkdir()
        for name, path in (models or {}).items():
            (home / "models" / f"{name}.gguf").symlink_to(path)
        stack = Stack(new_settings(home=home, kv_pool_dir=pool, **fields), replicas, policy=QUICK, warn=warnings.append)
        async with stack:
            pids: set[int] = set()
            try:
                yield stack
            finally:
                pids |= set(pids_of(stack).values())
        assert warnings == []
        assert [pid for pid in pids if _exists(pid)] == []
        assert not (home / "valkey" / "server.sock").exists()
        assert blobs_in(stack.settings) == []
        assert await _keys_that_stay(home) == []
    finally:
        shutil.rmtree(home)
        shutil.rmtree(pool)


def new_settings(**fields: object) -> Settings:
    """Settings with these fields and defaults, whatever this process's environment says."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            patch.delenv(name)
        return Settings(**fields)  # pyright: ignore[reportArgumentType] - validated here


def ask(stack: Serving, prompt: str, max_tokens: int, *, speculate: bool = True, **params: object) -> NewRequest:
    """A request of this stack's model; greedy with seed 1 unless it says otherwise."""
    values = {"seed": 1, "temperature": 0.0, "max_tokens": max_tokens} | params
    return NewRequest(stack.settings.model, prompt, None, parse_params(values), speculate)


async def results_of(
    stack: Serving, asks: Sequence[NewRequest], on_delta: Callable[[Delta], None] = lambda _: None
) -> list[Result]:
    """Send requests all at once; their results."""
    client = stack.client(stall_timeout_s=DEADLINE_S)
    answers = (client.answer(one, "interactive", on_delta) for one in asks)
    return [Result.of(answer) for answer in await stack.watched(_gathered(answers))]


def pids_of(stack: Stack) -> dict[str, int]:
    """The processes of a stack that run at the moment, by name."""
    assert stack.supervisor is not None
    return {state.name: state.pid for state in stack.supervisor.states() if state.pid is not None}


def num_restarts(stack: Stack) -> dict[str, int]:
    assert stack.supervisor is not None
    return {state.name: state.num_restarts for state in stack.supervisor.states()}


async def all_ready(stack: Stack) -> None:
    """Return when every process runs and has registered."""
    assert stack.supervisor is not None
    supervisor = stack.supervisor
    await holds(lambda: all(state.ready for state in supervisor.states()))


async def holds(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; fail when it does not come to hold."""
    deadline = monotonic() + DEADLINE_S
    while not condition():
        assert monotonic() < deadline, "it did not come to hold"
        await asyncio.sleep(POLL_S)


def pool_of(settings: Settings) -> FilePool:
    return FilePool.open(settings.pool_dir, settings.kv_pool_bytes)


def blobs_in(settings: Settings) -> list[str]:
    with pool_of(settings) as pool:
        return pool.names()


async def _gathered(answers):
    return await asyncio.gather(*answers)


async def _keys_that_stay(home: Path) -> list[str]:
    """What a server started again in this home still has, other than empty work streams and what runs out."""
    server = EmbeddedValkey(home)
    client = Redis.from_url(await server.start(), protocol=2)
    try:
        found: list[str] = []
        async for key in client.scan_iter():
            name = key.decode()
            if await client.ttl(name) >= 0:
                continue
            if ":stream:" not in name or await client.type(name) != b"stream":
                found.append(f"{name} has no TTL")
            elif length := await client.xlen(name):
                found.append(f"{name} holds {length} entries")
        return found
    finally:
        await client.aclose()
        await server.stop()


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
