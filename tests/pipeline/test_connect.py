"""Opening the transport and plain clients: options, and that both speak to the same server in the same way."""

from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from pipeline import connect
from pipeline.connect import open_client, open_transport, unique_consumer
from pipeline.errors import ServerUnreachable, ServerUrlInvalid, SluiceError
from pipeline.settings import Settings
from pipeline.transport import Accepted


async def test_a_socket_address_is_opened(valkey_url: str, namespace: str) -> None:
    transport = await open_transport(Settings(redis_url=valkey_url, namespace=namespace))
    assert await transport.admit("r", "batch", b"work") == Accepted()
    await transport.close()


async def test_an_address_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ServerUrlInvalid, match="must start with"):
        await open_transport(Settings().model_copy(update={"redis_url": "http://host"}))


async def test_a_missing_address_says_what_sets_it() -> None:
    with pytest.raises(ServerUrlInvalid, match=r"SLUICE_REDIS_URL.*sluice up"):
        await open_transport(Settings())


async def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable, match=r"unix:///.*nobody\.sock: there is no such socket") as caught:
        await open_transport(Settings(redis_url=f"unix://{tmp_path}/nobody.sock", lease_s=0.05))
    assert caught.value.retryable


@pytest.mark.parametrize("url", ["redis://host", "rediss://host", "unix:///run/x.sock"])
async def test_every_client_option_is_ours(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[Redis] = []

    async def look(client: Redis, *_: object, **__: object) -> None:
        clients.append(client)
        raise SluiceError

    monkeypatch.setattr(connect, "check_server", look)
    with pytest.raises(SluiceError):
        await open_transport(Settings(redis_url=url))
    transports, plain = (
        cast("dict[str, Any]", client.connection_pool.connection_kwargs) for client in (clients[0], open_client(url))
    )
    for options in (transports, plain):
        assert options["protocol"] == 2
        assert options["socket_connect_timeout"] > 0
        assert options["retry_on_error"] == []
        assert options["retry_on_timeout"] is False
    assert transports["socket_timeout"] is None
    assert plain["socket_timeout"] > 0
    assert transports.keys() == plain.keys()


async def test_a_plain_client_reaches_the_server_of_the_settings(valkey_url: str, namespace: str) -> None:
    async with open_client(Settings(redis_url=valkey_url)) as client:
        await client.set(f"{namespace}:x", b"1", ex=60)
    async with open_client(valkey_url) as client:
        assert await client.get(f"{namespace}:x") == b"1"


def test_consumer_names_are_unique_and_hold_the_process() -> None:
    one, other = unique_consumer(), unique_consumer()
    assert one != other
    assert len(one.rsplit(":", 2)) == 3
