"""What a flooded stack held over time, each series beside its bound: verdicts and a picture.

Owns which series there are, and what bounds each. Knows nothing about how samples come about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ops.bench.chart import Chart, Line, panels
from ops.bench.proc import MIB
from ops.measuring import markdown_table
from pipeline.settings import Settings
from stages.prefill.room import READ_AHEAD

GROWTH, SLACK_MIB = 1.1, 4.0  # of memory that is flat: logs that are bounded by number fill up meanwhile
RATE_S = 5.0
PANEL_HEIGHT = 260
BLOBS, CREDITS, WITH_CREDIT = "blobs", "credits", "requests with credit"
IN_FRONT, COMPRESSOR, DECODE = "in front of prefill", "in compressor's queue", "in decode's queue"

Unit = Literal["MiB", "requests", "entries"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A stack at one moment."""

    at_s: float
    """Since the flood began."""
    blobs_mib: float
    credits_mib: float
    """What requests may fill of the pool."""
    num_credits: int
    num_in_front: int
    """Entries of tokenizer and prefill, which the door counts."""
    num_compressor: int
    num_decode: int
    num_accepted: int
    """So far."""
    num_refused: int
    memory_mib: dict[str, float]
    """Of each process, and what the server says that it uses for data."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """What became of one series."""

    name: str
    unit: Unit
    most: float
    bound: float
    is_configured: bool
    """Whether the bound is a setting's, or what the series itself was a while before."""

    @property
    def holds(self) -> bool:
        """Return whether it stayed at or below its bound."""
        return self.most <= self.bound


@dataclass(frozen=True, slots=True)
class Flooded:
    """What a flood came to."""

    samples: list[Sample]
    num_accepted: int
    num_refused: int
    step_ms: float
    num_ended: int
    """Requests that came to their end in that time; of the last thousand."""


def verdicts(usual: Flooded, slowed: Flooded, bounded: Sequence[Bounded]) -> str:
    """Return a line for each series, and what the door did."""
    rows = [
        (
            one.name,
            f"{one.most:.1f} {one.unit}",
            f"{one.bound:.1f}",
            "set" if one.is_configured else "flat",
            "ok" if one.holds else "EXCEEDED",
        )
        for one in bounded
    ]
    offered = slowed.num_accepted + slowed.num_refused
    lines = (
        f"a step of decode: {usual.step_ms:.0f} ms, slowed {slowed.step_ms:.0f} ms",
        f"door: {offered} requests came, {slowed.num_accepted} were accepted, {slowed.num_refused} were told to come "
        f"again: {'ok' if slowed.num_refused else 'NEVER BUSY, so this was no flood'}",
        f"ended meanwhile: {slowed.num_ended}",
    )
    return "\n\n".join((markdown_table(("series", "most", "bound", "kind", "verdict"), rows), "\n".join(lines)))


def bounds_of(samples: Sequence[Sample], settings: Settings) -> list[Bounded]:
    """Return each series with its bound.

    Memory of processes has no bound that is set: its second half is held against its second quarter. The first one is
    left out, in which slots and queues fill.
    """
    pool_mib = settings.kv_pool_bytes / MIB
    most_requests = min(settings.max_decode_queue, READ_AHEAD * settings.max_num_seqs)

    def configured(name: str, unit: Unit, of: Callable[[Sample], float], bound: float) -> Bounded:
        return Bounded(name, unit, max(map(of, samples)), bound, is_configured=True)

    found = [
        configured(BLOBS, "MiB", lambda sample: sample.blobs_mib, pool_mib),
        configured(CREDITS, "MiB", lambda sample: sample.credits_mib, pool_mib),
        configured(WITH_CREDIT, "requests", lambda sample: sample.num_credits, most_requests),
        configured(IN_FRONT, "entries", lambda sample: sample.num_in_front, settings.max_queue),
        # A chunk of each: prompts are shorter than one.
        configured(COMPRESSOR, "entries", lambda sample: sample.num_compressor, most_requests),
        configured(DECODE, "entries", lambda sample: sample.num_decode, most_requests),
    ]
    for name in samples[0].memory_mib:
        values = [sample.memory_mib[name] for sample in samples if name in sample.memory_mib]
        earlier = values[len(values) // 4 : len(values) // 2] or values
        bound = GROWTH * max(earlier) + SLACK_MIB
        found.append(Bounded(name, "MiB", max(values[len(values) // 2 :]), bound, is_configured=False))
    return found


def picture(samples: Sequence[Sample], bounded: Sequence[Bounded]) -> str:
    """Return the samples as a picture, with the bounds that are set."""
    bounds = {one.name: one.bound for one in bounded if one.is_configured}

    def line(name: str, of: Callable[[Sample], float]) -> Line:
        return Line(name, [(sample.at_s, of(sample)) for sample in samples])

    def bound(name: str, label: str) -> Line:
        return Line(label, [(0.0, bounds[name]), (samples[-1].at_s, bounds[name])], is_bound=True)

    memory = [
        Line(name, [(sample.at_s, sample.memory_mib[name]) for sample in samples if name in sample.memory_mib])
        for name in samples[0].memory_mib
    ]
    pool = [
        line(CREDITS, lambda sample: sample.credits_mib),
        bound(CREDITS, "the pool"),
        line(BLOBS, lambda sample: sample.blobs_mib),
    ]
    behind = [
        line(WITH_CREDIT, lambda sample: sample.num_credits),
        bound(WITH_CREDIT, "twice decode's slots"),
        line(DECODE, lambda sample: sample.num_decode),
        line(COMPRESSOR, lambda sample: sample.num_compressor),
    ]
    in_front = [line(IN_FRONT, lambda sample: sample.num_in_front), bound(IN_FRONT, "the door's bound")]
    door = [
        Line("accepted", per_second([(sample.at_s, sample.num_accepted) for sample in samples])),
        Line("refused", per_second([(sample.at_s, sample.num_refused) for sample in samples])),
    ]
    return panels(
        [
            (Chart("KV pool: what requests may fill, and what is full", "s", "MiB", PANEL_HEIGHT), pool),
            (Chart("From prefill to the end: requests with credit, and queues", "s", "", PANEL_HEIGHT), behind),
            (Chart("In front of prefill: tokenizer's and prefill's queue", "s", "", PANEL_HEIGHT), in_front),
            (Chart("The door: requests", "s", "/s", PANEL_HEIGHT), door),
            (Chart("Memory of all processes", "s", "MiB", PANEL_HEIGHT), memory),
        ]
    )


def per_second(counted: Sequence[tuple[float, int]], over_s: float = RATE_S) -> list[tuple[float, float]]:
    """Return how fast something that is counted grows, at each moment over the time of over_s before it.

    `counted` are seconds and counts so far, the result seconds and rates; it begins with 0 at the first moment.
    """
    rates = [(counted[0][0], 0.0)]
    first = 0
    for at_s, count in counted[1:]:
        while at_s - counted[first][0] > over_s:
            first += 1
        begun_s, before = counted[first]
        rates.append((at_s, (count - before) / (at_s - begun_s) if at_s > begun_s else rates[-1][1]))
    return rates
