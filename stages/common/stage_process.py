"""What every stage's process does around its work: connect, announce itself, keep leases, stop when told.

The composition root's other half: `__main__` builds what is particular to a stage, this what is common to all.
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from kv_store.codecs.registry import UnknownCodecError
from kv_store.errors import KvStoreError
from pipeline import faults
from pipeline.connect import open_transport
from pipeline.counters import Counters
from pipeline.errors import SluiceError
from pipeline.heartbeat import Heartbeat, fork_heartbeat
from pipeline.leases import LeaseKeeper, Leases, stop_on_signals
from pipeline.logs import configure_logs
from pipeline.settings import Settings, load_settings
from pipeline.transport import Transport
from stages.common.environment import prepare_process
from stages.common.handshake import Registration
from stages.common.sweeper import Sweeper, interval_s, sweep_forever, sweeping
from stages.gguf.errors import GgufError
from stages.text.errors import TextError

# What the person who started the process can mend: said in a sentence, without a traceback.
_EXPLAINED = (SluiceError, KvStoreError, GgufError, TextError, UnknownCodecError)


@dataclass(frozen=True, slots=True)
class StageProcess:
    """What a stage works with; all of it ends with the process."""

    transport: Transport
    leases: Leases
    stopping: asyncio.Event
    sweeper: Sweeper

    @property
    def counters(self) -> Counters:
        """Where the stage counts what should be rare; the sweeper hands it on."""
        return self.sweeper.counters


@asynccontextmanager
async def stage_process(
    stage: str,
    settings: Settings,
    parts: Mapping[str, str],
    pool_id: str | None = None,
    *,
    capacity: Mapping[str, int] | None = None,
    heartbeat: socket.socket | None = None,
) -> AsyncIterator[StageProcess]:
    """Connect, announce and begin to sweep; yields when this process may take work.

    Args:
        stage: Its word.
        settings: Of the process.
        parts: What must agree in all processes of a stack.
        pool_id: The pool that it reaches.
        capacity: How much it takes at a time, where others go by it (handshake.py).
        heartbeat: The line to the process that keeps its leases; without one they are kept on the loop.

    Raises:
        SluiceError: The server cannot be used, or another process would compute other bits.
        KvStoreError: The pool cannot be opened.
    """
    transport = await open_transport(settings, pool_id=pool_id)
    try:
        registration = Registration(transport, stage, parts, pool_id, capacity=capacity)
        leases = await _leases(stage, settings, transport, heartbeat)
        with stop_on_signals() as stopping:
            await registration.announce()
            async with (
                sweeping(stage, settings, transport, pool_id) as sweeper,
                asyncio.TaskGroup() as tasks,
            ):
                background = [tasks.create_task(registration.keep()), tasks.create_task(leases.run())]
                background.append(tasks.create_task(sweep_forever(sweeper, interval_s(settings.lease_s))))
                structlog.get_logger(stage).info("stage_ready")
                try:
                    yield StageProcess(transport, leases, stopping, sweeper)
                finally:
                    for task in background:
                        task.cancel()
    finally:
        await transport.close()


def run_stage(stage: str, serve: Callable[[Settings], Coroutine[Any, Any, None]]) -> None:
    """Read the settings, serve until stopped, and explain an end that the operator can mend."""
    _run(stage, lambda settings: asyncio.run(serve(settings)))


def run_engine_stage(stage: str, serve: Callable[[Settings, socket.socket], Coroutine[Any, Any, None]]) -> None:
    """Do as run_stage for a stage whose engine may hold the interpreter: its leases are kept by another process.

    `serve` gets the line to that one. It imports the engine itself: the environment is not set before this is called.
    """

    def run(settings: Settings) -> None:
        line = fork_heartbeat(settings)  # while there are neither threads nor an engine
        asyncio.run(serve(settings, line))

    _run(stage, run)


async def _leases(stage: str, settings: Settings, transport: Transport, line: socket.socket | None) -> Leases:
    if line is None:
        return LeaseKeeper(transport, settings.lease_s, on_hung=partial(_end_hung, stage))
    return await Heartbeat.open(line, transport.consumer, settings.lease_s)


def _run(stage: str, run: Callable[[Settings], None]) -> None:
    try:
        settings = load_settings()
        prepare_process(settings.home)
        configure_logs(stage, settings.log_level)
        faults.configure(settings.fault, settings.fault_dir)
        run(settings)
    except* _EXPLAINED as group:  # plain, or as a task group wraps it
        error = _first_of(group)
        structlog.get_logger(stage).error("stage_failed", reason=str(error), code=type(error).__name__)
        sys.exit(1)


def _end_hung(stage: str) -> None:
    """End this process, so that a supervisor starts one that works; its leases have run out by now.

    At once and without clean-up: a thread that hangs in native code cannot be interrupted, and an orderly end would
    wait for it.
    """
    structlog.get_logger(stage).error("process_hung", exit_status=os.EX_SOFTWARE)
    os._exit(os.EX_SOFTWARE)


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
