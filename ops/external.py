"""The stack of somebody else's processes at SLUICE_REDIS_URL, as a command uses it: containers, honcho, systemd.

Owns the judgement whether such a stack is there: every stage that the command needs is registered. Knows nothing
about who runs the processes.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from typing import ClassVar

from ops.leftovers import is_dead_here
from ops.serving import Serving, Warn, warn_on_stderr
from pipeline.connect import open_transport
from pipeline.errors import ServerError, SluiceError
from pipeline.keys import STAGES
from pipeline.settings import Settings

OWN_STACK = "stack"
"""What a command registers whose stages are for itself alone."""
JOBS = "jobs"
"""The process that goes on with batches; a single request does not meet it."""
POLL_S = 5.0
MISSING_S = 120.0  # a stage that is restarted loads its model in less


class StageMissing(SluiceError):  # noqa: N818 - reads as the fact it states
    """A stage of the stack has not been there for so long that nothing will come any more."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "stage_missing"


class StackIncomplete(SluiceError):  # noqa: N818
    """Some stages of the stack are there, and some are not."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "stack_incomplete"


class ExternalStack(Serving):
    """Uses what is there, and starts nothing."""

    def __init__(self, settings: Settings, warn: Warn = warn_on_stderr, needed: Sequence[str] = STAGES) -> None:
        """Plan to use it; `needed` are the stages that must not stay away."""
        super().__init__(settings, warn)
        self._needed = tuple(needed)

    @property
    def greeting(self) -> str:
        """Say where it is."""
        return "using the stack that runs at SLUICE_REDIS_URL"

    def afterwards(self, batch_id: str) -> str:
        """Say that a batch goes on."""
        return f", and its stack does even now; `sluice cancel {batch_id}` ends it"

    async def wait_failed(self) -> SluiceError:
        """Return when a stage stays away."""
        complete_at = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            try:
                present = {process.stage for process in await self.transport.processes()}
            except ServerError:  # whoever waits for results says so
                present = set(self._needed)
            missing = _missing(self._needed, present)
            if not missing:
                complete_at = time.monotonic()
            elif time.monotonic() > complete_at + MISSING_S:
                return StageMissing(f"no process of {', '.join(missing)} has been there for {MISSING_S:.0f} s")

    async def _start(self, starting: AsyncExitStack) -> None:
        self._transport = await open_transport(self.settings)
        starting.push_async_callback(self._transport.close)
        starting.push_async_callback(self._cancel_unfinished)


def needed_stages(*, with_jobs: bool) -> tuple[str, ...]:
    """Return the stages that a batch needs, or only those that a single request meets."""
    return (*STAGES, JOBS) if with_jobs else STAGES


async def external_stack(settings: Settings, needed: Sequence[str] = STAGES) -> bool:
    """Return whether SLUICE_REDIS_URL leads to a stack that somebody else runs and that has the stages needed.

    Stages that another command has started for itself are none: they end with it (OWN_STACK).

    Raises:
        StackIncomplete: some of the stages needed are missing. Stages of our own beside the others would be in their
            way: at the end we would sweep a pool that is theirs.
        ServerError: the server cannot be used.
    """
    if settings.redis_url is None:
        return False
    transport = await open_transport(settings)
    try:
        present = {process.stage for process in await transport.processes() if not is_dead_here(process)}
    finally:
        await transport.close()
    if OWN_STACK in present or present.isdisjoint(STAGES):
        return False
    if missing := _missing(needed, present):
        raise StackIncomplete(
            f"the stack at SLUICE_REDIS_URL has no process of {', '.join(missing)} at the moment; "
            "start what is missing, or use a SLUICE_NAMESPACE of your own"
        )
    return True


def _missing(needed: Sequence[str], present: Collection[str]) -> tuple[str, ...]:
    return tuple(stage for stage in needed if stage not in present)
