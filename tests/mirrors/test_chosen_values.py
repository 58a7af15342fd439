"""Which values of a step a mirror is given, and how many series of a run at most."""

from __future__ import annotations

import math

import pytest

from sentinel.errors import ConfigError
from sentinel.mirrors.chosen_values import ChosenValues
from sentinel.mirrors.mirror_select import MirrorSelect, TensorSeries

from ..support.merged_steps import FlatLayout, merged_step

NORMS = TensorSeries(kinds=("wgrad",), statistics=("norm", "mean"), names=("layers.*",))


def names(select: MirrorSelect, num_tensors: int = 4, step_time_s: float = 0.5, **scalars: float) -> list[str]:
    found = ChosenValues(select).of(merged_step(FlatLayout(num_tensors), 1, **scalars), step_time_s)
    return [name for name, _ in found.values]


def test_logged_values_come_first_and_tensors_only_where_they_are_asked_for() -> None:
    logged = ["loss", "lr", "step_time_s", "tokens"]

    assert names(MirrorSelect(), tokens=5.0, lr=0.1) == logged
    assert names(MirrorSelect(), step_time_s=0.0, tokens=5.0, lr=0.1) == ["loss", "lr", "tokens"]
    assert names(MirrorSelect(scalars=("l*",)), tokens=5.0, lr=0.1) == ["loss", "lr"]
    tensors = [f"wgrad/layers.{at}.weight/{statistic}" for statistic in ("norm", "mean") for at in range(4)]
    assert names(MirrorSelect(tensors=(NORMS, NORMS)), tokens=5.0, lr=0.1) == [*logged, *tensors], "each series once"


def test_values_are_those_of_the_step() -> None:
    step = merged_step(FlatLayout(2), 3, grad_norm=math.nan, lr=math.inf)
    step.stats["count"][1], step.stats["m2"][1], step.stats["mean"][1] = 4, 0.0, 2.0

    found = ChosenValues(MirrorSelect(tensors=(NORMS,))).of(step, 0.25)

    values = dict(found.values)
    assert (found.step, found.attempt, found.time) == (2, 0, step.time)
    assert math.isnan(values["grad_norm"]) and values["lr"] == math.inf, "what was logged is mirrored as it was"
    assert (values["loss"], values["step_time_s"]) == (2.0, 0.25)
    assert values["wgrad/layers.1.weight/norm"] == pytest.approx(4.0) and values["wgrad/layers.1.weight/mean"] == 2.0


def test_a_statistic_that_is_undefined_is_no_point() -> None:
    chosen = ChosenValues(MirrorSelect(tensors=(NORMS,)))

    found = dict(chosen.of(merged_step(FlatLayout(2), 1, num_nan=1000), 0.0).values)

    assert "wgrad/layers.0.weight/norm" not in found and "wgrad/layers.1.weight/norm" in found
    assert chosen.num_left_out == 0


def test_no_more_series_than_asked_for_and_what_is_left_out_is_counted() -> None:
    chosen = ChosenValues(MirrorSelect(tensors=(NORMS,), max_series=20))
    layout = FlatLayout(30)

    for seq in range(1, 4):
        found = chosen.of(merged_step(layout, seq, lr=0.1), 0.5)
        assert len(found.values) == 3 + 10, "half of the room is kept for values that may be logged later"
        assert chosen.num_left_out == 2 * 30 - 10
    late = chosen.of(merged_step(layout, 4, **{f"late_{at}": 1.0 for at in range(12)}), 0.5)
    assert len(late.values) == 19 and len({name for name, _ in (*late.values, ("lr", 0.0))}) == 20
    assert chosen.num_left_out == 50 + 5
    again = chosen.of(merged_step(layout, 5, lr=0.1, late_0=1.0, late_11=1.0), 0.5)
    assert {"lr", "late_0"} <= dict(again.values).keys() and "late_11" not in dict(again.values), (
        "a series stays or is not there"
    )


def test_names_that_move_a_cursor_are_escaped() -> None:
    assert "\\u001b[31mred\\n" in names(MirrorSelect(), **{"\x1b[31mred\n": 1.0})


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: TensorSeries(kinds=("wgrads",), statistics=("norm",)), 'unknown word: "wgrads"; known: param'),
        (lambda: TensorSeries(kinds=("scalar",), statistics=("norm",)), "logged values are mirrored by `scalars`"),
        (lambda: TensorSeries(kinds=("wgrad",), statistics=()), "expected at least one statistic"),
        (lambda: MirrorSelect(max_series=0), "select.max_series must be at least 1, got 0"),
        (lambda: MirrorSelect(flush_s=0.0), "select.flush_s must be at least 0.05"),
    ],
)
def test_a_choice_that_is_none_is_refused_when_it_is_built(build: object, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()  # type: ignore[operator]

    assert says in str(error.value)
