"""`/api/v1/history`: what a page is answered out of a history, in a form that it can draw."""

from __future__ import annotations

import base64
import math
from pathlib import Path

import numpy as np
import pytest

from sentinel.daemon import history_api
from sentinel.daemon.history_api import HAS_INF, HAS_NAN, NOTHING, VALUE_THERE, HistoryQueries, HistoryRequest
from sentinel.daemon.series_api import Busy
from sentinel.errors import NotThere
from sentinel.history.pictures import picture_of
from sentinel.history.question_cache import QuestionCache
from sentinel.history.wanted import ANY_TENSORS, Wanted

from ..history.test_writer import writing
from ..support.merged_steps import FlatLayout, merged_step

LOSSES = [2.0, math.nan, 1.0, math.inf, 3.0]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with writing(tmp_path / "run") as one:
        for seq, loss in enumerate(LOSSES, 1):
            # Step 2 is missing.
            one.take(merged_step(FlatLayout(2), seq, step=seq + (seq > 2), loss=loss, num_nan=1000 if seq == 3 else 0))
    return tmp_path / "run"


def asked(**parameters: str) -> HistoryRequest:
    return HistoryRequest.parse([("run", "run"), *parameters.items()])


def test_series_are_strict_numbers_and_leave_out_what_was_not_measured(run_dir: Path) -> None:
    told = HistoryQueries().series(run_dir, asked(name="loss"))

    [loss] = told["series"]
    assert (told["first_step"], told["last_step"], told["width"]) == (1, 6, 1)
    assert loss["steps"] == [1, 2, 4, 5, 6]
    assert loss["mean"] == loss["greatest"] == [2.0, None, 1.0, None, 3.0]
    assert (loss["nans"], loss["infs"]) == ([0, 1, 0, 0, 0], [0, 0, 0, 1, 0])


def test_a_heat_map_has_a_value_and_a_state_in_each_cell(run_dir: Path) -> None:
    told = HistoryQueries().heatmap(run_dir, asked(kind="wgrad", statistic="std"))

    states = np.frombuffer(base64.b64decode(told["states"]), np.uint8).reshape(2, told["num_columns"])
    values = np.frombuffer(base64.b64decode(told["values"]), "<f4").reshape(states.shape)
    assert [one["name"] for one in told["rows"]] == ["layers.0.weight", "layers.1.weight"]
    assert states.tolist() == [
        [VALUE_THERE, VALUE_THERE, NOTHING, HAS_NAN, VALUE_THERE, VALUE_THERE],
        [VALUE_THERE, VALUE_THERE, NOTHING, VALUE_THERE, VALUE_THERE, VALUE_THERE],
    ]
    assert np.isfinite(values[states == VALUE_THERE]).all() and np.isnan(values[states == NOTHING]).all()


def test_who_names_no_kind_is_shown_the_first_that_there_is(run_dir: Path, tmp_path: Path) -> None:
    told = HistoryQueries().heatmap(run_dir, HistoryRequest.parse([("run", "run")], ANY_TENSORS))
    assert (told["kind"], len(told["rows"])) == ("wgrad", 2)

    with writing(tmp_path / "empty") as one:
        one.take(merged_step(FlatLayout(0), 1, step=1, loss=2.0))
    told = HistoryQueries().heatmap(tmp_path / "empty", HistoryRequest.parse([("run", "empty")], ANY_TENSORS))
    assert (told["kind"], told["rows"], told["num_columns"], told["values"]) == ("", (), 0, "")


def test_asked_again_with_the_newest_steps_in_buckets_it_is_the_same(run_dir: Path, tmp_path: Path) -> None:
    """Steps that a later attempt repeated, a NaN among the newest, columns of one step and of several."""
    with writing(tmp_path / "again") as one:
        for seq in range(1, 41):
            attempt, step = (0, seq) if seq <= 25 else (1, seq - 10)
            num_nan = 7 if seq in (20, 30) else 0
            one.take(merged_step(FlatLayout(3), seq, step=step, attempt=attempt, loss=float(seq), num_nan=num_nan))
    for run in (run_dir, tmp_path / "again"):
        for columns in (1, 2, 40):
            wanted = Wanted(kind="wgrad", statistic="std", columns=columns)
            plain = picture_of("run", run, wanted)
            cache = QuestionCache()

            for _ in range(3):
                kept = picture_of("run", run, wanted, cache)

                assert (kept.rows, kept.first_step, kept.width) == (plain.rows, plain.first_step, plain.width)
                for name in ("least", "greatest", "mean", "last", "nans", "infs", "steps"):
                    np.testing.assert_allclose(getattr(kept, name), getattr(plain, name), rtol=1e-6, err_msg=name)


def test_a_heat_map_of_values_shows_infinities_apart(run_dir: Path) -> None:
    told = HistoryQueries().heatmap(run_dir, asked(kind="scalar", name="loss"))

    assert base64.b64decode(told["states"])[4] == HAS_INF


@pytest.mark.parametrize(("of", "expected"), [("min", "min"), ("max", "max"), ("extreme", "farthest")])
def test_a_cell_of_several_steps_shows_which_of_them_was_asked_for(run_dir: Path, of: str, expected: str) -> None:
    queries = HistoryQueries()
    single = np.frombuffer(
        base64.b64decode(queries.heatmap(run_dir, asked(kind="wgrad", statistic="mean"))["values"]), "<f4"
    )
    own = single[6:][np.isfinite(single[6:])]
    wanted = {"min": own.min(), "max": own.max(), "farthest": own[np.abs(own).argmax()]}[expected]

    told = queries.heatmap(run_dir, asked(kind="wgrad", statistic="mean", columns="1", of=of))

    assert np.frombuffer(base64.b64decode(told["values"]), "<f4")[1] == pytest.approx(wanted)


def test_one_question_is_answered_at_a_time(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_api, "WAIT_S", 0.01)
    queries = HistoryQueries()

    with queries._turn(), pytest.raises(Busy, match="try again"):
        queries.held(run_dir, asked())

    assert queries.held(run_dir, asked())["kinds"] == {"wgrad": 2}


def test_a_run_without_a_history_is_said_with_what_to_do(tmp_path: Path) -> None:
    for question in (HistoryQueries().held, HistoryQueries().series, HistoryQueries().heatmap):
        with pytest.raises(NotThere, match=r"enabled: false"):
            question(tmp_path, asked(kind="wgrad"))
