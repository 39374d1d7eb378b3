"""Opens the transport: reads the address, sets every option of the client, and checks the server once.

Owns the client options and what a server must be. Knows nothing about queues.
"""

import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import BlockingConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pipeline.errors import ServerPolicy, ServerTooOld, ServerUrlInvalid
from pipeline.keys import Keys
from pipeline.redis_calls import ANSWER_TIMEOUT_S, RedisCalls
from pipeline.redis_streams import RedisStreams
from pipeline.settings import Settings
from pipeline.transport import TransportOptions

MIN_VERSION = (7, 0)  # script flags, XAUTOCLAIM's third reply
SCHEMES = ("redis", "rediss", "unix")
NUM_COMMAND_CONNECTIONS = 32
NUM_READER_CONNECTIONS = 256  # one for each result that is followed at the same time; more take turns


async def open_transport(
    settings: Settings, *, consumer: str | None = None, pool_id: str | None = None
) -> RedisStreams:
    """Return a transport to the server of the settings, checked; close() it.

    Args:
        settings: Where the server is, and the bounds of the queues.
        consumer: The name of this process; a unique one by default.
        pool_id: The pool this process reaches; needed by prefill, compressor and decode.

    Raises:
        ServerUrlInvalid, ServerUnreachable, ServerRefused, ServerTooOld, ServerPolicy: each says what to do.
    """
    if settings.redis_url is None:
        raise ServerUrlInvalid("SLUICE_REDIS_URL", "is not set; `sluice up` starts a server and sets it")
    address = shown_address(settings.redis_url)
    options = TransportOptions(
        consumer=consumer or unique_consumer(),
        pool_id=pool_id,
        lease_s=settings.lease_s,
        max_queue=settings.max_queue,
        result_ttl_s=settings.result_ttl_s,
    )
    commands = _client(settings.redis_url, address, NUM_COMMAND_CONNECTIONS)
    readers = _client(settings.redis_url, address, NUM_READER_CONNECTIONS)
    try:
        await check_server(commands, address)
    except BaseException:
        await commands.aclose()
        await readers.aclose()
        raise
    return RedisStreams(commands, readers, address, options, Keys(settings.namespace))


def unique_consumer() -> str:
    """Return host:pid:random; a restarted process is another consumer."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def shown_address(url: str) -> str:
    """Return the address without user and password, for messages.

    Raises:
        ServerUrlInvalid: it is none of redis://, rediss://, unix://.
    """
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError as error:
        raise ServerUrlInvalid("SLUICE_REDIS_URL", str(error)) from None
    if parts.scheme not in SCHEMES:
        raise ServerUrlInvalid("SLUICE_REDIS_URL", f"must start with {', '.join(f'{s}://' for s in SCHEMES)}")
    if parts.scheme == "unix" and not parts.path:
        raise ServerUrlInvalid("SLUICE_REDIS_URL", "unix:// needs the absolute path of a socket")
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


async def check_server(client: Redis, address: str) -> None:
    """Raise unless the server answers, is new enough and never evicts keys."""
    execute = cast("Any", client.execute_command)  # pyright: ignore[reportUnknownMemberType]
    calls = RedisCalls(client, address, patience_s=0)
    info = cast("Mapping[str, object]", await calls.call(lambda: execute("INFO"), "INFO"))
    version = str(info.get("redis_version", ""))
    if _version(version) < MIN_VERSION:
        wanted = ".".join(str(part) for part in MIN_VERSION)
        raise ServerTooOld(address, f"is version {version}; Redis {wanted} or any Valkey is needed")
    policy = str(info.get("maxmemory_policy", "unknown"))
    if policy != "noeviction":
        raise ServerPolicy(
            address,
            f"has maxmemory-policy {policy} and may throw requests away; run CONFIG SET maxmemory-policy noeviction",
        )


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (0,)


def _client(url: str, address: str, num_connections: int) -> Redis:
    parse = cast("Any", parse_url)
    try:
        where: dict[str, Any] = dict(parse(url))
    except ValueError as error:
        raise ServerUrlInvalid(address, str(error)) from None
    if not url.startswith("unix:"):
        where["socket_keepalive"] = True
    if url.startswith("rediss:") and "ssl_cert_reqs" not in where:
        where["ssl_check_hostname"] = True  # off by default in the client; `?ssl_cert_reqs=` says otherwise
    options: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": None,  # each call has a limit of its own; see redis_calls.py
        "socket_connect_timeout": ANSWER_TIMEOUT_S,
        "health_check_interval": 0,  # a call that meets a dead connection is sent again anyway
        "retry": Retry(NoBackoff(), 0),  # ours knows what may be sent twice
        "retry_on_timeout": False,
        "retry_on_error": [],
        "max_connections": num_connections,
        "timeout": ANSWER_TIMEOUT_S,  # for a free connection
    }
    return Redis.from_pool(BlockingConnectionPool(**(where | options)))
