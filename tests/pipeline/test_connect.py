"""Opening the transport: addresses, and servers that must be refused."""

from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from pipeline import connect
from pipeline.connect import check_server, open_transport, shown_address, unique_consumer
from pipeline.errors import (
    ServerPolicy,
    ServerRefused,
    ServerTooOld,
    ServerUnreachable,
    ServerUrlInvalid,
    SluiceError,
)
from pipeline.settings import Settings
from pipeline.transport import Accepted


class StubServer:
    """Answers INFO with what a test says."""

    def __init__(self, **info: object) -> None:
        self._info = {"redis_version": "7.2.4", "maxmemory_policy": "noeviction"} | info

    async def execute_command(self, *words: str) -> dict[str, object]:
        assert words == ("INFO",)
        return self._info


async def check(**info: object) -> None:
    await check_server(cast("Redis", StubServer(**info)), "redis://host")


async def test_a_socket_address_is_opened(valkey_url: str, namespace: str) -> None:
    transport = await open_transport(Settings(redis_url=valkey_url, namespace=namespace))
    assert await transport.admit("r", "batch", b"work") == Accepted()
    await transport.close()


@pytest.mark.parametrize("url", ["http://host", "localhost:6379", "", "valkey+unix:///x"])
async def test_an_address_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ServerUrlInvalid, match="redis://, rediss://, unix://"):
        await open_transport(Settings().model_copy(update={"redis_url": url}))


@pytest.mark.parametrize("url", ["unix://", "redis://host:many", "redis://host:6379?db=none"])
async def test_an_address_that_cannot_be_read_is_refused(url: str) -> None:
    with pytest.raises(ServerUrlInvalid):
        await open_transport(Settings(redis_url=url))


async def test_a_missing_address_says_what_sets_it() -> None:
    with pytest.raises(ServerUrlInvalid, match=r"SLUICE_REDIS_URL.*sluice up"):
        await open_transport(Settings())


async def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable, match=r"unix:///.*nobody\.sock") as caught:
        await open_transport(Settings(redis_url=f"unix://{tmp_path}/nobody.sock"))
    assert caught.value.retryable


async def test_a_wrong_password_is_not_asked_again(valkey_url: str) -> None:
    url = valkey_url.replace("unix://", "unix://somebody:secret-word@")
    with pytest.raises(ServerRefused) as caught:
        await open_transport(Settings(redis_url=url))
    assert "secret-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:word@host:6380/3", "redis://host:6380/3"),
        ("rediss://:word@host", "rediss://host"),
        ("unix://:word@/run/x.sock?db=1", "unix:///run/x.sock"),
    ],
)
def test_shown_addresses_hold_no_password(url: str, shown: str) -> None:
    assert shown_address(url) == shown


@pytest.mark.parametrize("version", ["6.2.14", "6", "", "unknown"])
async def test_an_old_server_is_refused(version: str) -> None:
    with pytest.raises(ServerTooOld, match=r"7\.0"):
        await check(redis_version=version)


@pytest.mark.parametrize("version", ["7.0.0", "7.2.4", "8.1.0", "10.0.0"])
async def test_a_new_server_is_accepted(version: str) -> None:
    await check(redis_version=version)


async def test_a_server_that_evicts_keys_is_refused(valkey_url: str, raw_redis: Redis) -> None:
    await raw_redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ServerPolicy, match=r"allkeys-lru.*noeviction"):
            await open_transport(Settings(redis_url=valkey_url))
    finally:
        await raw_redis.config_set("maxmemory-policy", "noeviction")


async def test_a_server_that_hides_its_policy_is_refused() -> None:
    with pytest.raises(ServerPolicy, match="unknown"):
        await check(maxmemory_policy="unknown")


@pytest.mark.parametrize("url", ["redis://host", "rediss://host", "unix:///run/x.sock"])
async def test_every_client_option_is_ours(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[Redis] = []

    async def look(client: Redis, _address: str) -> None:
        clients.append(client)
        raise SluiceError

    monkeypatch.setattr(connect, "check_server", look)
    with pytest.raises(SluiceError):
        await open_transport(Settings(redis_url=url))
    options = cast("dict[str, Any]", clients[0].connection_pool.connection_kwargs)
    assert options["protocol"] == 2
    assert options["socket_timeout"] is None
    assert options["socket_connect_timeout"] > 0
    assert options["retry_on_error"] == []
    assert options["retry_on_timeout"] is False
    assert options.get("ssl_check_hostname") is (True if url.startswith("rediss") else None)


def test_consumer_names_are_unique_and_hold_the_process() -> None:
    one, other = unique_consumer(), unique_consumer()
    assert one != other
    assert len(one.rsplit(":", 2)) == 3
