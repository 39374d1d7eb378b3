"""Draws a trace as an SVG picture: lanes by stage, a colour for each request, arrows, and the counters below.

Owns the drawing. Knows what a trace holds (file.py) and nothing else about Sluice.

    python -m ops.tracing.picture trace.json -o docs/trace.svg
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from ops.tracing.file import End, Slice, TraceFile, read_trace

WIDTH, LEFT, RIGHT, TOP = 1280, 150, 24, 84
LANE, QUEUE_LANE, GAP, CHART, CHART_GAP = 15, 6, 14, 36, 16
GOLDEN_DEGREES = 137.5  # neighbours differ most in hue
CHAR_WIDTH, MIN_WIDTH = 5.2, 0.7
STEPS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
NUM_TICKS = 12
COUNTER_COLOURS: Final = ("#7b8798", "#c4cad4")
STYLE: Final = """
text { font: 11px 'DejaVu Sans', system-ui, sans-serif; fill: #1f2733 }
.small { font-size: 9px; fill: #5c6675 }
.inside { font-size: 9px; fill: #fff }
.title { font-size: 17px; font-weight: bold }
.stage { font-weight: bold }
.grid { stroke: #e4e7ec }
.arrow { fill: none; stroke-width: 0.8; stroke-opacity: 0.6 }
"""


class Picture:
    """One drawing, from top to bottom; lanes get their places first, since arrows connect them."""

    def __init__(self, trace: TraceFile, title: str | None = None) -> None:
        """Plan a drawing of a trace."""
        self._trace = trace
        self._requests = list(dict.fromkeys(one.request_id for one in trace.slices))
        self._hues = {one: round(number * GOLDEN_DEGREES % 360) for number, one in enumerate(self._requests)}
        self._title = title or f"{len(self._requests)} requests"
        self._scale = (WIDTH - LEFT - RIGHT) / trace.end_us
        self._lanes: dict[tuple[int, int], tuple[float, float]] = {}
        """Top and height of each lane."""
        self._y = float(TOP)

    def svg(self) -> str:
        """Return the picture."""
        lanes = [line for pid, name in self._trace.processes for line in self._process(pid, name)]
        arrows = [self._arrow(*ends) for ends in self._trace.arrows]
        charts = [line for name, points in self._trace.counters.items() for line in self._chart(name, points)]
        height = round(self._y) + CHART_GAP
        size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
                f"<style>{STYLE}</style>",
                f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
                *self._heading(),
                *self._grid(self._y),
                *arrows,  # behind the slices, so that no words are struck through
                *lanes,
                *charts,
                "</svg>\n",
            ]
        )

    def _heading(self) -> Iterator[str]:
        args = {one.request_id: one.args for one in self._trace.slices}.values()
        figures = [f"{self._trace.end_us / 1e6:.1f} s"]
        tokens = [sum(int(arg.get(name, 0)) for arg in args) for name in ("prompt_tokens", "completion_tokens")]
        figures.append(f"{tokens[0]} prompt tokens, {tokens[1]} output tokens")
        for name, label in (("ttft_ms", "time to first token"), ("tpot_ms", "time per output token")):
            if values := [float(arg[name]) for arg in args if name in arg]:
                figures.append(f"{label} {statistics.median(values):.0f} ms (median)")
        yield _text(LEFT, 26, self._title, "title")
        yield _text(LEFT, 44, " · ".join(figures))
        yield _text(LEFT, 60, "a colour is a request: pale while it waits, full while a stage works on it", "small")

    def _grid(self, bottom: float) -> Iterator[str]:
        step_us = 1e6 * next((s for s in STEPS_S if s * NUM_TICKS >= self._trace.end_us / 1e6), STEPS_S[-1])
        for number in range(int(self._trace.end_us / step_us) + 1):
            x = self._x(number * step_us)
            yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom:.0f}"/>'
            yield _text(x, TOP - 10, f"{number * step_us / 1e6:g} s", "small", "middle")

    def _process(self, pid: int, name: str) -> Iterator[str]:
        """The lanes of one process, with everything in them."""
        slices = [one for one in self._trace.slices if one.pid == pid]
        if not slices:
            return
        waiting = all(one.name.startswith("queue") for one in slices)
        height = QUEUE_LANE if waiting else LANE
        for tid in sorted({one.tid for one in slices}):
            self._lanes[pid, tid] = self._y, height
            if self._trace.lanes[pid, tid] == "writing blobs 1":
                yield _text(LEFT - 10, self._y + 11, "writing blobs", "small", "end")
            self._y += height
        top = self._lanes[pid, slices[0].tid][0]
        yield _text(LEFT - 10, top + 10, name.partition(" (")[0], "small" if waiting else "stage", "end")
        for one in slices:
            yield from self._slice(one, waiting=waiting)
        self._y += GAP / 2 if waiting else GAP

    def _slice(self, one: Slice, *, waiting: bool) -> Iterator[str]:
        top, height = self._lanes[one.pid, one.tid]
        within = 3 if one.name.startswith("chunk") else 1
        light = 84 if waiting else 36 if within == 3 or one.name.startswith("load") else 50
        width = max(one.dur * self._scale, MIN_WIDTH)
        colour = f"hsl({self._hues[one.request_id]},{60 if waiting else 52}%,{light}%)"
        box = f'x="{self._x(one.ts):.2f}" y="{top + within / 2:.1f}" width="{width:.2f}" height="{height - within:.1f}"'
        yield f'<rect {box} rx="1" fill="{colour}"><title>{_hint(one)}</title></rect>'
        words = _words(one)
        if not waiting and words and width > CHAR_WIDTH * len(words) + 6:
            yield _text(self._x(one.ts) + 4, top + height - 4.5, words, "inside")

    def _arrow(self, source: End, target: End) -> str:
        (x1, y1), (x2, y2) = self._point(source), self._point(target)
        bend = min(30.0, abs(y2 - y1) / 2) * (1 if y2 > y1 else -1)
        hue = next(self._hues[one.request_id] for one in self._trace.slices if _is_at(one, source))
        curve = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"
        return f'<path class="arrow" stroke="hsl({hue},55%,45%)" d="{curve}"/>'

    def _chart(self, name: str, points: Sequence[tuple[float, dict[str, float]]]) -> Iterator[str]:
        """An area for each series of a counter, one upon the other; one that was always zero is left out."""
        points = [(ts, values) for ts, values in points if ts <= self._trace.end_us]
        peak = max((sum(values.values()) for _, values in points), default=0)
        if not peak:
            return
        self._y += CHART_GAP
        base = self._y + CHART
        series = list(dict.fromkeys(key for _, values in points for key in values))
        for number in reversed(range(len(series))):
            path = [f"M{self._x(points[0][0]):.1f} {base:.1f}"]
            for ts, values in points:
                level = sum(values.get(key, 0) for key in series[: number + 1]) / peak
                path.append(f"H{self._x(ts):.1f}V{base - CHART * level:.1f}")
            path.append(f"H{WIDTH - RIGHT}V{base:.1f}Z")
            yield f'<path fill="{COUNTER_COLOURS[number % 2]}" d="{"".join(path)}"/>'
        yield f'<line stroke="#aab2bf" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base:.1f}" y2="{base:.1f}"/>'
        yield _text(LEFT - 10, base - CHART + 14, name, "stage", "end")
        yield _text(LEFT - 10, base - CHART + 27, f"{' + '.join(series)}, peak {_amount(peak)}", "small", "end")
        self._y = base

    def _x(self, ts: float) -> float:
        return LEFT + ts * self._scale

    def _point(self, end: End) -> tuple[float, float]:
        top, height = self._lanes[end.pid, end.tid]
        return self._x(end.ts), top + height / 2


def _is_at(one: Slice, end: End) -> bool:
    return (one.pid, one.tid) == (end.pid, end.tid) and one.ts <= end.ts < one.ts + one.dur


def _words(one: Slice) -> str:
    if one.name == "decode":
        return f"decode {one.args.get('completion_tokens', '')} tokens"
    return "" if one.name == "prefill" else one.name


def _hint(one: Slice) -> str:
    return escape(f"{one.stage} {one.name}, {one.dur / 1000:.1f} ms, {one.request_id}")


def _amount(value: float) -> str:
    return f"{value:g}" if value < 10_000 else f"{value / 2**20:.1f} MiB"


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def main(arguments: Sequence[str] | None = None) -> None:
    """Read a trace, write a picture."""
    parser = argparse.ArgumentParser(prog="python -m ops.tracing.picture", description=__doc__)
    parser.add_argument("trace", type=Path, help="what `sluice trace` wrote")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the SVG file")
    parser.add_argument("--title", help="above the picture")
    options = parser.parse_args(arguments)
    document: dict[str, Any] = json.loads(options.trace.read_text())
    trace = read_trace(document)
    if not trace.slices:
        sys.exit(f"{options.trace} holds no request")
    options.output.write_text(Picture(trace, options.title).svg())


if __name__ == "__main__":
    main()
