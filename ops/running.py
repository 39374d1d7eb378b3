"""Tells the commands of one home whether `sluice up` runs there, so that they use its stack.

Owns the writing of home/up.json (pipeline/advert.py). Knows nothing about how a stack runs.
"""

import asyncio
import fcntl
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar

from ops.serving import Serving, Warn, warn_on_stderr
from pipeline.advert import Advert, advert_path, is_up, read_advert
from pipeline.connect import open_transport
from pipeline.errors import InvalidRequest, SluiceError
from pipeline.settings import Settings

POLL_S = 0.3
READY_TIMEOUT_S = 300.0  # as long as the supervisor gives a process


class AlreadyUp(SluiceError):  # noqa: N818 - reads as the fact it states
    """Another `sluice up` runs in this home."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "already_up"


class StackGone(SluiceError):  # noqa: N818
    """The stack of `sluice up` that this command used has ended."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "stack_gone"


class UpLock:
    """Held by `sluice up`, from before its stack starts until after it has stopped."""

    def __init__(self, home: Path) -> None:
        self._file = os.open(advert_path(home), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise AlreadyUp(f"another `sluice up` runs in {home}") from None
        os.truncate(self._file, 0)

    def announce(self, settings: Settings) -> None:
        """Say that the stack is ready."""
        assert settings.redis_url is not None
        advert = Advert(
            pid=os.getpid(), redis_url=settings.redis_url, namespace=settings.namespace, model=settings.model
        )
        os.pwrite(self._file, advert.model_dump_json().encode(), 0)

    def release(self) -> None:
        """Let others start their own stacks again."""
        os.truncate(self._file, 0)
        os.close(self._file)


async def find_advert(settings: Settings) -> Advert | None:
    """Return how to use the stack of `sluice up` in this home, waiting until it is ready; None where none runs.

    None, too, where SLUICE_REDIS_URL names another server: then that is meant.

    Raises:
        StackGone: it did not get ready.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    home = settings.home
    while is_up(home):
        advert = read_advert(home)
        if advert is not None:
            return advert if settings.redis_url in {None, advert.redis_url} else None
        if time.monotonic() > deadline:
            raise StackGone(f"`sluice up` in {home} did not get ready")
        await asyncio.sleep(POLL_S)
    return None


class AttachedStack(Serving):
    """The stack of a `sluice up` in the same home, as another command uses it."""

    def __init__(self, settings: Settings, advert: Advert, warn: Warn = warn_on_stderr) -> None:
        if settings.model != advert.model:
            raise InvalidRequest(
                "model", f"`sluice up` (process {advert.pid}) serves {advert.model}, not {settings.model}"
            )
        theirs = {"redis_url": advert.redis_url, "namespace": advert.namespace}
        super().__init__(settings.model_copy(update=theirs), warn)
        self._pid = advert.pid

    @property
    def greeting(self) -> str:
        """Say whose stack it is."""
        return f"using the stack of `sluice up` (process {self._pid})"

    def afterwards(self, batch_id: str) -> str:
        """Say that a batch goes on."""
        return f", and `sluice up` does even now; `sluice cancel {batch_id}` ends it"

    async def wait_failed(self) -> SluiceError:
        """Return when `sluice up` has ended."""
        while is_up(self.settings.home):  # noqa: ASYNC110 - another process's lock has no event
            await asyncio.sleep(POLL_S)
        return StackGone("`sluice up`, whose stack this command used, has ended")

    async def _start(self, starting: AsyncExitStack) -> None:
        self._transport = await open_transport(self.settings, warn=self._warn)
        starting.push_async_callback(self._transport.close)
        starting.push_async_callback(self._cancel_unfinished)
