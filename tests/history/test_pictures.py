"""Pictures of a history: nothing of one step vanishes at any zoom, and no answer is larger or slower than its bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sentinel.errors import ConfigError, TookTooLong
from sentinel.history import pictures
from sentinel.history.manifest import HistoryFile, Manifest, read_manifest
from sentinel.history.pictures import OF_BUCKETS, asked_in_time, held, picture_of
from sentinel.history.questions import asking
from sentinel.history.sql_views import views_of
from sentinel.history.table_schemas import WIDTHS
from sentinel.history.wanted import Wanted

from .test_writer import answer, write, writing

STEPS = 400


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 3 tensors over 400 steps, in many files of which some were merged; 7 NaN in the first tensor at step 19."""
    run_dir = tmp_path_factory.mktemp("pictures") / "run"
    with writing(run_dir) as one:
        write(one, 1, STEPS, at_once=10)
    yield run_dir


def picture(run_dir: Path, **wanted: object) -> pictures.Picture:
    return picture_of("run", run_dir, Wanted(**{"kind": "wgrad", "statistic": "std", **wanted}))


@pytest.mark.parametrize("columns", [1, 3, 25, 100, 4000])
def test_the_greatest_the_least_and_every_nan_are_there_at_each_zoom(run: Path, columns: int) -> None:
    single = answer(run, "SELECT series, min(std), max(std), sum(nans) FROM moments GROUP BY series ORDER BY series")

    shown = picture(run, columns=columns)

    assert len(shown.rows) == 3 and shown.steps.shape[1] <= columns
    found = zip(shown.least.min(axis=1), shown.greatest.max(axis=1), shown.nans.sum(axis=1), strict=True)
    assert [(least, greatest, nans) for least, greatest, nans in found] == [one[1:] for one in single]
    assert shown.steps.sum() == 3 * STEPS and shown.infs.sum() == 0


def test_a_column_says_which_steps_it_is_of(run: Path) -> None:
    shown = picture(run, first_step=100, last_step=199, columns=7)

    assert (shown.first_step, shown.last_step, shown.steps.shape[1]) == (100, 199, 7)
    assert 199 < shown.first_step + 7 * shown.width <= 199 + shown.width
    wide = picture(run, first_step=100, last_step=399, columns=10)
    assert (wide.first_step, wide.width, wide.steps.sum()) == (96, 32, 3 * 304)
    one = picture(run, first_step=19, last_step=19)
    assert (one.first_step, one.width, one.nans.tolist()) == (19, 1, [[7], [0], [0]])


@pytest.mark.parametrize("statistic", ["rms", "norm", "absmax"])
@pytest.mark.parametrize("columns", [10, 4000])
def test_what_is_made_of_kept_statistics_is_bounded_by_every_step(run: Path, statistic: str, columns: int) -> None:
    # Step 19 has fewer elements, of which a norm in buckets takes the tensor's own number.
    single = answer(run, f"SELECT max({statistic}), min({statistic}) FROM moments WHERE series = 2")[0]

    shown = picture(run, statistic=statistic, columns=columns, series=(2,))

    assert single[0] <= np.nanmax(shown.greatest) * (1 + 1e-9) <= single[0] * 2**0.5 * (1 + 1e-6)
    assert np.nanmin(shown.least) <= single[1] * (1 + 1e-9)


def test_neighbours_share_a_row_where_there_are_more_series_than_rows(run: Path) -> None:
    apart = picture(run, columns=20)

    shown = picture(run, columns=20, rows=2)

    assert [(one.name, one.num) for one in shown.rows] == [("layers.0.weight", 2), ("layers.2.weight", 1)]
    assert shown.greatest[0].tolist() == np.maximum(apart.greatest[0], apart.greatest[1]).tolist()
    assert shown.nans.sum() == 7


def test_many_rows_leave_room_for_fewer_columns(run: Path) -> None:
    assert picture(run, columns=1000, cells=90).steps.shape[1] <= 30


def test_scalars_and_the_time_of_a_step_are_series_too(run: Path) -> None:
    loss = picture(run, kind="scalar", statistic="value", names=("loss",))
    seconds = picture(run, kind="steps", statistic="seconds")

    assert loss.rows[0].name == "loss" and set(loss.mean[0].tolist()) == {2.0}
    assert seconds.greatest.shape == (1, STEPS) and seconds.steps[0, 0] == 0
    assert set(seconds.mean[0, 1:].round(3).tolist()) == {1.0}


def test_steps_are_placed_in_time_from_the_first_on(run: Path) -> None:
    elapsed = picture(run, kind="steps", statistic="elapsed", first_step=100, columns=10)

    assert (elapsed.first_step, elapsed.width) == (100, 30)
    assert elapsed.least[0, 0] == pytest.approx(100.0) and elapsed.greatest[0, -1] == pytest.approx(STEPS - 1.0)


def test_where_single_steps_are_gone_a_picture_is_made_of_buckets() -> None:
    def files(table: str, first: int) -> HistoryFile:
        return HistoryFile(name=table, table=table, level=1, rows=1, bytes=1, attempt=0, first_step=first, last_step=9999)

    kept = Manifest(full_from=5000, files=(files("moments_16", 4000), files("moments_256", 0), files("moments_4096", 0)))

    assert pictures._columns(kept, 10, 6000, 6999, 2000) == (1, 6000, 1)
    assert pictures._columns(kept, 10, 4500, 6999, 2000) == (16, 4496, 16)
    assert pictures._columns(kept, 10, 100, 999, 2000) == (256, 0, 256)
    assert pictures._columns(kept, 10, 0, 9999, 3) == (256, 0, 3584)


def test_a_picture_of_many_tensors_over_a_million_steps_reads_wide_buckets() -> None:
    table, _, width = pictures._columns(Manifest(), 1000, 0, 10**6 - 1, 1000)

    assert (table, width) == (4096, 4096)
    assert 1000 * 10**6 // table <= pictures.MOST_ROWS_READ
    assert pictures._columns(Manifest(), 1, 0, 10**6 - 1, 1000) == (256, 0, 1024)


def test_what_a_history_holds_is_listed_and_found_by_part_of_a_name(run: Path) -> None:
    whole, part = held("run", run), held("run", run, "RS.1")

    assert (whole["first_step"], whole["last_step"], whole["kinds"]) == (0, STEPS - 1, {"wgrad": 3})
    assert [one["name"] for one in whole["scalars"]] == ["loss"] and whole["statistics"] == list(OF_BUCKETS)
    assert [one["name"] for one in part["tensors"]] == ["layers.1.weight"]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"statistic": "stdd"}, 'did you mean "std"'),
        ({"kind": "scalar"}, "statistic: expected one of value"),
        ({"kind": "wgard"}, 'kind: expected one of scalar, wgrad, got "wgard"'),
        ({"names": ("layer.1.weight",)}, "matches no name of kind wgrad; nearest: layers"),
        ({"series": (99,)}, "series 99 is none of kind wgrad"),
    ],
)
def test_what_a_history_has_not_is_said_with_what_it_has(run: Path, wanted: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        picture(run, **wanted)


def test_an_answer_that_takes_too_long_is_given_up(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "ANSWER_S", 0.05)

    with pytest.raises(TookTooLong, match=r"no answer within 0\.05 s"), asked_in_time({"run": run}) as connection:
        connection.execute("SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b")


@pytest.mark.parametrize("span", [(0, 15), (18, 20), (100, 199), (255, 256), (390, 10**6)])
def test_a_question_about_some_steps_sees_all_of_each_of_their_buckets(run: Path, span: tuple[int, int]) -> None:
    columns = "series, step, last_step, num_steps, nans, bad_steps, std_num, std_min, std_max, std_last"

    with asking({"run": run}) as every, asking({"run": run}, span=span) as some:
        for width in WIDTHS:
            met = f"step BETWEEN {span[0] // width * width} AND {span[1]} ORDER BY series, step"
            query = f"SELECT {columns} FROM moments_{width} WHERE {met}"
            assert some.execute(query).fetchall() == every.execute(query).fetchall() != []
        query = (
            f"SELECT series, step, std, nans FROM moments WHERE step BETWEEN {span[0]} AND {span[1]} ORDER BY series, step"
        )
        assert some.execute(query).fetchall() == every.execute(query).fetchall() != []


def test_a_question_about_some_steps_names_no_file_that_has_none_of_them(run: Path) -> None:
    manifest = read_manifest(run / "history")
    late = [one.name for table in ("moments", "moments_16") for one in manifest.of(table) if one.first_step > 31]
    assert len(late) > 2

    views = views_of("run", run / "history", manifest, (3, 20))

    assert not [name for name in late if name in views["moments"] or name in views["moments_16"]]
    assert manifest.series in views["series"]
