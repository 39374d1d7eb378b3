"""Blobs on their way from prefill to decode: found by their request, and damaged.

Owns how a blob is damaged. Knows nothing about how it is noticed.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from kv_store.pool import FilePool
from ops.chaos.history import Seen
from ops.chaos.trial import Trial
from stages.common.kv_blobs import owner_of


async def sealed(trial: Trial, sent: Sequence[Seen]) -> None:
    """Return when decode has an entry for each request: then all their blobs are sealed."""
    with FilePool.open(trial.settings.pool_dir, trial.settings.kv_pool_bytes) as pool:
        stream = trial.keys.stream("decode", "interactive", pool.pool_id)

    async def all_there() -> bool:
        return await trial.redis.xlen(stream) >= len(sent)

    await trial.until_so(all_there, f"{len(sent)} prompts were not all sealed")


def blobs_of(pool: Path, seen: Seen) -> list[Path]:
    """The sealed blobs of a request, by chunk."""
    whose = owner_of(seen.request_id, 0).removesuffix("0_")  # whichever attempt it is
    blobs = [path for path in pool.iterdir() if path.name.startswith("kv_") and whose in path.name]
    return sorted(blobs, key=lambda path: int(path.name.split("_")[3]))  # kv_OWNER_ATTEMPT_CHUNK_RANDOM


def delete(blobs: Sequence[Path], others: Sequence[Path]) -> None:
    """Remove a chunk from the middle."""
    del others
    blobs[1].unlink()


def truncate(blobs: Sequence[Path], others: Sequence[Path]) -> None:
    """Cut a blob in half."""
    del others
    os.truncate(blobs[1], blobs[1].stat().st_size // 2)


def flip(blobs: Sequence[Path], others: Sequence[Path]) -> None:
    """Turn over one bit of a payload."""
    del others
    data = bytearray(blobs[1].read_bytes())
    data[len(data) * 2 // 3] ^= 0x10
    blobs[1].write_bytes(data)


def exchange(blobs: Sequence[Path], others: Sequence[Path]) -> None:
    """Give a blob the bytes of another request's, and that one's to it."""
    one, other = blobs[1].read_bytes(), others[1].read_bytes()
    blobs[1].write_bytes(other)
    others[1].write_bytes(one)


def delete_all(blobs: Sequence[Path], others: Sequence[Path]) -> None:
    """Remove all chunks."""
    del others
    for blob in blobs:
        blob.unlink()
