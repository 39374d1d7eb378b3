"""How much the decode processes of a pool take together, as they announced it."""

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.transport import Process
from stages.common.handshake import read_announcement


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of all decode processes of one pool; 0 where there are none, or they do not say."""

    slots: int
    """Requests that they work on at a time, together."""
    pages: int
    """KV pages of the largest one: a request that needs more fits nowhere."""


def capacity_of(processes: Iterable[Process], pool_id: str) -> Capacity:
    """Return what the decode processes of that pool take; others, and what cannot be read, do not count."""
    announced = [read_announcement(process) for process in processes if process.stage == "decode"]
    ours = [process for process in announced if process.pool_id == pool_id]
    return Capacity(
        slots=sum(process.slots for process in ours), pages=max((process.pages for process in ours), default=0)
    )
