"""What `sluice chaos` looks for when all requests have ended: each kind of leftover is found, and results are none."""

from pathlib import Path
from typing import Any

import pytest

from kv_store.directory import TEMPORARY_PREFIX
from ops.chaos.remains import held_credits, remains
from pipeline.keys import Keys
from pipeline.settings import Settings


@pytest.fixture
def settings(namespace: str, tmp_path: Path) -> Settings:
    return Settings(namespace=namespace, kv_pool_dir=tmp_path / "pool")


async def found(raw_redis: Any, settings: Settings) -> str:
    return "; ".join(await remains(raw_redis, settings))


async def test_results_that_expire_and_empty_streams_may_stay(raw_redis: Any, settings: Settings) -> None:
    keys = Keys(settings.namespace)
    await raw_redis.xadd(keys.results("req_1"), {"p": b"x"})
    await raw_redis.expire(keys.results("req_1"), 60)
    await raw_redis.xgroup_create(keys.stream("tokenizer", "batch"), "tokenizer", "0", mkstream=True)
    assert await found(raw_redis, settings) == ""


async def test_entries_and_what_is_pending_of_them_are_found(raw_redis: Any, settings: Settings) -> None:
    stream = Keys(settings.namespace).stream("tokenizer", "batch")
    await raw_redis.xgroup_create(stream, "tokenizer", "0", mkstream=True)
    entry = await raw_redis.xadd(stream, {"p": b"x"})
    assert f"{stream} holds 1 entries" in await found(raw_redis, settings)
    await raw_redis.xreadgroup("tokenizer", "somebody", {stream: ">"})
    await raw_redis.xdel(stream, entry)
    assert "has 1 pending entries that are not in it any more" in await found(raw_redis, settings)


async def test_key_for_ever_and_credit_are_found(raw_redis: Any, settings: Settings) -> None:
    keys = Keys(settings.namespace)
    await raw_redis.hset(keys.request("req_1"), "state", "queued")
    assert f"{keys.request('req_1')} has no TTL" in await found(raw_redis, settings)
    await raw_redis.hset(keys.credits("pool"), "req_1", "5:4096")
    await raw_redis.expire(keys.credits("pool"), 60)  # a credit is one all the same
    assert "has 1 credits" in await found(raw_redis, settings)
    assert await held_credits(raw_redis, keys) == {"req_1": 4096}


async def test_blobs_and_unfinished_ones_are_found(raw_redis: Any, settings: Settings) -> None:
    assert await found(raw_redis, settings) == ""
    (settings.pool_dir / "kv_whoever_0_0_abc").write_bytes(b"1234")
    (settings.pool_dir / f"{TEMPORARY_PREFIX}abc").write_bytes(b"12")
    assert await found(raw_redis, settings) == "the pool holds 1 blobs, 6 bytes with unfinished ones"
