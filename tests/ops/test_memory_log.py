"""KV use over time in words: what is said of made-up samples."""

import pytest

from ops.memory_log import mean_bytes, memory_lines, memory_summary
from pipeline.samples import Sample

MIB = 1 << 20


def sample(at_s: float, used_bytes: int, num_blobs: int, pool_id: str = "pool") -> Sample:
    return Sample(round(1e6 * (1_000 + at_s)), pool_id, used_bytes, 100 * MIB, num_blobs)


SAMPLES = [
    sample(0, 0, 0),
    sample(1, 0, 0),
    sample(1.25, 30 * MIB, 3),
    sample(1.5, 30 * MIB, 3),
    sample(2, 15 * MIB, 2),
    sample(3, 0, 0),
]


def test_a_line_for_each_change_and_a_summary() -> None:
    assert list(memory_lines(reversed(SAMPLES))) == [
        "    0.0 s         0 B     0 blobs",
        "    1.2 s    30.0 MiB     3 blobs  " + 30 * "#",
        "    2.0 s    15.0 MiB     2 blobs  " + 15 * "#",
        "    3.0 s         0 B     0 blobs",
        "KV pool: max 30.0 MiB (30.0 % of 100.0 MiB) after 1.2 s, mean 12.5 MiB over 3.0 s, 6 samples",
    ]


def test_a_line_says_the_most_of_its_time() -> None:
    quick = [sample(0.25 * number, number * MIB, 1) for number in range(9)]
    *lines, _ = memory_lines(quick)
    assert [line.split()[2] for line in lines] == ["3.0", "7.0", "8.0"]
    assert len(list(memory_lines(quick, every_s=0.25))) == 10


def test_the_mean_is_over_time_and_not_over_samples() -> None:
    assert mean_bytes([sample(0, 10, 1), sample(9, 20, 1), sample(10, 99, 1)]) == pytest.approx(11)
    assert mean_bytes([sample(0, 7, 1)]) == 7


def test_an_empty_pool_is_no_division_by_zero() -> None:
    lines = list(memory_lines([sample(0, 0, 0), sample(1, 0, 0)]))
    assert lines[0].endswith("0 blobs")
    assert lines[1] == memory_summary([sample(0, 0, 0), sample(1, 0, 0)])


def test_without_samples_it_says_why() -> None:
    assert list(memory_lines([])) == ["KV pool: no samples; the jobs process takes them"]


def test_other_pools_of_the_namespace_do_not_count() -> None:
    others = [sample(0.1 + 0.2 * number, 90 * MIB, 9, "other") for number in range(10)]
    assert list(memory_lines([*others, *SAMPLES])) == list(memory_lines(SAMPLES))  # sampled last
    assert list(memory_lines([*others, *SAMPLES], pool_id="other")) == list(memory_lines(others))
    assert list(memory_lines(others, pool_id="pool")) == list(memory_lines([]))
