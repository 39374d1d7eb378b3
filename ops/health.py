"""`python -m ops.health [STAGE]`: whether this host's process of a stage is registered and alive.

Made for health checks of containers, where host and container are the same and run one process. It only looks: a
worker that computes for minutes stays healthy, because its registration is renewed apart from its work, and nothing
is ever written, signalled or ended from here. Knows nothing about engines, and starts without one.

    exit 0   one is: prints which, and for how long its registration is good
    exit 1   none is, or nobody can tell: prints why. Never 2, which container engines reserve
"""

import asyncio
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ops.supervision.procfile import default_procfile, read_procfile
from pipeline.connect import host_and_pid, open_client
from pipeline.errors import ServerError, SluiceError
from pipeline.keys import Keys
from pipeline.redis_calls import RedisCalls, command, commands
from pipeline.server_problems import explained
from pipeline.server_url import read_address
from pipeline.settings import Settings, load_settings

LOOK_TIMEOUT_S = 5.0  # two answers of a healthy server take milliseconds; an engine gives up after its own time-out


@dataclass(frozen=True, slots=True)
class Registered:
    """A process of this host that the server knows."""

    stage: str
    pid: int
    expires_in_s: float
    """Until its registration runs out, unless it is renewed."""


class Unhealthy(SluiceError):  # noqa: N818 - reads as the fact it states
    """No process of this host is registered and alive; says what is there instead."""

    code = "unhealthy"


def main(words: Sequence[str]) -> int:
    """Print one sentence and return the exit code."""
    try:
        print(asyncio.run(look(_wanted(words), load_settings())))
    except SluiceError as error:
        print(error)
        return 1
    return 0


async def look(stage: str | None, settings: Settings) -> str:
    """Return a sentence about a healthy process of this host; without a stage, of any.

    Raises:
        Unhealthy: there is none.
        ServerError: the server does not say, or does not answer in time.
    """
    here = socket.gethostname()
    found = [one for one in await _registered(here, settings) if stage in {None, one.stage}]
    alive = [one for one in found if _runs(one.pid)]
    if alive:
        best = max(alive, key=lambda one: one.expires_in_s)
        return f"{best.stage} runs as process {best.pid}, registered for another {best.expires_in_s:.1f} s"
    if found:
        raise Unhealthy(f"{found[0].stage} is registered as process {found[0].pid} of {here}, which has ended")
    raise Unhealthy(f"no process of {stage or 'any stage'} on {here} is registered; it starts, hangs or has ended")


def _wanted(words: Sequence[str]) -> str | None:
    known = [line.stage for line in read_procfile(default_procfile())]
    if len(words) > 1 or not set(words) <= set(known):
        raise Unhealthy(f"{' '.join(words)!r} is no stage; there are {', '.join(known)}")
    return words[0] if words else None


async def _registered(here: str, settings: Settings) -> list[Registered]:
    """Ask the server; not by Transport.processes(), which clears up what has run out."""
    client = open_client(settings, max_connections=1)
    where = read_address(settings.redis_url or "")
    calls, keys = RedisCalls(client, where.shown, patience_s=0), Keys(settings.namespace)
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            members = cast("set[bytes]", await command(calls, client, "SMEMBERS", keys.processes()))
            named = [member.decode().partition(":")[::2] for member in sorted(members)]
            asked = [("PTTL", keys.process(stage, consumer)) for stage, consumer in named]
            ttls_ms = await commands(calls, client, asked, "PTTL") if asked else []
    except ServerError as error:
        raise explained(error, where) from error
    except TimeoutError:
        raise Unhealthy(f"{where.shown}: no answer within {LOOK_TIMEOUT_S:g} s") from None
    finally:
        await client.aclose()
    places = [host_and_pid(consumer) for _, consumer in named]
    return [
        Registered(stage, pid, ttl_ms / 1000)
        for (stage, _), (host, pid), ttl_ms in zip(named, places, ttls_ms, strict=True)
        if host == here and pid is not None and ttl_ms > 0
    ]


def _runs(pid: int) -> bool:
    """Return whether a process is there and not merely waiting to be reaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
