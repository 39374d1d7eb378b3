"""Opens the transport, or a plain client, to the server of the settings.

Owns every option of the client. Knows nothing about queues, about how an address is read (server_url.py) or
about what a server must be (server_check.py).
"""

import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.asyncio.connection import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pipeline.errors import ServerUrlInvalid
from pipeline.keys import Keys
from pipeline.redis_calls import ANSWER_TIMEOUT_S
from pipeline.redis_results import MAX_READS
from pipeline.redis_streams import RedisStreams
from pipeline.server_check import check_server
from pipeline.server_url import VARIABLE, connection_options, read_address
from pipeline.settings import Settings
from pipeline.transport import TransportOptions

NUM_COMMAND_CONNECTIONS = 32
NUM_READER_CONNECTIONS = MAX_READS + 16  # one for each stage that a process serves, and for reads that do not wait
NUM_PLAIN_CONNECTIONS = 4
START_PATIENCE_S = 5.0  # a server that is restarted answers again in this time, and a person with a typo still waits

log = structlog.get_logger(__name__)


async def open_transport(
    settings: Settings,
    *,
    consumer: str | None = None,
    pool_id: str | None = None,
    warn: Callable[[str], None] | None = None,
) -> RedisStreams:
    """Return a transport to the server of the settings, checked; close() it.

    Args:
        settings: Where the server is, and the bounds of the queues.
        consumer: The name of this process; a unique one by default.
        pool_id: The pool this process reaches; needed by prefill, compressor and decode.
        warn: Gets a sentence for what an operator should know about the server, but which stops nothing;
            without it, that is logged.

    A server that nobody answers for is asked again for START_PATIENCE_S, or a lease where that is shorter: it may be
    restarting.

    Raises:
        ServerError: One of its kinds that says what to do; see errors.py.
    """
    url = _url(settings)
    where = read_address(url)
    options = TransportOptions(
        consumer=consumer or unique_consumer(),
        pool_id=pool_id,
        lease_s=settings.lease_s,
        max_queue=settings.max_queue,
        result_ttl_s=settings.result_ttl_s,
        strict=settings.durability == "strict",
    )
    commands = _client(url, NUM_COMMAND_CONNECTIONS)
    readers = _client(url, NUM_READER_CONNECTIONS)
    try:
        patience_s = min(START_PATIENCE_S, settings.lease_s)
        checking = check_server(commands, where, settings.namespace, strict=options.strict, patience_s=patience_s)
        for warning in await checking:
            (warn or _log)(warning)
    except BaseException:
        await commands.aclose()
        await readers.aclose()
        raise
    return RedisStreams(commands, readers, where.shown, options, Keys(settings.namespace))


def unique_consumer() -> str:
    """Return host:pid:random; a restarted process is another consumer."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def host_and_pid(consumer: str) -> tuple[str | None, int | None]:
    """Return where the process of a unique_consumer runs; None and None for one that chose its own name."""
    parts = consumer.rsplit(":", 2)
    return (parts[0], int(parts[1])) if len(parts) == 3 and parts[1].isdigit() else (None, None)


def open_client(where: Settings | str, max_connections: int = NUM_PLAIN_CONNECTIONS) -> Redis:
    """Return a plain client of the transport's server, with the same login, TLS and options; aclose() it.

    It connects when it is first used, and says nothing about the server: check_server does. Each answer has
    ANSWER_TIMEOUT_S, so it is not for blocking commands.

    Args:
        where: The settings, or the address itself.
        max_connections: How many commands may be under way at a time; more take turns.

    Raises:
        ServerUrlInvalid: there is no address, or it cannot be read.
    """
    url = where if isinstance(where, str) else _url(where)
    return Redis.from_pool(connection_pool(url, max_connections))


def connection_pool(
    url: str, max_connections: int, answer_timeout_s: float | None = ANSWER_TIMEOUT_S
) -> BlockingConnectionPool:
    """Return connections to a server; whoever makes a client of them closes it.

    Args:
        url: The address, as in the settings.
        max_connections: How many there may be; who finds none free waits ANSWER_TIMEOUT_S for one.
        answer_timeout_s: How long to wait for each answer; None where the caller bounds its calls itself.

    Raises:
        ServerUrlInvalid: the address cannot be read.
    """
    options: dict[str, Any] = connection_options(url) | {
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": answer_timeout_s,
        "socket_connect_timeout": ANSWER_TIMEOUT_S,
        "health_check_interval": 0,  # a call that meets a dead connection is sent again anyway
        "retry": Retry(NoBackoff(), 0),  # ours knows what may be sent twice
        "retry_on_timeout": False,
        "retry_on_error": [],
        "max_connections": max_connections,
        "timeout": ANSWER_TIMEOUT_S,  # for a free connection
    }
    return BlockingConnectionPool(**options)


def _url(settings: Settings) -> str:
    if settings.redis_url is None:
        raise ServerUrlInvalid(VARIABLE, "is not set; `sluice up` starts a server and sets it")
    return settings.redis_url


def _log(warning: str) -> None:
    log.warning("server_not_durable", problem=warning)


def _client(url: str, num_connections: int) -> Redis:
    # Each call has a limit of its own; see redis_calls.py.
    return Redis.from_pool(connection_pool(url, num_connections, answer_timeout_s=None))
