"""What may be left when all requests have ended: results until they expire, empty work streams, and nothing else.

Owns the list of what is allowed to stay. Knows nothing about how it came to be there.
"""

from typing import Any

from kv_store.pool import FilePool
from pipeline.keys import Keys
from pipeline.settings import Settings


async def remains(redis: Any, settings: Settings) -> list[str]:
    """Return what is left of work that has ended, in one sentence each: entries, claims, credits, keys, blobs."""
    keys = Keys(settings.namespace)
    found: list[str] = []
    async for key in redis.scan_iter(match=f"{settings.namespace}:*"):
        found += await _of_key(redis, keys, key.decode())
    return sorted(found) + blobs_left(settings)


async def held_credits(redis: Any, keys: Keys) -> dict[str, int]:
    """Return who has a credit of a pool, and for how many bytes."""
    held: dict[str, int] = {}
    async for key in redis.scan_iter(match=f"{keys.credits_prefix()}*"):
        for request_id, credit in (await redis.hgetall(key)).items():  # "attempt:bytes", and maybe more behind a space
            held[request_id.decode()] = int(credit.split()[0].rpartition(b":")[2])
    return held


def blobs_left(settings: Settings) -> list[str]:
    """Return a sentence for blobs in the pool, and for files that writers left unfinished."""
    with FilePool.open(settings.pool_dir, settings.kv_pool_bytes) as pool:
        usage = pool.usage()
    if not usage.used_bytes:
        return []
    return [f"the pool holds {usage.num_blobs} blobs, {usage.used_bytes} bytes with unfinished ones"]


async def _of_key(redis: Any, keys: Keys, name: str) -> list[str]:
    if name.startswith(keys.credits_prefix()):
        return [f"{name} has {await redis.hlen(name)} credits"]
    if name.startswith(f"{keys.namespace}:stream:") and await redis.type(name) == b"stream":
        return await _of_stream(redis, name)
    # -2: it expired, or was deleted, between the two questions
    return [] if await redis.ttl(name) != -1 else [f"{name} has no TTL"]


async def _of_stream(redis: Any, name: str) -> list[str]:
    if length := await redis.xlen(name):
        return [f"{name} holds {length} entries"]
    return [
        f"{name} has {group['pending']} pending entries that are not in it any more"
        for group in await redis.xinfo_groups(name)
        if group["pending"]
    ]
