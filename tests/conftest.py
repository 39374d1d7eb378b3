"""Fixtures for every test: one real server per session, and a namespace of its own for each test."""

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import structlog
from redis.asyncio import Redis

from stages.engine.kernel_cache import kernel_cache
from tests.leftovers import delete_keys, keys_that_stay
from tests.servers import SERVER_KINDS, ServerKind, is_installed, server_of_its_own

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


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest --server=redis-server tests/pipeline` runs the transport's tests on Debian's server."""
    parser.addoption("--server", choices=SERVER_KINDS, default="valkey", help="The server that tests talk to.")


def pytest_configure(config: pytest.Config) -> None:
    """Asked for by name, a server that is missing is a failure and not a reason to skip."""
    kind = cast("ServerKind", config.getoption("--server"))
    if not is_installed(kind):
        raise pytest.UsageError(f"--server={kind}: it is not installed")


@pytest.fixture(scope="session")
def server_kind(pytestconfig: pytest.Config) -> ServerKind:
    """The server that this test run was asked for."""
    return cast("ServerKind", pytestconfig.getoption("--server"))


@pytest.fixture(scope="session")
def valkey_url(server_kind: ServerKind) -> Iterator[str]:
    """The address of a real server that stores nothing and evicts nothing; it dies with the test run."""
    with server_of_its_own(server_kind) as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_server_url() -> Iterator[str]:
    """The address of Debian's redis-server, likewise; skips where there is none."""
    with server_of_its_own("redis-server") as server:
        yield server.url


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
    await delete_keys(raw_redis, name)


@pytest.fixture
def leftovers(raw_redis: Redis, namespace: str) -> Callable[[], Awaitable[list[str]]]:
    """Return the keys of this test's namespace that would stay for ever, with what is wrong."""
    return partial(keys_that_stay, raw_redis, namespace)
