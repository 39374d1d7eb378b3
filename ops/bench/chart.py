"""Lines over time as a picture: plain SVG, for figures that people would rather look at than read.

Owns the drawing. Knows nothing about what is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 48, 40
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
MAX_POINTS = 600  # of one line: more than the picture has columns for
LABEL_HEIGHT = 14
FONT = "font-family='DejaVu Sans, system-ui, sans-serif'"


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its name, and (x, y) in order of x; a bound is drawn dashed, in the colour of the line before it."""

    name: str
    points: Sequence[tuple[float, float]]
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with one pair of axes that begin at zero."""

    title: str
    x_unit: str
    y_unit: str
    height: int = HEIGHT

    def svg(self, lines: Sequence[Line]) -> str:
        """Return the picture."""
        return panels([(self, lines)])

    def parts(self, lines: Sequence[Line]) -> list[str]:
        """Return what the picture consists of; there is at least one point."""
        x_max = max((x for line in lines for x, _ in line.points), default=1.0) or 1.0
        y_max = max((y for line in lines for _, y in line.points), default=1.0) or 1.0
        x_step, y_step = _step(x_max), _step(y_max)
        y_max = y_step * math.ceil(y_max / y_step)

        def place(x: float, y: float) -> tuple[float, float]:
            across = LEFT + x / x_max * (WIDTH - LEFT - RIGHT)
            return round(across, 1), round(self.height - BOTTOM - y / y_max * (self.height - TOP - BOTTOM), 1)

        parts = [f"<text x='{LEFT}' y='26' font-size='15' font-weight='bold'>{escape(self.title)}</text>"]
        for number in range(round(y_max / y_step) + 1):
            x, y = place(0, number * y_step)
            parts.append(f"<path d='M{x} {y}H{WIDTH - RIGHT}' stroke='#e5e7eb'/>")
            label = f"{number * y_step:g} {self.y_unit if number * y_step == y_max else ''}"
            parts.append(f"<text x='{x - 8}' y='{y + 4}' text-anchor='end' fill='#4b5563'>{label}</text>")
        for number in range(int(x_max / x_step) + 1):
            x, y = place(number * x_step, 0)
            label = f"{number * x_step:g} {self.x_unit if number == 0 else ''}"
            parts.append(f"<text x='{x}' y='{y + 18}' text-anchor='middle' fill='#4b5563'>{label}</text>")
        for line, colour in zip(lines, _colours(lines), strict=True):
            stride = max(len(line.points) // MAX_POINTS, 1)
            points = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line.points[::stride]))
            dashes = " stroke-dasharray='6 4'" if line.is_bound else ""
            parts.append(f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='1.6'{dashes}/>")
        return parts + _legend(lines, [place(*line.points[-1])[1] for line in lines], self.height - BOTTOM)


def panels(charts: Sequence[tuple[Chart, Sequence[Line]]]) -> str:
    """Return one picture of several charts, one below the other."""
    height = sum(chart.height for chart, _ in charts)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' {FONT} font-size='11'>",
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
    ]
    top = 0
    for chart, lines in charts:
        parts += [f"<g transform='translate(0 {top})'>", *chart.parts(lines), "</g>"]
        top += chart.height
    return "\n".join([*parts, "</svg>", ""])


def _colours(lines: Sequence[Line]) -> list[str]:
    """One colour after the other, but for bounds, which have that of what they bound."""
    colours: list[str] = []
    number = -1
    for line in lines:
        number += number < 0 or not line.is_bound
        colours.append(COLOURS[number % len(COLOURS)])
    return colours


def _legend(lines: Sequence[Line], ends: Sequence[float], bottom: float) -> list[str]:
    """Return the names beside the ends of their lines, moved apart where they would overlap, and not below the axis."""
    ranked = sorted(range(len(lines)), key=lambda number: ends[number])
    heights: list[float] = []
    for number in ranked:
        heights.append(max(ends[number] + 4, heights[-1] + LABEL_HEIGHT if heights else 0))
    limit = bottom + 4
    for place in reversed(range(len(heights))):
        heights[place] = min(heights[place], limit)
        limit = heights[place] - LABEL_HEIGHT
    colours = _colours(lines)
    labels: list[str] = []
    for number, height in zip(ranked, heights, strict=True):
        text = f"{lines[number].name} {lines[number].points[-1][1]:.4g}"
        labels.append(f"<text x='{WIDTH - RIGHT + 8}' y='{height:.1f}' fill='{colours[number]}'>{escape(text)}</text>")
    return labels


def _step(maximum: float) -> float:
    """Return a round distance that divides the axis into four to ten parts."""
    magnitude = 10 ** math.floor(math.log10(maximum))
    for factor in (0.1, 0.2, 0.25, 0.5, 1, 2):
        if maximum / (factor * magnitude) <= 10:
            return factor * magnitude
    return 2 * magnitude
