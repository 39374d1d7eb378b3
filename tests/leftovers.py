"""What a test may leave on a server: nothing that stays for ever, but empty work streams."""

from typing import Any


async def keys_that_stay(raw: Any, namespace: str) -> list[str]:
    """Return the keys of a namespace that would stay for ever, with what is wrong.

    Empty work streams may stay; anything in them or pending may not, and every other key needs a TTL.
    """
    found: list[str] = []
    async for key in raw.scan_iter(match=f"{namespace}:*"):
        name = key.decode()
        if await raw.ttl(name) >= 0:
            continue
        if not name.startswith(f"{namespace}:stream:") or await raw.type(name) != b"stream":
            found.append(f"{name} has no TTL")
        elif length := await raw.xlen(name):
            found.append(f"{name} holds {length} entries")
        else:
            groups = await raw.xinfo_groups(name)
            found += [f"{name} has pending entries" for group in groups if group["pending"]]
    return found


async def delete_keys(raw: Any, namespace: str) -> None:
    """Delete all keys of a namespace."""
    keys = [key async for key in raw.scan_iter(match=f"{namespace}:*")]
    if keys:
        await raw.delete(*keys)
