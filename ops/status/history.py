"""The last minutes of queues and KV pool as small bar charts, from samples.

Owns how samples become columns, and columns characters. Knows nothing about terminals.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.keys import STAGES
from pipeline.samples import Sample

BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Series:
    """One figure over time: a value for each column, None where there is no sample."""

    name: str
    values: tuple[float | None, ...]

    @property
    def peak(self) -> float:
        """The highest value."""
        return max((value for value in self.values if value is not None), default=0.0)

    def bars(self) -> str:
        """Return a character a column; the highest value fills one, zero is a line at the bottom, no sample a dot."""
        return "".join(_bar(value, self.peak) for value in self.values)


def of_one_pool(samples: Iterable[Sample], pool_id: str | None = None) -> list[Sample]:
    """Return the samples of one pool in the order of time; without its id, of the one that was sampled last.

    Several stacks may share a namespace, each with a pool of its own; figures of different pools make no curve.
    """
    ordered = sorted(samples, key=lambda sample: sample.at_us)
    if pool_id is None and ordered:
        pool_id = ordered[-1].pool_id
    return [sample for sample in ordered if sample.pool_id == pool_id]


def history(samples: Sequence[Sample], until_us: int, num_columns: int, column_s: float) -> list[Series]:
    """Return how many requests each stage had, waiting and in work, and how full the KV pool was.

    A column holds the highest value of its time; the last one ends at until_us. The samples are of one pool.
    """
    columns: list[list[Sample]] = [[] for _ in range(num_columns)]
    for sample in samples:
        back = int((until_us - sample.at_us) / (1e6 * column_s))
        if 0 <= back < num_columns:
            columns[num_columns - 1 - back].append(sample)
    found = [_series(stage, columns, lambda sample, stage=stage: _num_entries(sample, stage)) for stage in STAGES]
    return [*found, _series("KV bytes", columns, lambda sample: sample.kv_used_bytes)]


def _series(name: str, columns: Sequence[Sequence[Sample]], value: Callable[[Sample], float]) -> Series:
    return Series(name, tuple(max(map(value, column), default=None) for column in columns))


def _num_entries(sample: Sample, stage: str) -> int:
    return sample.num_waiting(stage) + sample.num_held(stage)


def _bar(value: float | None, peak: float) -> str:
    if value is None:
        return "·"
    if value <= 0 or peak <= 0:
        return BARS[1]
    return BARS[1 + round((len(BARS) - 2) * value / peak)]
