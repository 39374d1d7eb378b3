"""What a server must be: reachable, new enough, its own master, one that keeps what it is given.

Owns the questions that are asked once, when a process starts. Knows nothing about queues.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, cast

import structlog
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from pipeline.clock import monotonic_s
from pipeline.errors import ServerError, ServerPolicy, ServerRole, ServerTooOld, ServerUnreachable
from pipeline.redis_calls import RedisCalls
from pipeline.server_acl import check_permissions, lacking, may_run
from pipeline.server_problems import caused_by, explained
from pipeline.server_url import ServerAddress

MIN_VERSION = (7, 0)  # script flags, XAUTOCLAIM's third reply, acl_check_cmd
MIN_STRICT_VERSION = (7, 2)  # WAITAOF
STRICT = "SLUICE_DURABILITY=strict"
RETRY_S = 0.1

log = structlog.get_logger(__name__)


async def check_server(
    client: Redis, where: ServerAddress, namespace: str, *, strict: bool = False, patience_s: float = 0.0
) -> tuple[str, ...]:
    """Return what an operator should know about a server that can be used; raise when it cannot.

    Args:
        client: Any connection to it.
        where: Its address, for messages.
        namespace: The prefix of the keys that the user must be allowed.
        strict: Whether it must be able to say what is on its disk.
        patience_s: How long to ask again where nobody answers, or the server still reads its files: it may be
            restarting. What waiting cannot cure is raised at once.

    Raises:
        ServerUnreachable, ServerTlsFailed, ServerLoginFailed: nothing can be asked.
        ServerPermission, ServerTooOld, ServerPolicy, ServerRole: says what to set.
    """
    deadline = monotonic_s() + patience_s
    while True:
        try:
            return await _check(client, where, namespace, strict=strict)
        except ServerUnreachable as error:
            if monotonic_s() >= deadline:
                raise
            log.info("server_awaited", problem=str(error))
        await asyncio.sleep(min(RETRY_S, max(deadline - monotonic_s(), 0)))


async def _check(client: Redis, where: ServerAddress, namespace: str, *, strict: bool) -> tuple[str, ...]:
    calls = RedisCalls(client, where.shown, patience_s=0)
    info = await _info(client, calls, where, namespace)
    _check_version(info, where)
    _check_role(info, where)
    _check_policy(info, where)
    await check_permissions(calls, where, namespace)
    if strict:
        await _check_strict(client, calls, info, where, namespace)
    return await _durability(client, calls, info, where)


async def _info(client: Redis, calls: RedisCalls, where: ServerAddress, namespace: str) -> Mapping[str, object]:
    execute = cast("Any", client.execute_command)  # pyright: ignore[reportUnknownMemberType]
    try:
        return cast("Mapping[str, object]", await calls.call(lambda: execute("INFO"), "INFO"))
    except ServerError as error:
        if caused_by(error, NoPermissionError):
            # SELECT, where the address has a database; else INFO, which tells version, role and policy.
            command = re.search(r"the '(\w+)' command", str(error))
            raise lacking(command[1].upper() if command else "INFO", where, namespace) from error
        raise explained(error, where) from error


def _check_version(info: Mapping[str, object], where: ServerAddress) -> None:
    version = str(info.get("redis_version", ""))
    if _version(version) < MIN_VERSION:
        wanted = ".".join(str(part) for part in MIN_VERSION)
        raise ServerTooOld(where.shown, f"is version {version}; Redis {wanted} or any Valkey is needed")


def _check_role(info: Mapping[str, object], where: ServerAddress) -> None:
    if str(info.get("role", "master")) != "master":
        raise ServerRole(where.shown, "is a replica and takes no writes; give the address of its master")
    if str(info.get("redis_mode", "standalone")) == "cluster":
        raise ServerRole(where.shown, "is a node of a cluster; Sluice needs one server that holds all keys")


def _check_policy(info: Mapping[str, object], where: ServerAddress) -> None:
    policy = str(info.get("maxmemory_policy", "unknown"))
    if policy != "noeviction":
        raise ServerPolicy(
            where.shown,
            f"has maxmemory-policy {policy} and may throw requests away; run CONFIG SET maxmemory-policy noeviction",
        )


async def _check_strict(
    client: Redis, calls: RedisCalls, info: Mapping[str, object], where: ServerAddress, namespace: str
) -> None:
    version = str(info.get("redis_version", ""))
    if _version(version) < MIN_STRICT_VERSION:
        wanted = ".".join(str(part) for part in MIN_STRICT_VERSION)
        problem = f"is version {version}; {STRICT} needs WAITAOF, which Redis {wanted} or any Valkey has"
        raise ServerTooOld(where.shown, problem)
    if str(info.get("aof_enabled", "0")) != "1":
        raise ServerPolicy(
            where.shown,
            f"has appendonly no, so nothing can wait for its disk; {STRICT} needs CONFIG SET appendonly yes",
        )
    if not await may_run(calls, "WAITAOF 1 0 1"):
        raise lacking("WAITAOF", where, namespace)
    if await _appendfsync(client, calls) == "no":
        problem = "has appendfsync no, so its disk is not waited for"
        raise ServerPolicy(where.shown, f"{problem}; {STRICT} needs CONFIG SET appendfsync everysec, or always")


async def _appendfsync(client: Redis, calls: RedisCalls) -> str | None:
    """Return when the server writes to its disk; None where this user may not ask."""
    if not await may_run(calls, "CONFIG GET appendfsync"):
        return None
    execute = cast("Any", client.execute_command)  # pyright: ignore[reportUnknownMemberType]
    config = await calls.call(lambda: execute("CONFIG GET", "appendfsync"), "CONFIG GET")
    return cast("Mapping[str, str]", config).get("appendfsync")


async def _durability(
    client: Redis, calls: RedisCalls, info: Mapping[str, object], where: ServerAddress
) -> tuple[str, ...]:
    """A server that forgets is no error: tests and trials run on one."""
    if str(info.get("aof_enabled", "0")) != "1":
        return (
            f"{where.shown} has appendonly no: requests that it accepted do not survive its crash, nor a restart "
            "without a snapshot; run CONFIG SET appendonly yes",
        )
    if await _appendfsync(client, calls) != "no":
        return ()
    return (
        f"{where.shown} has appendfsync no: a power failure takes the requests that it accepted in the last half "
        "minute or more; run CONFIG SET appendfsync everysec",
    )


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (0,)
