"""What every stage's process does around its work: connect, announce itself, keep leases, stop when told.

The composition root's other half: `__main__` builds what is particular to a stage, this what is common to all.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from kv_store.codecs.registry import UnknownCodecError
from kv_store.errors import KvStoreError
from pipeline.connect import open_transport
from pipeline.errors import SluiceError
from pipeline.leases import LeaseKeeper, stop_on_signals
from pipeline.logs import configure_logs
from pipeline.settings import Settings, load_settings
from pipeline.transport import Transport
from stages.common.environment import prepare_process
from stages.common.handshake import Registration
from stages.gguf.errors import GgufError
from stages.text.errors import TextError

# What the person who started the process can mend: said in a sentence, without a traceback.
_EXPLAINED = (SluiceError, KvStoreError, GgufError, TextError, UnknownCodecError)


@dataclass(frozen=True, slots=True)
class StageProcess:
    """What a stage works with; all of it ends with the process."""

    transport: Transport
    leases: LeaseKeeper
    stopping: asyncio.Event


@asynccontextmanager
async def stage_process(
    stage: str, settings: Settings, parts: Mapping[str, str], pool_id: str | None = None
) -> AsyncIterator[StageProcess]:
    """Connect and announce; yields when this process may take work.

    Raises:
        SluiceError: The server cannot be used, or another process would compute other bits.
    """
    transport = await open_transport(settings, pool_id=pool_id)
    try:
        registration = Registration(transport, stage, parts)
        leases = LeaseKeeper(transport, settings.lease_s)
        with stop_on_signals() as stopping:
            await registration.announce()
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(registration.keep()), tasks.create_task(leases.run())]
                structlog.get_logger(stage).info("stage_ready")
                try:
                    yield StageProcess(transport, leases, stopping)
                finally:
                    for task in background:
                        task.cancel()
    finally:
        await transport.close()


def run_stage(stage: str, serve: Callable[[Settings], Coroutine[Any, Any, None]]) -> None:
    """Read the settings, serve until stopped, and explain an end that the operator can mend.

    `serve` imports the engine itself, if it needs it: its environment is not set before this is called.
    """
    try:
        settings = load_settings()
        prepare_process(settings.home)
        configure_logs(stage, settings.log_level)
        asyncio.run(serve(settings))
    except* _EXPLAINED as group:  # plain, or as a task group wraps it
        error = _first_of(group)
        structlog.get_logger(stage).error("stage_failed", reason=str(error), code=type(error).__name__)
        sys.exit(1)


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
