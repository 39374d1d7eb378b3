"""Supervisors of stand-in processes (stand_in.py) for tests."""

import asyncio
import os
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from pathlib import Path

from ops.supervision.crashes import RestartPolicy
from ops.supervision.procfile import read_procfile
from ops.supervision.slots import Surroundings
from ops.supervision.supervisor import Supervisor
from tests.ops.waiting import DEADLINE_S

STAND_IN = Path(__file__).with_name("stand_in.py")
QUICK = RestartPolicy(first_delay_s=0.02, max_delay_s=0.05, ready_timeout_s=20)


def make_supervisor(
    directory: Path,
    modes: list[str],
    replicas: dict[str, int] | None = None,
    policy: RestartPolicy = QUICK,
    echoed: list[tuple[str, str]] | None = None,
    *,
    leave_grace_s: float = DEADLINE_S,
    stand_in: bool = True,
) -> Supervisor:
    """Return a supervisor of stand-ins, whose lines name a mode, or of any other commands."""
    (directory / "ready").mkdir(exist_ok=True)
    procfile = directory / "Procfile"
    lines = [mode.replace(": ", f": python {STAND_IN} ") + f" {directory}" for mode in modes]
    procfile.write_text("\n".join(lines if stand_in else modes))

    async def list_ready() -> Set[int]:
        return {int(path.name) for path in (directory / "ready").iterdir()}

    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "GREETING": "hello"}
    echo = None if echoed is None else lambda name, line: echoed.append((name, line))
    around = Surroundings(environment, directory, directory / "logs", echo)
    return Supervisor(read_procfile(procfile), replicas or {}, around, list_ready, policy, leave_grace_s)


@asynccontextmanager
async def started(supervisor: Supervisor) -> AsyncIterator[Supervisor]:
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop(grace_s=DEADLINE_S)


async def ready(supervisor: Supervisor) -> None:
    await asyncio.wait_for(supervisor.wait_ready(), DEADLINE_S)


def pids(supervisor: Supervisor) -> list[int]:
    return [state.pid for state in supervisor.states() if state.pid is not None]
