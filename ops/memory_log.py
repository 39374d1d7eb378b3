"""How full the KV pool was over time, as lines for people, from the samples of a run.

Owns the wording and the mean. Knows nothing about where samples come from (SampleLog.read).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

from ops.status.history import of_one_pool
from ops.status.page import size
from pipeline.samples import Sample

BAR_COLUMNS = 30


def memory_lines(samples: Iterable[Sample], every_s: float = 1.0, pool_id: str | None = None) -> Iterator[str]:
    """Yield what the pool held when that changed, at most a line every every_s seconds, and then a summary.

    A line says the most of its time; times count from the first sample. Only one pool counts: without an id, the one
    that was sampled last.
    """
    ordered = of_one_pool(samples, pool_id)
    if not ordered:
        yield "KV pool: no samples; the jobs process takes them"
        return
    peak_bytes = max(sample.kv_used_bytes for sample in ordered)
    for sample in _changes(_peaks(ordered, every_s)):
        bar = "#" * round(BAR_COLUMNS * sample.kv_used_bytes / peak_bytes) if peak_bytes else ""
        used = f"{size(sample.kv_used_bytes):>10}  {sample.num_blobs:>4} blobs  {bar}".rstrip()
        yield f"{_seconds(ordered[0], sample):>7.1f} s  {used}"
    yield memory_summary(ordered)


def memory_summary(samples: Sequence[Sample]) -> str:
    """Return the highest and the mean use; `samples` are in the order of time, and there is at least one."""
    highest = max(samples, key=lambda sample: sample.kv_used_bytes)
    share = 100 * highest.kv_used_bytes / highest.kv_quota_bytes
    return (
        f"KV pool: max {size(highest.kv_used_bytes)} ({share:.1f} % of {size(highest.kv_quota_bytes)}) "
        f"after {_seconds(samples[0], highest):.1f} s, mean {size(mean_bytes(samples))} "
        f"over {_seconds(samples[0], samples[-1]):.1f} s, {len(samples)} samples"
    )


def mean_bytes(samples: Sequence[Sample]) -> float:
    """Return the mean over time: each sample counts until the next one, since an idle stack is sampled less often."""
    total_us = samples[-1].at_us - samples[0].at_us
    if total_us == 0:
        return float(samples[-1].kv_used_bytes)
    return sum(one.kv_used_bytes * (after.at_us - one.at_us) for one, after in pairwise(samples)) / total_us


def _peaks(samples: Sequence[Sample], every_s: float) -> Iterator[Sample]:
    for _, some in groupby(samples, lambda sample: _seconds(samples[0], sample) // every_s):
        yield max(some, key=lambda sample: sample.kv_used_bytes)


def _changes(samples: Iterable[Sample]) -> Iterator[Sample]:
    before: tuple[int, int] | None = None
    for sample in samples:
        content = sample.kv_used_bytes, sample.num_blobs
        if content != before:
            yield sample
        before = content


def _seconds(start: Sample, sample: Sample) -> float:
    return (sample.at_us - start.at_us) / 1e6
