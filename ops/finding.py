"""Finds the stack that a command looks into, and never starts one.

That of `sluice up` in this home, else that at SLUICE_REDIS_URL, else the one that another command of this home has for
itself at the moment. Owns the choice. Knows nothing about what is looked at.
"""

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from ops.running import find_advert
from ops.server.valkey import running_server
from pipeline.client.errors import NoStack
from pipeline.errors import SluiceError
from pipeline.settings import Settings

STARTING_TIMEOUT_S = 2.0  # whoever looks wants to know now


class StackStarting(SluiceError):  # noqa: N818 - reads as the fact it states
    """`sluice up` has begun and is not ready."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "stack_starting"


@dataclass(frozen=True, slots=True)
class FoundStack:
    """Where a stack is, and what it serves."""

    settings: Settings
    """With the address, namespace and model of the stack."""
    up_pid: int | None
    """The process of `sluice up`; None for a server that somebody else's processes use."""


async def find_stack(settings: Settings, *, lasting: bool = False) -> FoundStack:
    """Return the stack that these settings mean; a lasting one does not end with a command that has it for itself.

    Raises:
        StackStarting: `sluice up` runs in the home and is not ready.
        NoStack: there is none.
    """
    try:
        async with asyncio.timeout(STARTING_TIMEOUT_S):
            advert = await find_advert(settings)
    except TimeoutError:
        raise StackStarting(f"`sluice up` in {settings.home} is still starting; try again in a moment") from None
    if advert is not None:
        theirs = {"redis_url": advert.redis_url, "namespace": advert.namespace, "model": advert.model}
        return FoundStack(settings.model_copy(update=theirs), advert.pid)
    if settings.redis_url is not None:
        return FoundStack(settings, None)
    url = None if lasting else running_server(settings.home)
    if url is not None:  # of a `sluice run` or `generate` with stages of its own
        return FoundStack(settings.model_copy(update={"redis_url": url}), None)
    raise NoStack(
        f"no `sluice up` runs in {settings.home}, and SLUICE_REDIS_URL is not set: there is no stack to look into"
    )
