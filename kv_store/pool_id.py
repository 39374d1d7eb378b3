"""The random name of a pool, kept in its directory: made once, read by everyone who opens the pool later.

It owns the file `.pool-id`. It knows nothing about blobs. A reference carries the id, so that a process never
looks for a blob in the wrong pool: another host's, or one since re-created.
"""

import os
import re
import secrets
import stat
from typing import Final

from kv_store.directory import PrivateDirectory, find_fault
from kv_store.errors import PoolRefused, PoolUnavailable

POOL_ID_FILE: Final = ".pool-id"

_POOL_ID: Final = re.compile(rb"[0-9a-f]{16}")


def load_pool_id(directory: PrivateDirectory) -> str:
    """Read the directory's pool id; the first caller makes it up.

    Raises:
        PoolRefused: the file is not one that this module wrote.
    """
    with directory.locked():
        if not directory.exists(POOL_ID_FILE):
            _create(directory)
        return _read(directory)


def _create(directory: PrivateDirectory) -> None:
    pool_id = memoryview(secrets.token_hex(8).encode())
    # By way of a temporary file: a crash in between must not leave an empty id behind.
    with directory.temporary(pool_id.nbytes) as temporary:
        try:
            temporary.fill([pool_id])
        except OSError as error:
            raise PoolUnavailable("write the pool's id", error) from error
        directory.seal(temporary, POOL_ID_FILE)


def _read(directory: PrivateDirectory) -> str:
    path = str(directory.path / POOL_ID_FILE)
    try:
        fd = directory.open_file(POOL_ID_FILE)
    except OSError as error:
        raise PoolRefused(path, "type", error.strerror, "a regular file") from error
    try:
        fault = find_fault(os.fstat(fd), stat.S_IFREG)
        if fault is not None:
            raise PoolRefused(path, fault.field, fault.actual, fault.expected)
        text = os.read(fd, 64)
    finally:
        os.close(fd)
    if _POOL_ID.fullmatch(text) is None:
        raise PoolRefused(path, "content", text, "16 hexadecimal digits")
    return text.decode()
