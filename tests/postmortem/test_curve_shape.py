"""Curves as drawings and as letters: all within the box, gaps are gaps, and what was not finite is marked."""

from __future__ import annotations

import math
import re

import pytest

from sentinel.postmortem.curve_shape import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LETTERS,
    RIGHT,
    SPARK_COLUMNS,
    TOP,
    WIDTH,
    shape_of,
    sparkline,
)
from sentinel.postmortem.report_document import Curve


def a_curve(values: list[float | None], **fields: object) -> Curve:
    steps = tuple(range(10, 10 + len(values)))
    usual = {
        "title": "t",
        "caption": "c",
        "steps": steps,
        "least": tuple(values),
        "greatest": tuple(values),
        "marked": (-1, -1),
    }
    return Curve(**(usual | fields))


def points_of(line: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+) ([\d.]+)", line)]


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0, 3.0],
        [5.0] * 4,
        [0.0, 0.0],
        [1e300, -1e300, 0.0],
        [1e-300, 1e300],
        [1.0, 1e6, 1.0, 1.0],
        [-3.0, 7.0],
        [2.0],
    ],
)
def test_every_point_lies_within_the_box(values: list[float]) -> None:
    shape = shape_of(a_curve(values, marked=(10, 11)))

    points = [*points_of(shape.line), *shape.dots]
    assert len(points) == len(values)
    for x, y in points:
        assert LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM and math.isfinite(x + y)
    assert all(math.isfinite(one.at) for one in (*shape.up, *shape.across))
    assert shape.marked[0] + shape.marked[1] <= WIDTH


def test_no_line_is_drawn_over_a_gap_and_a_point_alone_is_a_dot() -> None:
    shape = shape_of(a_curve([1.0, 2.0, None, 3.0, None, 4.0, 5.0]))

    assert shape.line.count("M") == 2 and len(points_of(shape.line)) == 4 and len(shape.dots) == 1


def test_larger_values_lie_higher_and_later_steps_further_right() -> None:
    (first, second, third) = points_of(shape_of(a_curve([1.0, 3.0, 2.0])).line)

    assert first[0] < second[0] < third[0] and second[1] < third[1] < first[1]


def test_a_spike_of_a_thousand_leaves_what_was_normal_to_be_seen() -> None:
    values = [1.0, 2.0] * 20 + [2000.0]
    low, high = (y for _, y in points_of(shape_of(a_curve(values)).line)[:2])

    assert low - high > 5, "on a linear axis it would be a fifteenth of a pixel"


def test_a_band_goes_there_and_back_and_a_curve_does_not() -> None:
    band = shape_of(a_curve([1.0, 2.0], greatest=(1.5, 2.5)))

    assert band.is_band and band.line.endswith("Z") and len(points_of(band.line)) == 4
    assert not shape_of(a_curve([1.0, 2.0])).is_band


def test_letters_rise_with_values_and_mark_what_was_not_finite() -> None:
    line = sparkline(a_curve([1.0, 2.0, None, 3.0], bad_steps=(12,)))

    assert line == f"{LETTERS[0]}{LETTERS[4]}x{LETTERS[-1]}"
    assert sparkline(a_curve([1.0, None])) == f"{LETTERS[0]} "
    many = sparkline(a_curve([1.0] * 1000, bad_steps=(500,)))
    assert len(many) <= SPARK_COLUMNS and many.count("x") == 1
