"""From two readings of a stack's counters to what the queues cost in between, and tables of it.

Owns what counts as a round trip and as the queue layer. Knows nothing about how readings come about.

    round trip     an answer that the server wrote: what scripts call inside is none, and what is sent together is one
    queue layer    the server; the event loops of tokenizer, prefill, compressor and decode; and in prefill and decode
                   also all threads but the engine's, which write and load blobs. What tokenizer and compressor do in
                   their other threads is their work. The jobs process (batches, samples) has no part in a request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.bench.figures import Spread, percent
from ops.bench.hops import HOPS, Hop
from ops.bench.proc import CpuSeconds
from ops.measuring import markdown_table

SERVER = "server"
JOBS = "jobs"
COMPUTING = ("prefill", "decode")
AIM_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Answers that the server wrote."""

    total: int
    scripts: int
    """EVALSHA, and EVAL where the script was new."""
    reads: int
    """XREAD: of stages that wait for work, and of clients that read results."""

    @property
    def others(self) -> int:
        """Return single commands, and several that were sent together."""
        return self.total - self.scripts - self.reads

    def __sub__(self, before: "RoundTrips") -> "RoundTrips":
        return RoundTrips(self.total - before.total, self.scripts - before.scripts, self.reads - before.reads)


@dataclass(frozen=True, slots=True)
class Reading:
    """All counters at one moment."""

    at_s: float
    round_trips: RoundTrips
    cpu: Mapping[str, CpuSeconds]
    client_cpu_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What happened between two readings."""

    name: str
    wall_s: float
    round_trips: RoundTrips
    cpu: dict[str, CpuSeconds]
    """By process of the stack, the server among them."""
    client_cpu_s: float
    """Of this process, which is the client of all requests."""
    num_requests: int = 0
    output_tokens: int = 0
    num_deltas: int = 0
    """Result entries that clients read."""
    hops: dict[str, Hop] = field(default_factory=dict)

    @classmethod
    def between(cls, name: str, before: Reading, after: Reading, **counted: Any) -> "Cost":
        """Return the difference of two readings, less the question for the second one."""
        trips = after.round_trips - before.round_trips
        return cls(
            name=name,
            wall_s=after.at_s - before.at_s,
            round_trips=RoundTrips(trips.total - 1, trips.scripts, trips.reads),
            cpu={process: after.cpu[process] - used for process, used in before.cpu.items()},
            client_cpu_s=after.client_cpu_s - before.client_cpu_s,
            **counted,
        )

    @property
    def stack_cpu_s(self) -> float:
        """Return the CPU time of all processes of the stack."""
        return sum(used.total_s for used in self.cpu.values())

    @property
    def queue_cpu_s(self) -> float:
        """Return the CPU time of the queue layer."""
        return sum(part_s for process, used in self.cpu.items() for part_s in queue_parts(process, used).values())

    @property
    def queue_share(self) -> float:
        """Return the queue layer's part of the stack's CPU time."""
        return self.queue_cpu_s / self.stack_cpu_s if self.stack_cpu_s else 0.0


def queue_parts(process: str, used: CpuSeconds) -> dict[str, float]:
    """Return what of a process's CPU time belongs to the queue layer, by what it does."""
    if process == SERVER:
        return {"all": used.total_s}
    if process == JOBS:
        return {}
    if process in COMPUTING:
        return {"event loop": used.loop_s, "blobs": used.helpers_s}
    return {"event loop": used.loop_s}


def tables(costs: Sequence[Cost]) -> str:
    """Return hops, round trips and CPU time, and the verdict; the first cost is that of an idle stack."""
    busy = [cost for cost in costs if cost.num_requests]
    loaded = busy[-1]
    verdict = (
        f"queue layer, {loaded.name}: {percent(loaded.queue_share)} of the stack's CPU time; the aim is below "
        f"{percent(AIM_SHARE)}: {'met' if loaded.queue_share < AIM_SHARE else 'MISSED'}"
    )
    idle = f"idle stack: {percent(costs[0].stack_cpu_s / costs[0].wall_s)} of a core"
    return "\n\n".join((hop_table(busy), trip_table(costs), cpu_table(busy), idle, verdict))


def hop_table(costs: Sequence[Cost]) -> str:
    """Return p50 and p99 of each hop, and how many messages nothing stood before."""
    header = ["hop to, ms p50 / p99"]
    for cost in costs:
        header += [cost.name, "counted"]
    rows: list[tuple[str, ...]] = []
    for name in HOPS:
        row = [name]
        for hop in (cost.hops[name] for cost in costs):
            spread = Spread.of(hop.latencies_ms) if hop.latencies_ms else None
            row.append("-" if spread is None else f"{spread.p50:.2f} / {spread.p99:.2f}")
            row.append(f"{len(hop.latencies_ms)} of {hop.num_messages}")
        rows.append(tuple(row))
    return markdown_table(tuple(header), rows)


def trip_table(costs: Sequence[Cost]) -> str:
    """Return round trips for each second, request and output token."""
    header = ("round trips", *(cost.name for cost in costs))
    rows = [
        ("a second", *(f"{cost.round_trips.total / cost.wall_s:.1f}" for cost in costs)),
        ("a request", *(_per(cost, cost.num_requests) for cost in costs)),
        ("an output token", *(_per(cost, cost.output_tokens) for cost in costs)),
        ("less an idle stack's", *(_net(cost, costs[0]) for cost in costs)),
        ("of them scripts", *(_part(cost, cost.round_trips.scripts) for cost in costs)),
        ("of them XREAD", *(_part(cost, cost.round_trips.reads) for cost in costs)),
        ("of them others", *(_part(cost, cost.round_trips.others) for cost in costs)),
        ("result entries read by clients", *(str(cost.num_deltas) for cost in costs)),
        ("requests", *(str(cost.num_requests) for cost in costs)),
        ("output tokens", *(str(cost.output_tokens) for cost in costs)),
    ]
    return markdown_table(header, rows)


def cpu_table(costs: Sequence[Cost]) -> str:
    """Return each part's share of the stack's CPU time, the queue layer's parts first."""
    header = ("of the stack's CPU time", *(cost.name for cost in costs))
    rows: list[tuple[str, ...]] = []
    for process in costs[0].cpu:
        for part in queue_parts(process, CpuSeconds()):
            shares = (_share(cost, queue_parts(process, cost.cpu[process])[part]) for cost in costs)
            rows.append((f"{process}, {part}", *shares))
    rows.append(("queue layer", *(percent(cost.queue_share) for cost in costs)))
    for process in costs[0].cpu:
        rest = [_rest_s(process, cost.cpu[process]) for cost in costs]
        if process != SERVER:
            shares = (_share(cost, rest_s) for cost, rest_s in zip(costs, rest, strict=True))
            rows.append((f"{process}, work", *shares))
    rows.append(("all, s", *(f"{cost.stack_cpu_s:.1f}" for cost in costs)))
    per_token = (f"{1000 * cost.queue_cpu_s / cost.output_tokens:.3f}" for cost in costs)
    rows.append(("queue layer, ms an output token", *per_token))
    rows.append(("beside it: the client, s", *(f"{cost.client_cpu_s:.1f}" for cost in costs)))
    return markdown_table(header, rows)


def _rest_s(process: str, used: CpuSeconds) -> float:
    return used.total_s - sum(queue_parts(process, used).values())


def _per(cost: Cost, number: int) -> str:
    return f"{cost.round_trips.total / number:.2f}" if number else "-"


def _net(cost: Cost, idle: Cost) -> str:
    """Round trips for each output token without those that an idle stack makes in the same time."""
    if not cost.output_tokens:
        return "-"
    background = idle.round_trips.total / idle.wall_s * cost.wall_s
    return f"{(cost.round_trips.total - background) / cost.output_tokens:.2f}"


def _part(cost: Cost, number: int) -> str:
    return percent(number / cost.round_trips.total) if cost.round_trips.total else "-"


def _share(cost: Cost, part_s: float) -> str:
    return percent(part_s / cost.stack_cpu_s) if cost.stack_cpu_s else "-"
