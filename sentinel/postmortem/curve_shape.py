"""CurveShape: a curve as the numbers of an SVG drawing, in a box of WIDTH x HEIGHT; and as a line of letters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from sentinel.anomaly_words import short_number
from sentinel.postmortem.report_document import Curve

WIDTH, HEIGHT = 640, 170
LEFT, RIGHT, TOP, BOTTOM = 66, 8, 8, 24
"""Margins for numbers."""
MANY_TIMES = 50.0
"""Greatest over middle value past which the axis is logarithmic. Smaller: small spikes look flat; larger: what was normal
is a line on the axis (chosen)."""
LETTERS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
NOT_FINITE = "x"
SPARK_COLUMNS = 60


class CurveMark(msgspec.Struct, frozen=True):
    """A number at an axis."""

    at: float
    text: str


class CurveShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the drawing of a curve is made of; all coordinates in its box."""

    line: str
    """Of a path: the greatest values from left to right and, where they differ, the least ones back."""
    is_band: bool
    dots: tuple[tuple[float, float], ...]
    """Points that have no neighbour to draw a line to."""
    bad: tuple[float, ...]
    """Where something was not finite, from the left."""
    marked: tuple[float, float]
    """Left side and width of what the curve is about; a width of 0: of nothing."""
    across: tuple[CurveMark, ...]
    up: tuple[CurveMark, ...]


def shape_of(curve: Curve) -> CurveShape:
    """Return the drawing of a curve that has steps."""
    first, last = curve.steps[0], max(curve.steps[-1], curve.steps[0] + 1)
    finite = sorted(one for side in (curve.least, curve.greatest) for one in side if one is not None)
    low, high = (finite[0], finite[-1]) if finite else (0.0, 1.0)
    is_log = low > 0 and high > MANY_TIMES * finite[len(finite) // 2]
    if is_log:
        low, high = math.log10(low), math.log10(high)
    if not high > low:
        pad = abs(low) * 0.05 or 1.0
        low, high = low - pad, high + pad

    def x(step: float) -> float:
        part = (min(max(step, first), last) - first) / (last - first)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * part, 1)

    def y(value: float) -> float:
        share = ((math.log10(value) if is_log else value) / 2 - low / 2) / (high / 2 - low / 2)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(max(share, 0.0), 1.0), 1)

    stretches = _stretches(curve)
    is_band = any(curve.least[at] != curve.greatest[at] for stretch in stretches for at in stretch)
    parts, dots = [], []
    for stretch in stretches:
        upper = [(x(curve.steps[at]), y(curve.greatest[at] or 0.0)) for at in stretch]
        if len(stretch) == 1:
            dots.append(upper[0])
            continue
        lower = [(x(curve.steps[at]), y(curve.least[at] or 0.0)) for at in reversed(stretch)] if is_band else []
        parts.append("M" + "L".join(f"{one} {other}" for one, other in (*upper, *lower)) + ("Z" if is_band else ""))
    begin, end = curve.marked
    span = (x(begin), max(x(end + 1) - x(begin), 2.0)) if begin >= 0 else (0.0, 0.0)
    ticks = sorted({round(first + (last - first) * at / 4) for at in range(5)})
    values = [low, low / 2 + high / 2, high]
    return CurveShape(
        line="".join(parts), is_band=is_band, dots=tuple(dots), bad=tuple(x(one) for one in curve.bad_steps), marked=span,
        across=tuple(CurveMark(x(one), f"{one:,}") for one in ticks),
        up=tuple(CurveMark(y(10**one if is_log else one), short_number(10**one if is_log else one)) for one in values),
    )  # fmt: skip


def sparkline(curve: Curve) -> str:
    """Return a curve as one line of letters, `x` where something was not finite."""
    finite = sorted(one for one in curve.greatest if one is not None)
    low, high = (finite[0], finite[-1]) if finite else (0.0, 0.0)
    width = -(-len(curve.steps) // SPARK_COLUMNS)
    bad = set(curve.bad_steps)
    letters = []
    for at in range(0, len(curve.steps), width):
        values = [one for one in curve.greatest[at : at + width] if one is not None]
        if any(step in bad for step in curve.steps[at : at + width]):
            letters.append(NOT_FINITE)
        elif values:
            share = (max(values) / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.0
            letters.append(LETTERS[min(int(share * len(LETTERS)), len(LETTERS) - 1)])
        else:
            letters.append(" ")
    return "".join(letters)


def _stretches(curve: Curve) -> Sequence[list[int]]:
    """Return the indices of points side by side that have a value."""
    found: list[list[int]] = []
    is_open = False
    for at, value in enumerate(curve.greatest):
        if value is None or curve.least[at] is None:
            is_open = False
        elif is_open:
            found[-1].append(at)
        else:
            found.append([at])
            is_open = True
    return found
