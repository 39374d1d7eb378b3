"""The proxy of `sluice chaos`, before a real server: what gets through, what is lost, what comes late."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ops.chaos.proxy import Proxy
from tests.ops.waiting import holds

SHORT_S = 0.2


@pytest.fixture
async def proxy(valkey_url: str, short_directory: Path) -> AsyncIterator[Proxy]:
    async with Proxy(valkey_url, short_directory / "p.sock") as proxy:
        yield proxy


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[Any]:
    """One that neither waits long nor tries again."""
    client = Redis.from_url(
        proxy.url, protocol=2, socket_timeout=SHORT_S, retry=Retry(NoBackoff(), 0), retry_on_timeout=False
    )
    yield client
    await client.aclose()


def asks(word: bytes) -> Callable[[bytes], bool]:
    return lambda head: word in head.upper()


async def test_open_proxy_shows_in_nothing(proxy: Proxy, client: Any, namespace: str) -> None:
    assert await client.set(f"{namespace}:k", b"v" * 1_000_000, ex=60)
    assert await client.get(f"{namespace}:k") == b"v" * 1_000_000
    assert proxy.num_lost == 0
    assert proxy.num_answers >= 2


async def test_lost_answer_is_that_of_a_command_that_was_done(proxy: Proxy, client: Any, namespace: str) -> None:
    proxy.lose_answer(asks(b"INCR"), times=2)
    for _ in range(2):
        with pytest.raises(RedisConnectionError):
            await client.incr(f"{namespace}:n")
    assert await client.incr(f"{namespace}:n") == 3
    assert proxy.num_lost == 2
    await client.delete(f"{namespace}:n")


async def test_frozen_proxy_answers_nothing_and_delivers_later(
    proxy: Proxy, client: Any, namespace: str, raw_redis: Any
) -> None:
    assert await client.ping()
    proxy.freeze()
    with pytest.raises(RedisTimeoutError):  # and hangs up: the request is under way all the same
        await client.set(f"{namespace}:late", b"1", ex=60)
    assert await raw_redis.get(f"{namespace}:late") is None
    proxy.open()
    deadline = monotonic() + 10
    while await raw_redis.get(f"{namespace}:late") is None:
        assert monotonic() < deadline, "what was under way never arrived"
        await asyncio.sleep(0.01)


async def test_cut_proxy_closes_what_is_open_and_what_comes(proxy: Proxy, client: Any) -> None:
    waiting = asyncio.create_task(client.blpop(["nothing"], timeout=60))
    await holds(lambda: proxy.num_connections == 1)
    proxy.cut()
    with pytest.raises(RedisConnectionError):
        await waiting
    with pytest.raises(RedisConnectionError):
        await client.ping()
    proxy.open()
    assert await client.ping()


async def test_late_answers_are_those_of_their_commands(proxy: Proxy, client: Any) -> None:
    assert await client.ping()
    proxy.delay_s = lambda: SHORT_S / 2
    began_at = monotonic()
    assert await asyncio.gather(*(client.echo(f"{number}") for number in range(8))) == [
        f"{number}".encode() for number in range(8)
    ]
    assert monotonic() - began_at >= SHORT_S / 2
