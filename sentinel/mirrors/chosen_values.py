"""ChosenValues: the values of a judged step that a mirror is given, at most so many series of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sentinel.aggregate import matches
from sentinel.exports.series import MergedStep, Picked
from sentinel.mirrors.mirror import MirroredStep
from sentinel.mirrors.mirror_select import MirrorSelect
from sentinel.printable import printable

if TYPE_CHECKING:
    from sentinel.step_view import Layout

STEP_TIME = "step_time_s"
FIRST = ("loss", "grad_norm", "lr", STEP_TIME)
"""Logged values that come before all others where there is not room for all."""
SCALAR_ROOM = 50
"""Series that tensors leave to logged values, which may be logged for the first time late in a run (chosen; half of
`max_series` where that is less)."""


class ChosenValues:
    """Applies `select` to one step after the other. A series that was met keeps its room."""

    def __init__(self, select: MirrorSelect) -> None:
        self._select = select
        self._met: set[str] = set()
        """Logged values that have room."""
        self._layout: Layout | None = None
        self._picked: list[Picked] = []
        self._num_tensor_series = self._num_cut = 0
        self.num_left_out = 0
        """Most series of a step for which there was no room."""

    def of(self, step: MergedStep, step_time_s: float) -> MirroredStep:
        """Return the chosen values of a step. step_time_s: its duration; 0: not known."""
        values: dict[str, float] = {}
        num_left_out = 0
        for name, value in self._scalars(step, step_time_s):
            if name in self._met or len(self._met) + self._num_tensor_series < self._select.max_series:
                self._met.add(name)
                values[name] = value
            else:
                num_left_out += 1
        if self._select.tensors:
            if step.layout is not self._layout:
                self._fit(step.layout)
            for name, value in self._tensors(step):
                values.setdefault(name, value)
        self.num_left_out = max(self.num_left_out, num_left_out + self._num_cut)
        return MirroredStep(
            attempt=step.attempt,
            step=step.step,
            time=step.time,
            values=tuple((printable(name), one) for name, one in values.items()),
        )

    def _scalars(self, step: MergedStep, step_time_s: float) -> Iterator[tuple[str, float]]:
        logged = dict(step.scalars)
        if step_time_s > 0:
            logged.setdefault(STEP_TIME, step_time_s)
        for name in [*(one for one in FIRST if one in logged), *(one for one in logged if one not in FIRST)]:
            if any(matches(glob, name) for glob in self._select.scalars):
                yield name, logged[name]

    def _fit(self, layout: Layout) -> None:
        """Choose the tensors of a layout for which there is room beside the logged values."""
        self._layout, self._picked, self._num_cut, self._num_tensor_series = layout, [], 0, 0
        most = self._select.max_series
        room = most - max(len(self._met), min(SCALAR_ROOM, most // 2))
        for one in self._select.tensors:
            picked, each = Picked(one.query, layout), len(one.statistics)
            self._num_cut += picked.keep(max(room, 0) // each) * each
            self._num_tensor_series += len(picked.series) * each
            room -= len(picked.series) * each
            self._picked.append(picked)

    def _tensors(self, step: MergedStep) -> Iterator[tuple[str, float]]:
        for picked in self._picked:
            points = picked.points(step)
            for statistic, column in points.values.items():
                for one, value in zip(points.series, column.tolist(), strict=True):
                    if not math.isnan(value):  # undefined: no element of it is finite
                        where = f"{one.name}@{one.place}" if one.place else one.name
                        yield f"{one.kind}/{where}/{statistic}", value
