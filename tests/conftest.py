"""Fixtures for every test: one real server per session, and a namespace of its own for each test."""

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import structlog
from redis.asyncio import Redis

from stages.engine.kernel_cache import kernel_cache
from tests.servers import running_valkey

# Before any test imports numba, which reads it once: the kernels that `make setup` compiled for this home.
HOME = Path(os.environ.get("SLUICE_HOME", "~/.sluice")).expanduser()
os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_cache(HOME)))

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests that press Ctrl-C would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _plain_logs() -> None:
    """Log lines as JSON: the default renders every traceback for a terminal, which takes seconds."""
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(),
    )


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for the name of a socket."""
    directory = Path(tempfile.mkdtemp(prefix="sl-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """The address of a real server that stores nothing and evicts nothing; it dies with the test run."""
    directory = Path(tempfile.mkdtemp(prefix="sl-"))
    with running_valkey(directory) as server:
        yield server.url
    shutil.rmtree(directory)


@pytest.fixture
async def raw_redis(valkey_url: str) -> AsyncIterator[Redis]:
    """A plain client, to look at the server behind the transport's back."""
    client = Redis.from_url(valkey_url, protocol=2)
    yield client
    await client.aclose()


@pytest.fixture
async def namespace(raw_redis: Redis) -> AsyncIterator[str]:
    """A prefix that no other test uses; its keys are deleted afterwards."""
    name = f"t{secrets.token_hex(6)}"
    yield name
    keys = [key async for key in raw_redis.scan_iter(match=f"{name}:*")]
    if keys:
        await raw_redis.delete(*keys)


@pytest.fixture
def leftovers(raw_redis: Redis, namespace: str) -> Callable[[], Awaitable[list[str]]]:
    """Return the keys of this test's namespace that would stay for ever, with what is wrong.

    Empty work streams may stay; anything in them or pending may not, and every other key needs a TTL.
    """

    async def look() -> list[str]:
        found: list[str] = []
        async for key in raw_redis.scan_iter(match=f"{namespace}:*"):
            name = key.decode()
            if await raw_redis.ttl(name) >= 0:
                continue
            if not name.startswith(f"{namespace}:stream:") or await raw_redis.type(name) != b"stream":
                found.append(f"{name} has no TTL")
            elif length := await raw_redis.xlen(name):
                found.append(f"{name} holds {length} entries")
            else:
                groups = await raw_redis.xinfo_groups(name)
                found += [f"{name} has pending entries" for group in groups if group["pending"]]
        return found

    return look
