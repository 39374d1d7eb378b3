"""What is asked of a server once: version, role, memory policy, and whether it keeps what it is given."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from redis import exceptions as redis_errors
from redis.asyncio import Redis

from pipeline.connect import open_client, open_transport
from pipeline.errors import (
    ServerLoginFailed,
    ServerPolicy,
    ServerRole,
    ServerTooOld,
    ServerUnreachable,
    ServerUrlInvalid,
)
from pipeline.server_acl import RULE
from pipeline.server_check import check_server
from pipeline.server_url import read_address
from pipeline.settings import Settings
from tests.pipeline.benches import soon
from tests.servers import Server, ServerKind, ServerOptions, running_server, server_of_its_own

NAMESPACE = "sluice"


class OtherServer:
    """A real server that says something else about itself."""

    def __init__(self, url: str, **info: object) -> None:
        self._client = open_client(url)
        self._info = info

    async def execute_command(self, *words: Any) -> Any:
        reply = await cast("Any", self._client).execute_command(*words)
        return reply | self._info if words == ("INFO",) else reply

    async def check(self) -> tuple[str, ...]:
        try:
            return await check_server(cast("Redis", self), read_address("redis://host"), NAMESPACE)
        finally:
            await self._client.aclose()


@pytest.fixture(scope="module")
def durable(server_kind: ServerKind) -> Iterator[Server]:
    """A server that appends what it is given to a file, and syncs that each second."""
    users = ("narrow on >word ~* +@all -config",)
    with server_of_its_own(server_kind, ServerOptions(users=users, appendonly="yes", appendfsync="everysec")) as server:
        yield server


async def warnings_of(url: str) -> list[str]:
    warnings: list[str] = []
    transport = await open_transport(Settings(redis_url=url), warn=warnings.append)
    await transport.close()
    return warnings


@pytest.mark.parametrize("version", ["6.2.14", "6", "", "unknown"])
async def test_an_old_server_is_refused(version: str, valkey_url: str) -> None:
    with pytest.raises(ServerTooOld, match=r"redis://host: is version .*7\.0"):
        await OtherServer(valkey_url, redis_version=version).check()


@pytest.mark.parametrize("version", ["7.0.0", "7.2.4", "8.1.0", "10.0.0"])
async def test_a_new_server_is_accepted(version: str, valkey_url: str) -> None:
    await OtherServer(valkey_url, redis_version=version).check()


async def test_a_node_of_a_cluster_is_refused(valkey_url: str) -> None:
    with pytest.raises(ServerRole, match="cluster"):
        await OtherServer(valkey_url, redis_mode="cluster").check()


async def test_a_replica_is_refused(server_kind: ServerKind) -> None:
    with server_of_its_own(server_kind) as server:
        async with open_client(server.url) as client:
            await client.replicaof("127.0.0.1", 1)
        with pytest.raises(ServerRole, match="replica and takes no writes"):
            await open_transport(Settings(redis_url=server.url))


async def test_a_server_that_evicts_keys_is_refused(valkey_url: str, raw_redis: Redis) -> None:
    await raw_redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ServerPolicy, match=r"allkeys-lru.*noeviction"):
            await open_transport(Settings(redis_url=valkey_url))
    finally:
        await raw_redis.config_set("maxmemory-policy", "noeviction")


async def test_a_server_that_hides_its_policy_is_refused(valkey_url: str) -> None:
    with pytest.raises(ServerPolicy, match="unknown"):
        await OtherServer(valkey_url, maxmemory_policy="unknown").check()


async def test_a_durable_server_is_used_without_a_word(durable: Server) -> None:
    assert await warnings_of(durable.url) == []


async def test_a_server_without_a_file_gets_a_warning(valkey_url: str) -> None:
    (warning,) = await warnings_of(valkey_url)
    assert "appendonly no" in warning
    assert "CONFIG SET appendonly yes" in warning


async def test_a_server_that_never_syncs_its_file_gets_a_warning(server_kind: ServerKind) -> None:
    with server_of_its_own(server_kind, ServerOptions(appendonly="yes", appendfsync="no")) as server:
        (warning,) = await warnings_of(server.url)
    assert "appendfsync no" in warning
    assert "CONFIG SET appendfsync everysec" in warning


async def test_the_right_to_read_settings_is_enough_to_be_warned(server_kind: ServerKind) -> None:
    users = (f"sluice on >word {RULE.format(namespace=NAMESPACE)} +config|get",)
    with server_of_its_own(server_kind, ServerOptions(users=users, appendonly="yes", appendfsync="no")) as server:
        (warning,) = await warnings_of(server.unix_url("sluice", "word"))
    assert "appendfsync no" in warning


async def test_a_server_that_hides_its_settings_is_used(durable: Server) -> None:
    assert await warnings_of(durable.unix_url("narrow", "word")) == []
    async with open_client(durable.url) as client:
        assert await client.execute_command("ACL", "LOG") == []  # asking what is allowed was not an offence


async def test_without_anybody_to_tell_a_warning_is_logged(valkey_url: str) -> None:
    with structlog.testing.capture_logs() as events:
        await (await open_transport(Settings(redis_url=valkey_url))).close()
    (event,) = [event for event in events if event["event"] == "server_not_durable"]
    assert event["log_level"] == "warning"
    assert "appendonly" in event["problem"]


# A server that is restarting


class RestartingServer:
    """A real server whose first answers, from one on, are those of a server that goes away and comes back."""

    def __init__(self, url: str, first: int, *errors: Exception) -> None:
        self._client = open_client(url)
        self._first = first
        self._errors = list(errors)
        self.num_calls = 0

    async def execute_command(self, *words: Any) -> Any:
        self.num_calls += 1
        if self.num_calls > self._first and self._errors:
            raise self._errors.pop(0)
        return await cast("Any", self._client).execute_command(*words)

    async def check(self, patience_s: float) -> tuple[str, ...]:
        try:
            return await soon(
                check_server(cast("Redis", self), read_address("redis://host"), NAMESPACE, patience_s=patience_s)
            )
        finally:
            await self._client.aclose()


LOADING = redis_errors.BusyLoadingError("Redis is loading the dataset in memory")
GONE = redis_errors.ConnectionError("Connection closed by server.")


@pytest.mark.parametrize("num_calls_before", [0, 1])
async def test_a_server_that_is_restarted_meanwhile_is_waited_for(valkey_url: str, num_calls_before: int) -> None:
    server = RestartingServer(valkey_url, num_calls_before, GONE, ConnectionRefusedError(), LOADING, LOADING)
    (warning,) = await server.check(patience_s=60)
    assert "appendonly no" in warning


async def test_a_server_that_is_not_there_yet_is_waited_for(short_directory: Path, server_kind: ServerKind) -> None:
    settings = Settings(redis_url=f"unix://{short_directory}/server.sock")
    opening = asyncio.create_task(open_transport(settings, warn=lambda _: None))
    done, _ = await asyncio.wait({opening}, timeout=0.3)
    assert not done
    with running_server(short_directory, server_kind):
        await (await soon(opening)).close()


async def test_the_wait_for_a_server_has_an_end(valkey_url: str) -> None:
    server = RestartingServer(valkey_url, 0, *[LOADING] * 1000)
    with pytest.raises(ServerUnreachable, match="loading the dataset"):
        await server.check(patience_s=0.25)
    assert 2 <= server.num_calls <= 5


async def test_what_waiting_does_not_cure_is_said_at_once(
    server_kind: ServerKind, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleep(_: float) -> None:
        raise AssertionError("nothing is to be waited for")

    with server_of_its_own(server_kind, ServerOptions(password="word")) as guarded:
        monkeypatch.setattr("pipeline.server_check.asyncio.sleep", sleep)
        for url in (guarded.url, guarded.unix_url("default", "wrong"), f"{valkey_url}?db=99"):
            with pytest.raises(ServerLoginFailed):
                await open_transport(Settings(redis_url=url))
        with pytest.raises(ServerUrlInvalid):
            await open_transport(Settings(redis_url=f"{valkey_url}?nothing=1"))
        with pytest.raises(ServerTooOld):
            await OtherServer(valkey_url, redis_version="6.2.14").check()
