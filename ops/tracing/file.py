"""Reads a trace as trace.py writes it. Knows the format and nothing about requests or drawing."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took time; times are microseconds."""

    pid: int
    tid: int
    name: str
    stage: str
    ts: float
    dur: float
    args: dict[str, Any]

    @property
    def request_id(self) -> str:
        """Whose it is."""
        return str(self.args["request_id"])


@dataclass(frozen=True, slots=True)
class End:
    """One end of an arrow."""

    pid: int
    tid: int
    ts: float


@dataclass(slots=True)
class TraceFile:
    """What a trace holds."""

    processes: list[tuple[int, str]] = field(default_factory=list)
    """Numbers and names, in the order in which they are shown."""
    lanes: dict[tuple[int, int], str] = field(default_factory=dict)
    """Names of the lanes of processes."""
    slices: list[Slice] = field(default_factory=list)
    """By their beginning; one that holds others comes before them."""
    arrows: list[tuple[End, End]] = field(default_factory=list)
    counters: dict[str, list[tuple[float, dict[str, float]]]] = field(default_factory=dict)
    """By name, each a list of times and values."""

    @property
    def end_us(self) -> float:
        """When the last slice ends; never zero."""
        return max(1.0, max((one.ts + one.dur for one in self.slices), default=1.0))


def read_trace(document: dict[str, Any]) -> TraceFile:
    """Return what is in a trace.

    Raises:
        KeyError: it is none of ours.
    """
    names: dict[int, str] = {}
    ranks: dict[int, int] = {}
    begun: dict[object, End] = {}
    trace = TraceFile()
    for event in document["traceEvents"]:
        kind, name, args = event["ph"], event["name"], event.get("args", {})
        if kind == "X":
            place = event["pid"], event["tid"], name, event["cat"]
            trace.slices.append(Slice(*place, event["ts"], event["dur"], args))
        elif kind == "C":
            trace.counters.setdefault(name, []).append((event["ts"], args))
        elif kind == "s":
            begun[event["id"]] = End(event["pid"], event["tid"], event["ts"])
        elif kind == "f":
            trace.arrows.append((begun[event["id"]], End(event["pid"], event["tid"], event["ts"])))
        elif name == "thread_name":
            trace.lanes[event["pid"], event["tid"]] = args["name"]
        elif name == "process_name":
            names[event["pid"]] = args["name"]
        elif name == "process_sort_index":
            ranks[event["pid"]] = args["sort_index"]
    trace.slices.sort(key=lambda one: (one.ts, -one.dur))
    trace.processes = sorted(names.items(), key=lambda item: (ranks.get(item[0], 0), item[0]))
    return trace
