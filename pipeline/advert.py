"""Where the stack of a home is: what `sluice up` says to everybody else of the same user.

Owns the file up.json in a home: locked for as long as `up` runs (the lock ends with the process, however it ends), with
content once its stack is ready. Knows nothing about how a stack runs; ops/running.py writes it.
"""

import fcntl
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError


class Advert(BaseModel):
    """What others need to use a running stack."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    redis_url: str
    namespace: str
    model: str


def advert_path(home: Path) -> Path:
    """Return the file's place."""
    return home / "up.json"


def is_up(home: Path) -> bool:
    """Return whether `sluice up` runs in a home, ready or not."""
    try:
        file = os.open(advert_path(home), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(file)


def read_advert(home: Path) -> Advert | None:
    """Return how to use the stack that is up in a home; None where there is none, or none that is ready."""
    if not is_up(home):
        return None
    try:
        return Advert.model_validate_json(advert_path(home).read_bytes())
    except (ValidationError, FileNotFoundError):
        return None
