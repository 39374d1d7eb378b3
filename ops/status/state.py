"""A stack as its operator sees it: what its server knows, and what the supervisor of this home knows besides.

Owns what counts as missing, and how processes of both sources become one list. Knows nothing about how it is shown.
"""

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kv_store.pool import FilePool
from ops.control.client import NotUp, ask_status
from ops.finding import FoundStack
from ops.leftovers import has_died_here
from ops.supervision.procfile import default_procfile, read_procfile
from ops.supervision.slot_status import SlotStatus
from pipeline.connect import open_client
from pipeline.finished_log import output_tokens_per_s
from pipeline.keys import STAGES, Keys
from pipeline.overview import Observer, Overview, ProcessState
from pipeline.server_check import check_server
from pipeline.server_url import read_address
from stages.common.handshake import REGISTRATION_TTL_S

PACE_WINDOW_S = 30.0  # a few answers long, and short enough to see a change


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process of a stack, or a place where one should be."""

    stage: str
    name: str
    pid: int | None
    host: str | None
    state: str
    """The supervisor's word where it is of this home, else `registered`, or `gone` for one of this host that died."""
    renewed_s: float | None
    """Since it renewed its registration; None where it has none."""
    num_restarts: int | None
    uptime_s: float | None


@dataclass(frozen=True, slots=True)
class StackStatus:
    """A stack at one moment."""

    found: FoundStack
    overview: Overview
    stages: tuple[str, ...]
    """That the Procfile asks for."""
    slots: tuple[SlotStatus, ...] | None
    """What the supervisor runs; None where it is not of this home."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Stages without a process that has announced itself."""
        present = {process.stage for process in self.overview.processes}
        return tuple(stage for stage in self.stages if stage not in present)

    @property
    def processes(self) -> list[ProcessRow]:
        """All processes, in the order of the Procfile."""
        left = list(self.overview.processes)
        rows: list[ProcessRow] = []
        for slot in self.slots or ():
            registered = next((one for one in left if one.pid == slot.pid and one.host == socket.gethostname()), None)
            if registered is not None:
                left.remove(registered)
            rows.append(_slot_row(slot, registered))
        rows += [_registered_row(process) for process in left]
        order = {stage: place for place, stage in enumerate(self.stages)}
        return sorted(rows, key=lambda row: order.get(row.stage, len(order)))

    def as_json(self) -> dict[str, object]:
        """Return all of it for a script."""
        overview = self.overview
        return {
            "home": str(self.found.settings.home),
            "model": self.found.settings.model,
            "namespace": overview.namespace,
            "up_pid": self.found.up_pid,
            "server": dataclasses.asdict(overview.server),
            "processes": [dataclasses.asdict(row) for row in self.processes],
            "missing": list(self.missing),
            "queues": [dataclasses.asdict(queue) | {"num_waiting": queue.num_waiting} for queue in overview.queues],
            "kv": None if overview.kv is None else dataclasses.asdict(overview.kv),
            "requests": self._requests(),
            "output_tokens_per_s": round(output_tokens_per_s(overview.ended, overview.at_us, PACE_WINDOW_S), 1),
            "batches": [batch.model_dump(mode="json", exclude={"summary"}) for batch in overview.batches],
            "dead_letters": dict(overview.dead),
            "counters": dict(overview.counters),
        }

    def _requests(self) -> dict[str, object]:
        overview = self.overview
        return {
            "waiting": {stage: overview.num_waiting(stage) for stage in STAGES},
            "in_work": {stage: overview.num_held(stage) for stage in STAGES},
            "lately": {state: overview.num_ended(state) for state in ("finished", "failed", "cancelled")},
        }


class Watch:
    """Looks at one stack, as often as it is asked."""

    def __init__(self, found: FoundStack, observer: Observer, stages: Sequence[str]) -> None:
        """Wire it up; it owns nothing."""
        self.observer = observer
        self._found = found
        self._stages = tuple(stages)

    async def look(self) -> StackStatus:
        """Return the stack as it is now.

        Raises:
            ServerError: the server does not answer.
            KvStoreError: the pool cannot be looked at.
        """
        overview, slots = await asyncio.gather(self.observer.look(), self._slots())
        return StackStatus(self._found, overview, self._stages, slots)

    async def _slots(self) -> tuple[SlotStatus, ...] | None:
        if self._found.up_pid is None:
            return None
        try:
            slots = await ask_status(self._found.settings.home)
        except NotUp:  # it is just ending; what the server knows is still worth showing
            return None
        return None if slots is None else tuple(slots)


@asynccontextmanager
async def watching(found: FoundStack, procfile: Path | None = None) -> AsyncIterator[Watch]:
    """Yield a watch over a stack.

    Raises:
        ServerError: its server cannot be used; says why.
    """
    settings = found.settings
    stages = [line.stage for line in read_procfile(procfile or default_procfile())]
    where, keys = read_address(settings.redis_url or ""), Keys(settings.namespace)
    client = open_client(settings)
    try:
        await check_server(client, where, settings.namespace)
        with ExitStack() as opened:
            # Opening a pool makes it where there is none, and whoever only looks makes nothing.
            exists = settings.pool_dir.is_dir()
            pool = opened.enter_context(FilePool.open(settings.pool_dir, settings.kv_pool_bytes)) if exists else None
            yield Watch(found, Observer(client, where.shown, keys, pool), stages)
    finally:
        await client.aclose()


def _slot_row(slot: SlotStatus, registered: ProcessState | None) -> ProcessRow:
    return ProcessRow(
        stage=slot.stage,
        name=slot.name,
        pid=slot.pid,
        host=socket.gethostname() if slot.pid is not None else None,
        state=slot.state,
        renewed_s=None if registered is None else _age_s(registered),
        num_restarts=slot.num_restarts,
        uptime_s=slot.uptime_s,
    )


def _registered_row(process: ProcessState) -> ProcessRow:
    return ProcessRow(
        stage=process.stage,
        name=process.stage,
        pid=process.pid,
        host=process.host,
        state="gone" if has_died_here(process.consumer) else "registered",
        renewed_s=_age_s(process),
        num_restarts=None,
        uptime_s=None,
    )


def _age_s(process: ProcessState) -> float:
    return round(max(0.0, REGISTRATION_TTL_S - process.expires_in_s), 3)
