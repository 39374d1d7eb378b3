"""Connecting: where to, with what, and who closes it."""

import asyncio
from pathlib import Path

import pytest

from ops.running import UpLock
from pipeline.client import Client
from pipeline.client.errors import NoStack
from pipeline.connect import open_transport
from pipeline.errors import ServerUnreachable, SettingsError, TransportClosed, UnknownRequest
from pipeline.settings import Settings
from tests.ops.waiting import POLL_S
from tests.pipeline.benches import DEADLINE_S, soon


async def test_address_and_namespace_come_from_the_environment(
    valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_REDIS_URL", valkey_url)
    monkeypatch.setenv("SLUICE_NAMESPACE", namespace)
    async with await Client.connect() as client:
        submitted = await client.enqueue("hello", model="tiny")
        assert client.keys.namespace == namespace
        assert client.settings.redis_url == valkey_url
    async with await Client.connect(namespace=f"{namespace}-other") as other:
        with pytest.raises(UnknownRequest):
            await other.result(submitted.request_id)


async def test_missing_address_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLUICE_REDIS_URL", raising=False)
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    with pytest.raises(NoStack, match=r"no `sluice up` runs in .*, SLUICE_REDIS_URL is not set"):
        await Client.connect()


async def test_the_stack_of_the_home_is_found_while_it_is_up(
    valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLUICE_REDIS_URL", raising=False)
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    lock = UpLock(tmp_path)
    lock.announce(Settings(home=tmp_path, redis_url=valkey_url, namespace=namespace))
    async with await Client.connect() as client:
        assert (client.settings.redis_url, client.keys.namespace) == (valkey_url, namespace)
    lock.release()
    with pytest.raises(NoStack):
        await Client.connect()


async def test_unknown_setting_is_told(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_REDIS_ULR", valkey_url)
    with pytest.raises(SettingsError, match="the nearest one is SLUICE_REDIS_URL"):
        await Client.connect(valkey_url)


async def test_server_that_is_not_there_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.connect.START_PATIENCE_S", 0.2)
    async with asyncio.timeout(10):
        with pytest.raises(ServerUnreachable, match=r"unix:///nowhere\.sock"):
            await Client.connect("unix:///nowhere.sock")


async def test_client_of_a_given_transport_leaves_it_open(valkey_url: str, namespace: str) -> None:
    settings = Settings(redis_url=valkey_url, namespace=namespace)
    transport = await open_transport(settings)
    async with Client(transport, settings) as client:
        await client.enqueue("hello", model="tiny")
    assert await transport.queue_length("tokenizer", "interactive") == 1
    await transport.close()


async def test_closed_client_keeps_no_connection(valkey_url: str, namespace: str, raw_redis) -> None:
    num_before = len(await raw_redis.client_list())
    client = await Client.connect(valkey_url, namespace=namespace)
    await client.enqueue("hello", model="tiny")
    assert len(await raw_redis.client_list()) > num_before
    await client.close()
    assert len(await raw_redis.client_list()) == num_before


async def test_closing_ends_what_waits_and_leaves_no_connection(valkey_url: str, namespace: str, raw_redis) -> None:
    num_before = len(await raw_redis.client_list())
    client = await Client.connect(valkey_url, namespace=namespace)
    submitted = await client.enqueue("hello", model="tiny")
    waiting = [
        asyncio.ensure_future(anext(client.stream(submitted.request_id))),
        asyncio.ensure_future(client.result(submitted.request_id)),
        asyncio.ensure_future(anext(client.gather([submitted.request_id]))),
    ]
    async with asyncio.timeout(DEADLINE_S):
        while not await num_blocked(raw_redis):  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(POLL_S)
    await client.close()
    for call in (*waiting, client.cancel(submitted.request_id), client.enqueue("hello", model="tiny")):
        with pytest.raises(TransportClosed, match="was closed; open another one"):
            await soon(call)
    async with asyncio.timeout(DEADLINE_S):
        while len(await raw_redis.client_list()) > num_before:  # noqa: ASYNC110 - it notices in its own time
            await asyncio.sleep(POLL_S)


async def num_blocked(raw_redis) -> int:
    return (await raw_redis.info("clients"))["blocked_clients"]
