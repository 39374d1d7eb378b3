"""The take-over benchmark: which moments of a log count, and medians whose parts belong together."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ops.bench import __main__ as command
from ops.bench.resume import FreshPrefill, TakeOver, first_events, medians, table

LOG = """\
{"event": "stage_ready", "timestamp": "2026-01-01T00:00:00.000000Z"}
{"event": "fault_injected", "point": "decode.claimed", "timestamp": "2026-01-01T00:00:01.000000Z"}
WARNING a library says something
{"event": "stage_ready", "timestamp": "2026-01-01T00:00:07.500000Z"}
[1, 2]
{"event": "fault_injected", "point": "decode.claimed", "timestamp": "2026-01-01T00:00:08.000250Z"}
{"event": "fault_injected", "point": "decode.claimed", "timestamp": "2026-01-01T00:00:09.000000Z"}
{"event": "cut of
"""
MIDNIGHT_US = 1_767_225_600_000_000


def test_what_the_new_process_said_first_counts() -> None:
    assert first_events(LOG, MIDNIGHT_US + 3_000_000) == {
        "stage_ready": MIDNIGHT_US + 7_500_000,
        "fault_injected": MIDNIGHT_US + 8_000_250,
    }
    assert first_events(LOG, MIDNIGHT_US + 10_000_000) == {}


def take_over(take_over_s: float, **changes: object) -> TakeOver:
    one = TakeOver(
        size=256,
        keep_kv=True,
        prompt_tokens=256,
        emitted_tokens=300,
        recomputed_tokens=round(100 * take_over_s),
        went_back=False,
        start_s=4.0,
        lease_s=0.5,
        load_s=take_over_s / 2,
        take_over_s=take_over_s,
    )
    return replace(one, **changes)


def test_a_median_is_one_of_the_measurements() -> None:
    taken = [take_over(seconds) for seconds in (0.9, 0.2, 0.4)]
    taken += [take_over(seconds, keep_kv=False, went_back=True) for seconds in (3.0, 2.0, 2.5)]
    fresh = [FreshPrefill(256, 556, seconds - 0.1, seconds) for seconds in (1.0, 2.0, 9.0)]
    [row] = medians(taken, fresh)
    assert (row.with_checkpoints.take_over_s, row.with_checkpoints.recomputed_tokens) == (0.4, 40)
    assert row.without.take_over_s == 2.5
    assert row.fresh.compute_s == pytest.approx(1.9)
    cells = [cell.strip() for cell in table([row]).splitlines()[2].split("|")[1:-1]]
    assert cells == [
        "256 + 300",
        "40",
        "0.400",
        "0.200",
        "2.500",
        "yes",
        "1.900",
        "2.000",
        "0.20",
        "0.16",
        "4.0",
        "0.5",
    ]


def test_each_size_has_its_row() -> None:
    taken = [take_over(1.0, size=size, keep_kv=keep_kv) for size in (1024, 256) for keep_kv in (True, False)]
    fresh = [FreshPrefill(size, size + 300, 1.0, 1.1) for size in (1024, 256)]
    assert [row.fresh.prompt_tokens for row in medians(taken, fresh)] == [556, 1324]


def test_a_wrong_length_of_prompts_is_refused() -> None:
    result = CliRunner().invoke(command.app, ["resume", "--prompts", "256,none"])
    assert result.exit_code == 2
    assert "no number of tokens" in result.output
