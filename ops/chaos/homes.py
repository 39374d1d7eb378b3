"""Homes and pools for one stack each, in temporary directories that are gone afterwards.

Owns these directories, and which of the user's settings hold for them. Compiled kernels and folded weights are the
user's own: they depend on nothing that a fault can touch, and take minutes to make.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.settings import Settings

NAMESPACE = "chaos"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of its own is made in it


@contextmanager
def new_home(base: Settings, **fields: object) -> Iterator[Settings]:
    """Give settings with a new home and a new pool; `fields` are what else differs from the user's."""
    # Short names, because a socket's path has at most 107 bytes.
    home = Path(tempfile.mkdtemp(prefix="sl-"))
    in_memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    pool = Path(tempfile.mkdtemp(prefix="sl-pool-", dir=in_memory))
    try:
        caches = base.home / "cache"
        caches.mkdir(mode=0o700, parents=True, exist_ok=True)
        (home / "cache").symlink_to(caches)
        own = {"home": home, "kv_pool_dir": pool, "namespace": NAMESPACE, "redis_url": None}
        yield base.model_copy(update=own | fields)
    finally:
        try:
            _remove(home)
        finally:
            _remove(pool)


def _remove(directory: Path) -> None:
    """Remove a directory in which a server may still be taking its last files away."""

    def failed(_: object, __: str, problem: tuple[type[BaseException], BaseException, object]) -> None:
        if not issubclass(problem[0], FileNotFoundError):
            raise problem[1]

    shutil.rmtree(directory, onerror=failed)
