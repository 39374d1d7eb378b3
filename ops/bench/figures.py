"""From the samples of a pass to what is reported of it. Knows nothing about how samples come about."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from ops.bench.load import Pass, Sample
from ops.bench.stamps import HAND_OVER, PHASES, SLOT, share
from ops.measuring import markdown_table


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and a bad case, in milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """By the nearest rank."""
        ranked = sorted(values)
        return cls(*(ranked[max(math.ceil(part * len(ranked)), 1) - 1] for part in (0.50, 0.99)))

    def __str__(self) -> str:
        return f"{self.p50:.0f} / {self.p99:.0f}"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many drafted tokens came out, with outputs that are loops and without."""

    all: float | None
    without_loops: float | None
    num_loops: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """Of one pass."""
        straight = [sample for sample in samples if not sample.loops]
        return cls(_rate(samples), _rate(straight), len(samples) - len(straight))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one pass. Shares are means over requests of each one's own share."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    acceptance: Acceptance
    hand_over_ms: Spread
    hand_over_share: float
    slot_share: float
    mean_phases_ms: dict[str, float]

    @classmethod
    def of(cls, run: Pass) -> Self:
        """Sum a pass up."""
        samples = run.samples
        output_tokens = sum(sample.output_tokens for sample in samples)
        return cls(
            num_requests=len(samples),
            prompt_tokens=sum(sample.prompt_tokens for sample in samples),
            output_tokens=output_tokens,
            output_tokens_per_s=output_tokens / run.wall_s,
            ttft_ms=Spread.of(sample.ttft_ms for sample in samples),
            tpot_ms=Spread.of(sample.tpot_ms for sample in samples),
            acceptance=Acceptance.of(samples),
            hand_over_ms=Spread.of(_sum(sample, HAND_OVER) for sample in samples),
            hand_over_share=statistics.fmean(share(sample.phases_ms, HAND_OVER) for sample in samples),
            slot_share=statistics.fmean(share(sample.phases_ms, (SLOT,)) for sample in samples),
            mean_phases_ms={
                phase: statistics.fmean(_sum(sample, (phase,)) for sample in samples) for phase in PHASES.values()
            },
        )


def speed_table(passes: Sequence[tuple[str, Figures]]) -> str:
    """Return what a client sees, a row a pass."""
    header = (
        "stack",
        "output tok/s",
        "TTFT ms p50 / p99",
        "TPOT ms p50 / p99",
        "accepted drafts",
        "without loops",
        "loops",
    )
    rows = [
        (
            name,
            f"{figures.output_tokens_per_s:.1f}",
            str(figures.ttft_ms),
            str(figures.tpot_ms),
            percent(figures.acceptance.all),
            percent(figures.acceptance.without_loops),
            f"{figures.acceptance.num_loops} of {figures.num_requests}",
        )
        for name, figures in passes
    ]
    return markdown_table(header, rows)


def phase_table(passes: Sequence[tuple[str, Figures]]) -> str:
    """Return where the time of a request goes, a row a phase: milliseconds, mean over requests."""
    header = ("mean of a request, ms", *(name for name, _ in passes))
    rows = [(phase, *(f"{figures.mean_phases_ms[phase]:.1f}" for _, figures in passes)) for phase in PHASES.values()]
    rows.append(("hand-over, ms p50 / p99", *(_tenths(figures.hand_over_ms) for _, figures in passes)))
    rows.append(("hand-over, share", *(percent(figures.hand_over_share) for _, figures in passes)))
    rows.append(("decode slot, share", *(percent(figures.slot_share) for _, figures in passes)))
    return markdown_table(header, rows)


def percent(part: float | None) -> str:
    """Return a share as people read it."""
    return "-" if part is None else f"{100 * part:.1f} %"


def _tenths(spread: Spread) -> str:
    return f"{spread.p50:.1f} / {spread.p99:.1f}"


def _sum(sample: Sample, phases: Iterable[str]) -> float:
    return sum(sample.phases_ms.get(phase, 0.0) for phase in phases)


def _rate(samples: Sequence[Sample]) -> float | None:
    drafted = sum(sample.draft_tokens for sample in samples)
    return sum(sample.accepted_tokens for sample in samples) / drafted if drafted else None
