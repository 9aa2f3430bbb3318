"""Lines for the report's charts: coordinates for SVG, computed here so that the page needs no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

WIDTH: Final = 760
HEIGHT: Final = 210
LEFT: Final = 62  # room for the numbers on the left, and for labels on the right
RIGHT: Final = 150
TOP: Final = 12
BOTTOM: Final = 34
MOST_POINTS: Final = 600


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """One series. `points` and `area` are SVG coordinates; the label stands at (WIDTH - RIGHT, `label_y`)."""

    name: str
    points: str
    area: str
    label: str
    label_y: float


@dataclass(frozen=True)
class Chart:
    """`xticks`, `yticks` in SVG units; `summary` is for those who do not see the chart."""

    lines: list[Line]
    xticks: list[Tick]
    yticks: list[Tick]
    xname: str
    summary: str


def chart(
    xs: Sequence[float], series: dict[str, Sequence[float]], xname: str, xlabels: Sequence[str] | None = None
) -> Chart:
    """Series of tokens over `xs`, ascending, from 0 up. The end of each series is labelled with its last value.

    With `xlabels`, one for each of `xs`, values are joined by lines; without, x is a quantity, and a value holds until
    the next.
    """
    keep = _thinned(len(xs))
    xs = [xs[index] for index in keep]
    shown = {name: [values[index] for index in keep] for name, values in series.items()}
    top = _round_up(max((max(values) for values in shown.values()), default=1.0))
    low, high = xs[0], xs[-1]

    def px(x: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * ((x - low) / (high - low) if high > low else 0.5), 1)

    def py(y: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / top, 1)

    lines = []
    labels = _apart([py(values[-1]) for values in shown.values()])
    for (name, values), label_y in zip(shown.items(), labels, strict=True):
        pairs = list(zip(xs, values, strict=True))
        if xlabels is None:
            pairs = [pair for (x, y), (later, _) in pairwise(pairs) for pair in ((x, y), (later, y))] + pairs[-1:]
        points = [f"{px(x)},{py(y)}" for x, y in pairs]
        area = " ".join([f"{px(low)},{py(0)}", *points, f"{px(high)},{py(0)}"])
        lines.append(Line(name, " ".join(points), area, f"{name} {values[-1]:,.0f}", label_y))
    ends = [f"{name} {values[0]:,.0f} at first, {values[-1]:,.0f} at the end, {max(values):,.0f} at most"
            for name, values in shown.items()]  # fmt: skip
    if xlabels is None:
        parts = [low + (high - low) * part / 5 for part in range(6 if high > low else 1)]
        xticks = [Tick(px(x), f"{x - low:,.0f}" if high - low >= 5 else f"{x - low:.1f}") for x in parts]
    else:
        step = math.ceil(len(xs) / 12)
        xticks = [Tick(px(xs[index]), xlabels[keep[index]]) for index in range(0, len(xs), step)]
    yticks = [Tick(py(top * part / 4), f"{top * part / 4:,.0f}") for part in range(5)]
    return Chart(lines, xticks, yticks, xname, "Tokens: " + "; ".join(ends) + ".")


def _thinned(count: int) -> list[int]:
    """At most MOST_POINTS indices, the first and the last among them."""
    if count <= MOST_POINTS:
        return list(range(count))
    return sorted({round(index * (count - 1) / (MOST_POINTS - 1)) for index in range(MOST_POINTS)})


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 8, 10 times a power of ten, so that quarters are round."""
    if value <= 4:
        return 4.0
    power = float(10 ** math.floor(math.log10(value)))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)


def _apart(heights: list[float]) -> list[float]:
    """Label heights at least 15 units from each other, moved as little as need be."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for before, after in pairwise(order):
        placed[after] = max(placed[after], placed[before] + 15)
    over = max([0.0, *(height - (HEIGHT - BOTTOM) for height in placed)])
    return [round(height - over + 4, 1) for height in placed]
