"""What a server must be: reachable, new enough, its own master, one that keeps what it is given.

Owns the questions that are asked once, when a process starts. Knows nothing about queues.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from pipeline.errors import ServerError, ServerPolicy, ServerRole, ServerTooOld
from pipeline.redis_calls import RedisCalls
from pipeline.server_acl import check_permissions, lacking, may_run
from pipeline.server_problems import caused_by, explained
from pipeline.server_url import ServerAddress

MIN_VERSION = (7, 0)  # script flags, XAUTOCLAIM's third reply, acl_check_cmd


async def check_server(client: Redis, where: ServerAddress, namespace: str) -> tuple[str, ...]:
    """Return what an operator should know about a server that can be used; raise when it cannot.

    Args:
        client: Any connection to it.
        where: Its address, for messages.
        namespace: The prefix of the keys that the user must be allowed.

    Raises:
        ServerUnreachable, ServerTlsFailed, ServerLoginFailed: nothing can be asked.
        ServerPermission, ServerTooOld, ServerPolicy, ServerRole: says what to set.
    """
    calls = RedisCalls(client, where.shown, patience_s=0)
    info = await _info(client, calls, where, namespace)
    _check_version(info, where)
    _check_role(info, where)
    _check_policy(info, where)
    await check_permissions(calls, where, namespace)
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


async def _durability(
    client: Redis, calls: RedisCalls, info: Mapping[str, object], where: ServerAddress
) -> tuple[str, ...]:
    """A server that forgets is no error: tests and trials run on one."""
    if str(info.get("aof_enabled", "0")) != "1":
        return (
            f"{where.shown} has appendonly no: requests that it accepted do not survive its crash, nor a restart "
            "without a snapshot; run CONFIG SET appendonly yes",
        )
    if not await may_run(calls, "CONFIG GET appendfsync"):
        return ()
    execute = cast("Any", client.execute_command)  # pyright: ignore[reportUnknownMemberType]
    config = await calls.call(lambda: execute("CONFIG GET", "appendfsync"), "CONFIG GET")
    if cast("Mapping[str, str]", config).get("appendfsync") != "no":
        return ()
    return (
        f"{where.shown} has appendfsync no: a power failure takes the requests that it accepted in the last half "
        "minute or more; run CONFIG SET appendfsync everysec",
    )


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (0,)
