"""Where a trace shows what: a process for each queue and each replica, a lane for each thing that happens at a time.

Owns the numbers, names and order of processes and lanes. Knows nothing about requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pipeline.keys import STAGES

LaneKind = Literal["work", "write"]
_FIRST_TID = {"work": 1, "write": 10_001}  # more requests at a time than any process holds


@dataclass(frozen=True, slots=True)
class Queue:
    """Where requests wait for a stage, whichever of its processes will take them."""

    stage: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One process of a stage; `by` is its consumer name."""

    stage: str
    by: str


@dataclass(frozen=True, slots=True)
class Gauges:
    """Counters of the queues around one pool, and of the pool."""

    pool_id: str


Track = Queue | Replica | Gauges


@dataclass(frozen=True, slots=True)
class Place:
    """A lane of a process."""

    pid: int
    tid: int


class Lanes:
    """Hands out places, in the order of time: each to one thing at a time."""

    def __init__(self) -> None:
        self._pids: dict[Track, int] = {}
        self._free_at: dict[tuple[Track, LaneKind], list[int]] = {}

    def pid(self, track: Track) -> int:
        """Return the number of a process."""
        return self._pids.setdefault(track, len(self._pids) + 1)

    def place(self, track: Track, kind: LaneKind, start_us: int, end_us: int) -> Place:
        """Return the first lane that is free from start to end; later calls must not start earlier."""
        free_at = self._free_at.setdefault((track, kind), [])
        lane = next((n for n, free_us in enumerate(free_at) if free_us <= start_us), len(free_at))
        free_at[lane : lane + 1] = [end_us]
        return Place(self.pid(track), _FIRST_TID[kind] + lane)

    def names(self) -> Iterator[dict[str, object]]:
        """Yield the events that name and order everything that was handed out."""
        for track, pid in self._pids.items():
            yield _meta("process_name", pid, {"name": self._name(track)})
            yield _meta("process_sort_index", pid, {"sort_index": _rank(track)})
        for (track, kind), free_at in self._free_at.items():
            for lane in range(len(free_at)):
                tid = _FIRST_TID[kind] + lane
                name = f"{_lane_name(track, kind)} {lane + 1}"
                yield _meta("thread_name", self._pids[track], {"name": name}, tid)
                yield _meta("thread_sort_index", self._pids[track], {"sort_index": tid}, tid)

    def _name(self, track: Track) -> str:
        if isinstance(track, Queue):
            return f"waiting for {track.stage}"
        if isinstance(track, Gauges):
            several = sum(isinstance(other, Gauges) for other in self._pids) > 1
            return f"queues and KV of pool {track.pool_id}" if several else "queues and KV"
        siblings = [other for other in self._pids if isinstance(other, Replica) and other.stage == track.stage]
        number = f" {siblings.index(track) + 1}" if len(siblings) > 1 else ""
        return f"{track.stage}{number}{_process_of(track.by)}"


def _rank(track: Track) -> int:
    if isinstance(track, Gauges):
        return 2 * len(STAGES)
    return 2 * STAGES.index(track.stage) + isinstance(track, Replica)


def _lane_name(track: Track, kind: LaneKind) -> str:
    if isinstance(track, Queue):
        return "waiting"
    return "request" if kind == "work" else "writing blobs"


def _process_of(consumer: str) -> str:
    """The process id in a consumer's name, which is host:pid:random unless somebody chose one."""
    parts = consumer.rsplit(":", 2)
    return f" (process {parts[1]})" if len(parts) == 3 else ""


def _meta(name: str, pid: int, args: dict[str, object], tid: int | None = None) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": pid, **({} if tid is None else {"tid": tid}), "args": args}
