"""`sentinel.open`: what a notebook asks of recorded runs, beside slow and obvious readings of what was written."""

from __future__ import annotations

import contextlib
import html
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import sentinel
from sentinel.anomaly import Severity
from sentinel.errors import ConfigError, SentinelError, StoreError
from sentinel.exports.series import MergedStep
from sentinel.history.config import HistoryConfig
from sentinel.history.opened_runs import OpenedRuns
from sentinel.messages import Vector, Vectors
from sentinel.moments import Moments
from sentinel.store.journal import Journal
from sentinel.wire.frame import FrameType, encode_message

from ..support.anomalies import a_nan, an_excursion, an_incident
from ..support.merged_steps import FlatLayout, merged_step
from ..support.serving import small_run
from ..support.waiting import wait_for
from .test_found_rows import commit
from .test_writer import QUICK, writing

pytestmark = pytest.mark.slow

LAYOUT = FlatLayout(2)
NAME = "layers.0.weight"
THINNED = HistoryConfig(enabled=True, flush_s=0.05, full_steps=250, around_steps=3)
EVIL = "<script>alert('1')</script> $x_{ & \x1b[2J\u202e\nend"


def write_steps(run: Path, steps: list[MergedStep], config: HistoryConfig = QUICK, at_once: int = 20) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Journal(Path(folder) / "journal.sqlite")) as journal:
        commit(journal, a_nan(step=10))
        _write_steps(run, steps, config, at_once, journal.path)


def _write_steps(run: Path, steps: list[MergedStep], config: HistoryConfig, at_once: int, journal: Path) -> None:
    with writing(run, config, journal=journal) as one:
        for at, step in enumerate(steps, 1):
            one.take(step)
            if at % at_once == 0 or at == len(steps):
                one.flush()
                wait_for(lambda seq=step.seq: one.decision >= seq, interval_s=0.001)


def norms_of(steps: list[MergedStep], statistic: str) -> dict[int, float]:
    """Return step -> a statistic of the first tensor, of the newest attempt that has the step."""
    return {one.step: float(Moments(one.stats).statistic(statistic)[0]) for one in steps}


def write_found(run: Path) -> None:
    (run / "anomalies").mkdir(parents=True)
    found = [a_nan(step=9), an_excursion(step=5), a_nan(name="blocks.1", step=7, severity=Severity.INFO)]
    body = b"".join(msgspec.json.encode(one) + b"\n" for one in found)
    (run / "anomalies" / "0.jsonl").write_bytes(body + b'[1]\n{"torn')
    revisions = [
        an_incident(1), an_incident(2, severity=Severity.CRITICAL, title="worst"), an_incident(3, state="resolved"),
        an_incident(4, state="merged", merged_into="i1"), an_incident(1, revision=2, last_step=12),
    ]  # fmt: skip
    (run / "incidents.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in revisions))


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[MergedStep]]]:
    """A run of 1,000 steps of which the older ones are buckets: a NaN at 333, a loss of 50 at 444."""
    run = tmp_path_factory.mktemp("thinned") / "run"
    run.mkdir()
    steps = [
        merged_step(LAYOUT, seq, num_nan=7 if seq == 334 else 0, loss=50.0 if seq == 445 else 2.0 + seq / 1e4)
        for seq in range(1, 1001)
    ]
    write_steps(run, steps, THINNED)
    yield run, steps


@pytest.mark.parametrize("span", [(None, None), (0, 99), (5, 20), (300, 700), (640, 1100), (990, None)])
@pytest.mark.parametrize("points", [None, 10, *(pytest.param(one, marks=pytest.mark.long) for one in (1, 100, 2000))])
def test_a_series_has_every_step_once_and_its_least_and_greatest_value(
    thinned: tuple[Path, list[MergedStep]], points: int | None, span: tuple[int | None, int | None]
) -> None:
    run, steps = thinned
    expected = norms_of(steps, "std")
    first, last = span[0] or 0, 999 if span[1] is None else min(span[1], 999)

    rows = list(sentinel.open(run).series(NAME, "std", steps=span, points=points))

    assert [one["step"] for one in rows] == sorted(one["step"] for one in rows)
    covered = [step for one in rows for step in range(one["step"], one["last_step"] + 1)]
    assert len(covered) == len(set(covered)) and set(covered) >= set(range(first, last + 1))
    assert all(one["step"] <= last and one["last_step"] >= first for one in rows)
    for one in rows:
        values = np.array([expected[step] for step in range(one["step"], one["last_step"] + 1)])
        assert one["num_steps"] == len(values)
        found = [one["min"], one["avg"], one["max"], one["last"]]
        assert found == pytest.approx([values.min(), values.mean(), values.max(), values[-1]], rel=1e-6)
        assert (one["nans"], one["bad_steps"]) == ((7, 1) if one["step"] <= 333 <= one["last_step"] else (0, 0))


def test_steps_are_single_where_they_are_kept(thinned: tuple[Path, list[MergedStep]]) -> None:
    run, _ = thinned

    rows = list(sentinel.open(run).series(NAME, points=None))

    widths = {one["num_steps"] for one in rows if one["step"] < 600}
    assert widths == {16}
    assert all(one["num_steps"] == 1 for one in rows if one["step"] >= 750)


@pytest.mark.parametrize("points", [None, 1, 5, 50, 5000])
def test_a_spike_of_one_step_is_at_every_zoom(thinned: tuple[Path, list[MergedStep]], points: int | None) -> None:
    run, _ = thinned

    found = sentinel.open(run).series("loss", points=points)

    assert max(found["max"]) == 50.0
    assert found["statistic"][0] == "value" and found["kind"][0] == "scalar"


@pytest.mark.parametrize("statistic", ["norm", "rms", "absmax", "var", "zeros", "count"])
@pytest.mark.parametrize("points", [None, 8])
def test_what_follows_from_other_statistics_is_exact_or_bound(
    thinned: tuple[Path, list[MergedStep]], statistic: str, points: int | None
) -> None:
    run, steps = thinned
    slow = {
        "absmax": lambda one: max(abs(one.stats["min"][0]), abs(one.stats["max"][0])),
        "count": lambda one: float(one.stats["count"][0]),
        "zeros": lambda one: one.stats["num_zero"][0] / 1000,
    }.get(statistic, lambda one: float(Moments(one.stats).statistic(statistic)[0]))

    table = sentinel.open(run).series(NAME, statistic, points=points)

    for one in table:
        values = np.array([slow(step) for step in steps[one["step"] : one["last_step"] + 1]])
        if not one["is_bound"]:
            found = [one["min"], one["avg"], one["max"], one["last"]]
            assert found == pytest.approx([values.min(), values.mean(), values.max(), values[-1]], rel=1e-6)
        elif one["min"] is not None:
            assert one["min"] <= values.min() * (1 + 1e-6) and values.max() <= one["max"] * (1 + 1e-6)
            assert one["min"] <= one["avg"] <= one["max"]
    bounds = [one for one in table if one["is_bound"]]
    assert bounds and "is_bound" in repr(table)
    assert all((one["min"] is None) == (statistic in ("norm", "count", "zeros")) for one in bounds)


@pytest.mark.parametrize("points", [None, 4])
def test_steps_that_a_later_attempt_repeated_count_once(tmp_path: Path, points: int | None) -> None:
    steps = [merged_step(LAYOUT, seq, attempt=0, step=seq) for seq in range(1, 301)]
    steps += [merged_step(LAYOUT, seq, attempt=1, step=seq - 100) for seq in range(301, 601)]
    write_steps(tmp_path, steps)
    expected = norms_of(steps, "std")

    rows = list(sentinel.open(tmp_path).series(NAME, points=points))

    if points is None:
        assert [(one["attempt"], one["step"]) for one in rows] == [(int(step > 200), step) for step in range(1, 501)]
        assert [one["avg"] for one in rows] == pytest.approx([expected[step] for step in range(1, 501)], rel=1e-6)
    else:
        assert {one["attempt"] for one in rows} == {0, 1}


def test_a_name_with_a_wildcard_in_it_means_itself_and_a_glob_means_all(tmp_path: Path) -> None:
    layout = FlatLayout(3)
    layout.tensors[1] = msgspec.structs.replace(layout.tensors[1], name="layers.[0]")
    write_steps(tmp_path, [merged_step(layout, 1)])
    run = sentinel.open(tmp_path)

    assert run.series("layers.[0]")["name"] == ["layers.[0]"]
    assert run.series("layers.*")["name"] == ["layers.0.weight", "layers.2.weight", "layers.[0]"]
    assert run.series("*")["statistic"] == ["std", "std", "std", "value"]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda run: run.series("los"), r'"los" is no name.*nearest: "loss"'),
        (lambda run: run.series(NAME, "nrm"), r'unknown statistic "nrm"; did you mean "norm"\?'),
        (lambda run: run.series(NAME, kind="wgrd"), r'has no kind "wgrd"; did you mean "wgrad"\?'),
        (lambda run: run.series("loss", "norm"), "is a scalar, whose statistic is value"),
        (lambda run: run.series(NAME, "value"), "is a tensor, which has no value"),
        (lambda run: run.series(NAME, steps=7), r"steps must be \(first, last\).*got 7"),
        (lambda run: run.series(NAME, steps=(9, 3)), r"steps must be \(first, last\)"),
        (lambda run: run.series(NAME, points=0), "points must be at least 1"),
        (lambda run: run.tensors("layer.0.weigt"), f'matches no name; nearest: "{NAME}"'),
        (lambda run: run.tensors(kind="wgrd"), r'unknown kind "wgrd"; did you mean "wgrad"\?'),
        (lambda run: run.scalars("lss"), 'nearest: "loss"'),
        (lambda run: run.anomalies(rule="nam"), r'rule "nam"; did you mean "nan"\?'),
        (lambda run: run.anomalies(severity="critcal"), r'did you mean "critical"\?'),
        (lambda run: run.incidents(state="opne"), r'did you mean "open"\?'),
        (lambda run: run.histogram(NAME, kind="wgrd"), r'did you mean "wgrad"\?'),
        (lambda run: run.sql("SELECT nothing"), "the query cannot be answered"),
    ],
)
def test_an_error_says_what_was_meant(tmp_path: Path, ask: Callable[[OpenedRuns], object], words: str) -> None:
    write_steps(tmp_path, [merged_step(LAYOUT, 1)])
    write_found(tmp_path)

    with pytest.raises(ConfigError, match=words):
        ask(sentinel.open(tmp_path))


def test_a_column_that_is_not_there_is_said(tmp_path: Path) -> None:
    write_found(tmp_path)

    with pytest.raises(KeyError, match="known: run, id, state"):
        sentinel.open(tmp_path).incidents()["states"]


def test_what_was_measured_is_listed(thinned: tuple[Path, list[MergedStep]]) -> None:
    run, _ = thinned

    tensors, scalars = sentinel.open(run).tensors(kind="wgrad"), sentinel.open(run).scalars()

    assert [(one["name"], one["num_steps"], one["last_step"], one["nans"], one["bad_steps"]) for one in tensors] == [
        (NAME, 1000, 999, 7, 1),
        ("layers.1.weight", 1000, 999, 0, 0),
    ]
    (loss,) = scalars
    assert (loss["name"], loss["min"], loss["max"], loss["last"]) == (
        "loss",
        pytest.approx(2.0001),
        50.0,
        pytest.approx(2.1),
    )


def test_what_was_found_is_told_without_a_history(tmp_path: Path) -> None:
    write_found(tmp_path)
    run = sentinel.open(tmp_path)

    assert [(one["step"], one["rule"], one["severity"]) for one in run.anomalies()] == [
        (5, "turbulence", "warning"), (7, "nan", "info"), (9, "nan", "critical"),
    ]  # fmt: skip
    assert run.anomalies(severity="warning")["step"] == [5, 9]
    assert run.anomalies(rule="nan", steps=(None, 8))["step"] == [7]
    assert run.anomalies()["time"][0].timestamp() == 5.0
    assert [(one["id"], one["state"], one["last_step"]) for one in run.incidents()] == [
        ("i2", "open", 7), ("i1", "open", 12), ("i3", "resolved", 7),
    ]  # fmt: skip
    assert run.incidents(state="resolved")["id"] == ["i3"]
    with pytest.raises(StoreError, match=r"expected a run with a history.*enabled: false.*anomalies\(\), incidents\(\)"):
        run.series("loss")
    assert "no history" in repr(run) and "worst" in repr(run)


def test_a_run_of_which_nothing_is_written_yet_is_asked(tmp_path: Path) -> None:
    write_steps(tmp_path, [])
    run = sentinel.open(tmp_path)

    assert (len(run.tensors()), len(run.scalars()), len(run.anomalies()), len(run.incidents())) == (0, 0, 0, 0)
    assert "a history with no step yet" in repr(run)
    assert [repr(one).splitlines()[-1] for one in (run.tensors(), run.anomalies())] == ["0 rows", "0 rows"]
    with pytest.raises(ConfigError, match="there are none"):
        run.series("loss")


def test_a_run_that_is_written_is_followed_and_nothing_of_it_is_touched(tmp_path: Path) -> None:
    run = sentinel.open(tmp_path)
    seen = []
    with writing(tmp_path) as one:
        for seq in range(1, 201):
            one.take(merged_step(LAYOUT, seq, loss=float(seq)))
            if seq % 10 == 0:
                one.flush()
                wait_for(lambda seq=seq: one.decision >= seq, interval_s=0.001)
                seen.append(run.series("loss", points=None)["avg"])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    run.series("*"), run.tensors(), run.anomalies(), run.incidents(), run.sql("SELECT 1 AS x"), repr(run)

    assert seen == [[float(one) for one in range(1, last + 1)] for last in range(10, 201, 10)]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_several_runs_are_asked_together_and_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DIR", str(tmp_path))
    for at, name in enumerate(("a", "it's")):
        (tmp_path / name).mkdir()
        write_steps(tmp_path / name, [merged_step(LAYOUT, seq, loss=float(at)) for seq in range(1, 4)])
        write_found(tmp_path / name)

    both = sentinel.open("a", tmp_path / "it's")

    assert [(one["run"], one["step"], one["avg"]) for one in both.series("loss")] == [
        *(("a", step, 0.0) for step in range(3)), *(("it's", step, 1.0) for step in range(3)),
    ]  # fmt: skip
    assert both.incidents()["run"] == ["a", "it's", "a", "it's", "a", "it's"]
    assert set(both.tensors()["run"]) == {"a", "it's"}
    with pytest.raises(ConfigError, match=r'"b": expected a run.*known: a, it'):
        sentinel.open("b")
    with pytest.raises(ConfigError, match='two runs are called "a"'):
        (tmp_path / "other" / "a").mkdir(parents=True)
        sentinel.open("a", tmp_path / "other" / "a")


def test_rows_go_over_into_other_libraries(tmp_path: Path) -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    write_steps(tmp_path, [merged_step(LAYOUT, seq, loss=math.nan if seq == 2 else 1.0) for seq in range(1, 4)])
    write_found(tmp_path)
    run = sentinel.open(tmp_path)

    for table in (run.series("*"), run.tensors(), run.scalars(), run.anomalies(), run.incidents(), run.sql("FROM steps")):
        rows = list(table)
        assert table.to_arrow().to_pylist() == rows and len(rows) == len(table) > 0
        frame = table.to_pandas()
        assert isinstance(frame, pandas.DataFrame) and list(frame.columns) == table.columns and len(frame) == len(rows)
        other = table.to_polars()
        assert isinstance(other, polars.DataFrame) and other.columns == table.columns
        assert other.to_dicts() == rows
    assert run.series("loss").to_pandas()["avg"].isna().tolist() == [False, True, False]


@pytest.mark.parametrize("package", ["pandas", "polars", "matplotlib"])
def test_a_package_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    write_found(tmp_path)
    table = sentinel.open(tmp_path).anomalies()
    for name in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    ask = {"pandas": table.to_pandas, "polars": table.to_polars, "matplotlib": table.plot}[package]

    with pytest.raises(ConfigError, match=rf"needs the package {package}.*pip install {package}"):
        ask()


def test_duckdb_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, [merged_step(LAYOUT, 1)])
    monkeypatch.setitem(sys.modules, "duckdb", None)
    run = sentinel.open(tmp_path)

    with pytest.raises(ConfigError, match="pip install duckdb"):
        run.series("loss")
    assert "steps 0 to 0" in repr(run)


def test_a_table_shows_few_rows_and_counts_the_others(thinned: tuple[Path, list[MergedStep]]) -> None:
    run, _ = thinned
    table = sentinel.open(run).sql("SELECT step, 1 AS x FROM steps ORDER BY step")

    assert len(table) == 1000
    assert len(repr(table).splitlines()) == 22 and "1,000 rows, 20 shown" in repr(table)
    assert table._repr_html_().count("<tr>") == 21


def test_names_that_harm_are_shown_as_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    layout = FlatLayout(2)
    layout.tensors[0] = msgspec.structs.replace(layout.tensors[0], name=EVIL, dtype="<b>")
    run_dir = tmp_path / "<img src=x>"
    run_dir.mkdir()
    write_steps(run_dir, [merged_step(layout, seq, num_nan=5, **{EVIL: 1.0}) for seq in range(1, 4)])
    (run_dir / "anomalies").mkdir()
    (run_dir / "anomalies" / "0.jsonl").write_bytes(msgspec.json.encode(a_nan(name=EVIL, message=EVIL, rule=EVIL)) + b"\n")
    incident = an_incident(title=EVIL, root_name=EVIL, suspected=EVIL)
    (run_dir / "incidents.jsonl").write_bytes(msgspec.json.encode(incident) + b"\n")
    run = sentinel.open(run_dir)
    tables = [
        run.series("*"), run.tensors(), run.scalars(), run.anomalies(), run.incidents(),
        run.sql("SELECT 0 AS step, 1 AS \"<b>'x'\", '<i>' AS name"),
    ]  # fmt: skip

    for shown in (run, *tables):
        page, text = shown._repr_html_(), repr(shown)
        tags = set(re.findall(r"</?(\w+)", page))
        assert tags <= {"div", "p", "b", "br", "small", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "code"}
        assert not re.search(r"<\w+ [^>]*>", page), "no attribute at all"
        assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", page + text)
    assert "&lt;script&gt;" in run._repr_html_() and "&lt;img src=x&gt;" in run._repr_html_()
    assert html.escape("alert('1')") in tables[1]._repr_html_()
    for table in (tables[0], *tables[3:]):
        figure = table.plot().figure
        figure.canvas.draw()


def test_a_series_is_drawn_with_its_band_and_its_bad_steps(thinned: tuple[Path, list[MergedStep]]) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    run, _ = thinned
    table = sentinel.open(run).series(NAME, points=100)

    axes = table.plot()

    line, marks = axes.lines
    assert np.allclose(line.get_ydata(), table["avg"])
    (band,) = axes.collections
    edges = band.get_paths()[0].vertices
    assert edges[:, 1].max() == max(table["max"]) and edges[:, 1].min() == min(table["min"])
    (at,) = [one for one in table if one["bad_steps"]]
    assert list(marks.get_xdata()) == [(at["step"] + at["last_step"]) / 2]
    assert table.plot(ax=axes) is axes


def test_what_cannot_be_drawn_is_said_and_of_much_only_some_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    write_steps(tmp_path, [merged_step(FlatLayout(30), seq) for seq in range(1, 4)])
    run = sentinel.open(tmp_path)

    axes = run.series("layers.*").plot()

    assert len(axes.lines) == 20 and "(20 of 30 series)" in axes.get_title()
    assert len(run.sql("SELECT step, norm, name FROM moments WHERE name LIKE 'layers.1%'").plot().lines) == 11
    with pytest.raises(ConfigError, match=r"expected a column step and a column of numbers.*got name"):
        run.sql("SELECT name FROM series").plot()
    assert run.anomalies().plot() is not None


def write_histograms(run_dir: Path) -> None:
    run = small_run(run_dir, dp=1, pp=1)
    for _ in range(3):
        tensors = {(one.kind, one.name): one.id for one in run.descriptor(0).tensors}
        one = Vector(
            tensor=tensors["wgrad", "layers.0.mlp.weight"], statistic="histogram", axis="bin", dtype="<i8", shape=(3,),
            values=np.array([1, 2**53 - run.step, 0], "<i8").tobytes(), edges=(-1.0, 0.0, 1e-7, 1.0),
        )  # fmt: skip
        run._write_message(run._ranks[0], FrameType.VECTOR, encode_message(Vectors(items=(one,))), run.step, 0)
        run.write(1)


def test_histograms_are_those_of_the_spool(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    write_histograms(tmp_path / "run")
    run = sentinel.open(tmp_path / "run")

    table = run.histogram("layers.*.mlp.weight", step=1)

    assert [(one["step"], one["rank"], one["kind"], one["bin"], one["low"], one["high"], one["count"]) for one in table] == [
        (1, 0, "wgrad", 0, -1.0, 0.0, 1), (1, 0, "wgrad", 1, 0.0, 1e-7, 2**53 - 1), (1, 0, "wgrad", 2, 1e-7, 1.0, 0),
    ]  # fmt: skip
    assert set(run.histogram("layers.0.mlp.weight")["step"]) == {2}, "the newest"
    table.plot().figure.canvas.draw()
    with pytest.raises(ConfigError, match=r"has none at step 7; near it: 0, 1, 2"):
        run.histogram("layers.0.mlp.weight", step=7)
    with pytest.raises(ConfigError, match=r'none is of a tensor "layers.0.mpl.weight"; nearest: "layers.0.mlp.weight"'):
        run.histogram("layers.0.mpl.weight")


def test_a_run_without_histograms_says_how_they_are_recorded(tmp_path: Path) -> None:
    small_run(tmp_path / "run").write(2)

    with pytest.raises(SentinelError, match=r"the spool holds none; .*probes: \{wgrad: \{histogram: true\}\}"):
        sentinel.open(tmp_path / "run").histogram("layers.0.mlp.weight")


@pytest.mark.slow
def test_importing_and_opening_loads_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys, sentinel\n"
        "heavy = {'torch', 'pyarrow', 'duckdb', 'pandas', 'polars', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        f"run = sentinel.open({str(tmp_path)!r})\n"
        "repr(run)\n"
        "assert not (heavy - {'pyarrow'}) & set(sys.modules)\n"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)

    assert result.returncode == 0, result.stderr
    assert "open" not in sentinel.__all__, "a star import leaves Python's own as it is"
