"""The back-pressure benchmark: every series is held against its bound, and a chart of several parts shows them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from ops.bench.back_pressure import step_ms
from ops.bench.bounds import Bounded, Flooded, Sample, bounds_of, per_second, picture, verdicts
from ops.bench.chart import Chart, Line, panels
from pipeline.messages import Stamp, Terminal, Usage
from pipeline.settings import Settings

MIB = 1024**2
SVG = "{http://www.w3.org/2000/svg}"


def sample(at_s: float, **changes: object) -> Sample:
    one = Sample(
        at_s=at_s,
        blobs_mib=10.0,
        credits_mib=60.0,
        num_credits=30,
        num_in_front=8,
        num_compressor=1,
        num_decode=29,
        num_accepted=round(2 * at_s),
        num_refused=round(30 * at_s),
        memory_mib={"decode": 100.0, "server": 10.0},
    )
    return replace(one, **changes)


@pytest.fixture
def settings() -> Settings:
    return Settings(kv_pool_bytes=64 * MIB, max_queue=8, max_num_seqs=16, max_decode_queue=64)


def judged(samples: Sequence[Sample], settings: Settings) -> dict[str, Bounded]:
    return {one.name: one for one in bounds_of(samples, settings)}


def test_what_stays_below_its_bounds_holds(settings: Settings) -> None:
    found = judged([sample(at_s) for at_s in range(40)], settings)
    assert [name for name, one in found.items() if not one.holds] == []
    assert (found["requests with credit"].most, found["requests with credit"].bound) == (30, 32)
    assert (found["credits"].bound, found["in front of prefill"].bound) == (64.0, 8)


@pytest.mark.parametrize(
    ("changes", "exceeded"),
    [
        ({"blobs_mib": 64.1}, "blobs"),
        ({"credits_mib": 65.0}, "credits"),
        ({"num_credits": 33}, "requests with credit"),
        ({"num_in_front": 9}, "in front of prefill"),
        ({"num_compressor": 33}, "in compressor's queue"),
        ({"num_decode": 33}, "in decode's queue"),
        ({"memory_mib": {"decode": 115.0, "server": 10.0}}, "decode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_moment_above_a_bound_is_seen(changes: dict[str, object], exceeded: str, settings: Settings) -> None:
    samples = [sample(at_s) for at_s in range(40)]
    samples[30] = sample(30, **changes)
    assert [name for name, one in judged(samples, settings).items() if not one.holds] == [exceeded]


def test_memory_may_grow_while_the_stack_fills_and_not_afterwards(settings: Settings) -> None:
    filling = [sample(at_s, memory_mib={"decode": 100.0 + 10 * min(at_s, 10)}) for at_s in range(40)]
    assert judged(filling, settings)["decode"].holds
    growing = [sample(at_s, memory_mib={"decode": 100.0 + 10 * at_s}) for at_s in range(40)]
    assert not judged(growing, settings)["decode"].holds


def test_verdicts_name_what_was_exceeded_and_a_door_that_was_never_busy(settings: Settings) -> None:
    samples = [sample(at_s, num_credits=33) for at_s in range(40)]
    usual, slowed = Flooded(samples, 20, 5, 80.0, 20), Flooded(samples, 20, 0, 320.0, 10)
    shown = verdicts(usual, slowed, bounds_of(samples, settings))
    [row] = [line for line in shown.splitlines() if "EXCEEDED" in line]
    assert row.split("|")[1].strip() == "requests with credit"
    assert "NEVER BUSY" in shown
    assert "80 ms, slowed 320 ms" in shown


def test_a_rate_is_that_of_the_last_seconds() -> None:
    counted = [(0.0, 0), (1.0, 10), (2.0, 20), (3.0, 20), (4.0, 20)]
    assert per_second(counted, over_s=2.0) == [(0.0, 0.0), (1.0, 10.0), (2.0, 10.0), (3.0, 5.0), (4.0, 0.0)]


def test_the_picture_has_all_series_and_the_bounds_that_are_set(settings: Settings) -> None:
    samples = [sample(at_s) for at_s in range(20)]
    root = ElementTree.fromstring(picture(samples, bounds_of(samples, settings)))
    labels = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
    for name in ("credits", "the pool 64", "in decode's queue", "the door's bound 8", "refused", "server 10"):
        assert name in labels
    assert sum("stroke-dasharray" in line.attrib for line in root.iter(f"{SVG}polyline")) == 3


def test_charts_lie_below_each_other_and_names_inside_them() -> None:
    lines = [Line(f"line {number}", [(0.0, 0.0), (1.0, 0.01 * number)]) for number in range(8)]
    lines.append(Line("top", [(0.0, 1.0), (1.0, 1.0)]))
    root = ElementTree.fromstring(panels([(Chart("a", "s", "x", 200), lines), (Chart("b", "s", "x", 300), lines)]))
    assert root.attrib["viewBox"].endswith(" 500")
    first, second = root.findall(f"{SVG}g")
    assert (first.attrib["transform"], second.attrib["transform"]) == ("translate(0 0)", "translate(0 200)")
    named = [text for text in first.iter(f"{SVG}text") if (text.text or "").startswith(("line", "top"))]
    heights = sorted(float(text.attrib["y"]) for text in named)
    assert heights[-1] < 200
    assert all(after - before >= 13.9 for before, after in pairwise(heights))


def test_a_bound_has_the_colour_of_what_it_bounds() -> None:
    flat = [(0.0, 1.0), (1.0, 1.0)]
    root = ElementTree.fromstring(
        Chart("a", "s", "x").svg([Line("one", flat), Line("bound", flat, is_bound=True), Line("two", flat)])
    )
    one, bound, two = (line.attrib["stroke"] for line in root.iter(f"{SVG}polyline"))
    assert one == bound != two


def test_a_step_is_the_time_of_decode_for_each_token_after_the_first() -> None:
    stamps = (Stamp(boundary="kv_loaded", at_us=1_000_000), Stamp(boundary="finished", at_us=4_000_000))
    terminal = Terminal(finish_reason="length", usage=Usage(prompt_tokens=9, completion_tokens=31), stamps=stamps)
    assert step_ms(terminal) == 100
