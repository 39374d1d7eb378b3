"""Fixtures of the client's tests: a client of a real server, and the stage that works for it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pipeline.client import Client
from pipeline.memory import MemoryQueues
from pipeline.transport import Transport
from tests.ops.answering import serve
from tests.pipeline.benches import RedisBench


@pytest.fixture
async def client(valkey_url: str, namespace: str) -> AsyncIterator[Client]:
    async with await Client.connect(valkey_url, namespace=namespace) as client:
        yield client


@pytest.fixture
async def stage(redis_bench: RedisBench) -> Transport:
    """What a stage sees of the queues; nothing happens unless a test says so."""
    return await redis_bench.join("stage")


@pytest.fixture
async def answering(stage: Transport) -> AsyncIterator[None]:
    """Let the stage answer everything by itself."""
    stopping = asyncio.Event()
    task = asyncio.create_task(serve(stage, stopping))
    yield
    stopping.set()
    await task


@pytest.fixture
def queues() -> MemoryQueues:
    """Queues in memory, for tests that move the clock or break the transport."""
    return MemoryQueues()
