"""`/api/v1/series`: what is asked, what of it comes from memory and what from the spool, and that it stays bounded."""

from __future__ import annotations

import functools
import json
import math
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from sentinel.cli.main import run_cli
from sentinel.daemon import series_api
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.http.app import make_app
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.daemon_api import UnknownRun
from sentinel.daemon.http.request_gate import RequestGate
from sentinel.daemon.http.tokens import Tokens
from sentinel.daemon.series_api import Busy, SeriesQueries, SeriesRequest
from sentinel.daemon.serving import FORGET_S, ServedRun
from sentinel.errors import ConfigError
from sentinel.exports.series import RECENT_LAYOUTS, RecentSteps
from sentinel.history.config import HistoryConfig
from sentinel.ingest.merge import ClosedStep
from sentinel.judge.recorded import RecordedRun
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan, SyntheticRun

from ..support.serving import catch_up, served, small_run

TOKENS = Tokens(read="r" * 20, control="c" * 20)

deep_run = functools.partial(small_run, layers=12)


def ask(run: ServedRun, **parameters: str | list[str]) -> dict[str, Any]:
    items = []
    for name, given in parameters.items():
        items += [(name.rstrip("_"), one) for one in ([given] if isinstance(given, str) else given)]
    answer = SeriesQueries().answer([run], SeriesRequest.parse(items))
    return json.loads(json.dumps(answer, allow_nan=False))  # type: ignore[no-any-return]


def exported(capsys: pytest.CaptureFixture[str], run_dir: Path, statistic: str, *arguments: str) -> dict[str, list[Any]]:
    """What `sentinel export` says of the same: name -> points."""
    capsys.readouterr()
    assert run_cli(["export", str(run_dir), "--json", "--statistic", statistic, *arguments]) == 0
    found: dict[str, list[Any]] = {}
    for line in capsys.readouterr().out.splitlines():
        row = json.loads(line)
        found.setdefault(row["name"], []).append([row["attempt"], row["step"], row[statistic]])
    return found


@pytest.fixture
def source(tmp_path: Path) -> SyntheticRun:
    return deep_run(tmp_path / "run")


@pytest.fixture
def run(source: SyntheticRun) -> Iterator[ServedRun]:
    # A history holds the newest steps too, until it has written them.
    one = served(source.directory, DaemonConfig(history=HistoryConfig(enabled=False)))
    yield one
    one.close()


def test_recent_steps_come_from_memory(
    source: SyntheticRun, run: ServedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write(8)
    catch_up(run)
    groups = ("--aggregate", "g=*", "--aggregate", "layers.{}.*")
    expected = exported(capsys, source.directory, "norm", "--kind", "wgrad", *groups)
    monkeypatch.setattr(series_api, "recorded_views", None)

    answer = ask(run, kind="wgrad", aggregate=["g=*", "layers.{}.*"], from_="0")

    assert (answer["truncated"], answer["notes"]) == (False, [])
    assert {one["name"]: one["points"] for one in answer["series"]} == expected
    assert len(expected) == 13 and all(len(points) == 8 for points in expected.values())
    assert {(one["run"], one["kind"], one["statistic"], one["place"]) for one in answer["series"]} == {
        ("run", "wgrad", "norm", "")
    }


def test_older_steps_come_from_the_spool(source: SyntheticRun, run: ServedRun, capsys: pytest.CaptureFixture[str]) -> None:
    source.write(20)
    run.recent = RecentSteps(max_bytes=150_000)
    catch_up(run)
    num_recent = len(run.recent.steps())
    assert 1 < num_recent < 10
    expected = exported(capsys, source.directory, "kurtosis", "--name", "layers.1.*", "--kind", "wgrad,param")

    short = ask(run, name="layers.1.*", kind="wgrad,param", statistic="kurtosis")
    whole = ask(run, name="layers.1.*", kind="wgrad,param", statistic="kurtosis", from_="0")
    middle = ask(run, name="layers.1.*", kind="wgrad,param", statistic="kurtosis", from_="3", to="17")

    by_name: dict[str, list[Any]] = {}
    for one in whole["series"]:
        by_name.setdefault(one["name"], []).extend(one["points"])
    assert {name: sorted(points) for name, points in by_name.items()} == {
        name: sorted(points) for name, points in expected.items()
    }
    assert whole["notes"] == [] and not whole["truncated"]
    assert all(len(one["points"]) == num_recent for one in short["series"])
    assert f"{num_recent} steps are in memory; from=STEP reads older ones" in short["notes"][0]
    assert all([step for _, step, _ in one["points"]] == list(range(3, 18)) for one in middle["series"])


def test_the_newest_attempt_wins_in_memory_and_in_the_spool(source: SyntheticRun, run: ServedRun) -> None:
    source.write(8)
    source.restart(3, attempt=1)
    source.write(3)
    catch_up(run)
    expected = [[0, s] for s in range(3)] + [[1, s] for s in range(3, 6)] + [[0, 6], [0, 7]]

    in_memory = ask(run, kind="wgrad", aggregate="*", from_="0")
    run.recent = RecentSteps()
    in_spool = ask(run, kind="wgrad", aggregate="*", from_="0")

    assert in_memory["series"] == in_spool["series"]
    (one,) = in_memory["series"]
    assert [point[:2] for point in one["points"]] == expected


def test_a_run_that_fell_silent_is_let_go_of_and_read_from_its_spool(source: SyntheticRun, run: ServedRun) -> None:
    source.write(5)
    catch_up(run)
    before = ask(run, kind="wgrad", aggregate="*")

    run.turn(run.last_received + FORGET_S - 1)
    assert len(run.recent.steps()) == 5
    run.turn(run.last_received + FORGET_S + 1)

    assert (run.recent.steps(), run.recent.num_bytes) == ([], 0)
    assert ask(run, kind="wgrad", aggregate="*") == before
    assert len(ask(run, kind="wgrad", aggregate="*", from_="2")["series"][0]["points"]) == 3


def test_scalars_stay_what_they_were(source: SyntheticRun, run: ServedRun) -> None:
    source.write(6)
    catch_up(run)

    everything, some = ask(run), ask(run, name="loss", limit="2", run_="run")

    assert {one["name"] for one in everything["series"]} >= {"loss", "grad_norm", "lr"}
    (loss,) = some["series"]
    assert [point[:2] for point in loss["points"]] == [[0, 4], [0, 5]]
    assert (loss["kind"], loss["statistic"]) == ("scalar", "value")
    assert some["truncated"] and "limit=N" in some["notes"][0]
    run._gauges._recent.clear()
    run.recent = RecentSteps()
    (loss,) = ask(run, name="loss", from_="0")["series"]
    assert [point[:2] for point in loss["points"]] == [[0, step] for step in range(6)]


def test_steps_without_a_shard_are_named(source: SyntheticRun, run: ServedRun) -> None:
    source.write(2)
    source.write(4, skip=[1])
    catch_up(run)

    by_kind = {one["kind"]: one for one in ask(run, kind="param,activation", aggregate="*")["series"]}

    assert by_kind["activation"]["partial_steps"] == [one for _, one, _ in by_kind["activation"]["points"] if one >= 2] != []
    assert by_kind["param"]["partial_steps"] == []


def test_what_is_undefined_is_null(source: SyntheticRun, run: ServedRun) -> None:
    source.plant(Nan(step=1, module="layers.2")).write(3)
    catch_up(run)

    (nans,) = ask(run, kind="activation", name="layers.2", statistic="nans")["series"]
    scalars = ask(run, name="loss")["series"][0]["points"]

    assert [value > 0 for _, _, value in nans["points"]] == [False, True, False]
    assert all(value is None or math.isfinite(value) for _, _, value in scalars)


def test_answers_are_bounded_and_say_so(source: SyntheticRun, run: ServedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write(10)
    catch_up(run)
    monkeypatch.setattr(series_api, "MAX_SERIES", 5)

    few = ask(run, kind="wgrad")
    assert len(few["series"]) == 5 and few["truncated"] and "only the first 5 series" in few["notes"][0]

    monkeypatch.setattr(series_api, "MAX_SERIES", 1000)
    monkeypatch.setattr(series_api, "MAX_POINTS", 100)
    for is_spool in (False, True):
        if is_spool:
            run.recent = RecentSteps()
        answer = ask(run, kind="wgrad", from_="0")
        steps = [step for one in answer["series"] for _, step, _ in one["points"]]
        assert len(steps) <= 100 and answer["truncated"] and "narrow" in answer["notes"][0]
        assert max(steps) == 9 and min(steps) >= 6, "the newest are kept"


def test_the_limit_counts_the_newest_points(source: SyntheticRun, run: ServedRun) -> None:
    source.write(10)
    run.recent = RecentSteps(max_bytes=60_000)
    catch_up(run)
    assert len(run.recent.steps()) < 6

    answer = ask(run, kind="wgrad", aggregate="*", from_="0", limit="6")

    assert [step for _, step, _ in answer["series"][0]["points"]] == list(range(4, 10))
    assert answer["truncated"]
    assert ask(run, kind="wgrad", aggregate="*", limit="0")["series"] == []


def test_a_spool_that_is_read_for_too_long_is_left(
    source: SyntheticRun, run: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write(10)
    catch_up(run)
    run.recent = RecentSteps()
    monkeypatch.setattr(series_api, "READ_S", 0.0)

    answer = ask(run, kind="wgrad", aggregate="*", from_="0")

    assert answer["truncated"] and "the spool was read for 0 s; 9 steps are left out" in answer["notes"][0]


def test_a_slow_spool_neither_holds_up_judging_nor_other_answers(
    source: SyntheticRun, run: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write(3)
    catch_up(run)
    judged = run.recent
    run.recent = RecentSteps()
    reading, go_on = threading.Event(), threading.Event()
    real = series_api.recorded_views

    def slow(*args: Any, **options: Any) -> Iterator[tuple[ClosedStep, Any]]:
        reading.set()
        assert go_on.wait(240)
        yield from real(*args, **options)

    monkeypatch.setattr(series_api, "recorded_views", slow)
    monkeypatch.setattr(series_api, "WAIT_S", 0.01)
    commands = SeriesQueries()
    old = SeriesRequest.parse([("kind", "wgrad"), ("aggregate", "*"), ("from", "0")])
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(commands.answer([run], old)))
    thread.start()
    try:
        assert reading.wait(240)
        source.write(3)
        catch_up(run)
        assert run.status.metrics().judged_step == 5, "steps are judged meanwhile"
        with pytest.raises(Busy):
            commands.answer([run], old)
        assert commands.answer([run], SeriesRequest.parse([("kind", "wgrad")]))["series"], "memory is answered meanwhile"
    finally:
        go_on.set()
        thread.join(30)
    assert [step for _, step, _ in answers[0]["series"][0]["points"]] == [0, 1, 2]
    assert len(judged.steps()) == 3


@pytest.mark.slow
def test_memory_of_recent_steps_is_bounded_and_is_what_it_says(source: SyntheticRun, run: ServedRun) -> None:
    source.write(2)
    catch_up(run)
    run.recent = RecentSteps(max_bytes=800_000)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        source.write(120)
        catch_up(run)
        said, steps = run.recent.num_bytes, len(run.recent.steps())
        held, _ = tracemalloc.get_traced_memory()
        run.recent = RecentSteps()
        freed, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert steps > 20 and said <= 800_000 < 120 / steps * said
    assert held - freed == pytest.approx(said, rel=0.25)
    assert before < held


def test_a_run_whose_layout_ever_changes_keeps_few_layouts(tmp_path: Path) -> None:
    recent = RecentSteps()
    for at in range(10):
        deep_run(tmp_path / str(at), layers=2, pp=1).write(2)
        with RecordedRun(RunPaths.of(tmp_path / str(at))) as recorded:
            for view, _ in recorded.views():
                recent.add(view)

    assert len(recent.steps()) == 2 * RECENT_LAYOUTS
    assert len({id(step.layout) for step in recent.steps()}) == RECENT_LAYOUTS
    assert recent.num_bytes == sum(step.num_bytes for step in recent.steps())


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ([("names", "x")], 'unknown parameter "names"; did you mean "name"?'),
        ([("limit", "many")], 'limit must be a whole number, got "many"'),
        ([("from", "-3")], 'from must be a whole number, got "-3"'),
        ([("to", "1"), ("to", "2")], "to: expected it once, got it 2 times"),
        ([("kind", "wgrat")], 'unknown kind "wgrat"; did you mean "wgrad"?'),
        ([("kind", "wgrad"), ("statistic", "nrm")], 'unknown statistic "nrm"; did you mean "norm"?'),
        ([("aggregate", "layers.{}*")], "has no bounds"),
        ([("aggregate", "*"), ("name", "*")], "give one of them"),
        ([("aggregate", "*"), ("kind", "scalar")], "logged values are not merged"),
        ([("aggregate", f"a{at}=*") for at in range(33)], "expected at most 32, got 33"),
        ([("aggregate", "x" * 300)], "at most 256 characters"),
    ],
)
def test_a_wrong_request_says_what_was_expected(parameters: list[tuple[str, str]], what: str) -> None:
    with pytest.raises(ConfigError) as error:
        SeriesRequest.parse(parameters)
    assert what in str(error.value)


def test_a_glob_that_matches_nothing_names_what_is_near(source: SyntheticRun, run: ServedRun) -> None:
    source.write(2)
    catch_up(run)

    with pytest.raises(ConfigError, match=r'"layer.1.\*" matches no name of kind wgrad; nearest: layers.0.'):
        ask(run, kind="wgrad", aggregate="layer.1.*")
    with pytest.raises(ConfigError, match=r'"los" matches no name of kind scalar; nearest: .*loss'):
        ask(run, name="los")
    assert SeriesQueries().answer([], SeriesRequest.parse([("name", "los")]))["series"] == [], "no run, no names"


def test_over_http_with_tokens_and_json_errors(source: SyntheticRun, run: ServedRun) -> None:
    source.write(3)
    catch_up(run)
    commands = SeriesQueries()

    class OneRun:
        def series(self, request: SeriesRequest) -> dict[str, Any]:
            if request.run not in (None, "run"):
                raise UnknownRun(f'run "{request.run}": expected one that is served here')
            return commands.answer([run], request)

    def client_of(listen: str) -> TestClient:
        gate = RequestGate(HttpConfig.parse(listen, has_insecure_tokens=True), TOKENS)
        api = SimpleNamespace(questions=OneRun())
        return TestClient(make_app(api, gate), base_url="http://127.0.0.1:9464")  # type: ignore[arg-type]

    client = client_of("127.0.0.1:9464")
    path = "/api/v1/series?run=run&kind=wgrad&statistic=norm,kurtosis&aggregate=g%3D*&aggregate=layers.{}.*"
    answer = client.get(path)

    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert len(answer.json()["series"]) == 2 * 13
    assert all(len(one["points"]) == 3 for one in answer.json()["series"])
    for wrong, status, what in [
        ("/api/v1/series?run=other", 404, "expected one that is served here"),
        ("/api/v1/series?kind=wgrat", 400, 'did you mean "wgrad"?'),
        ("/api/v1/series?kind=wgrad&aggregate=nothing.*", 400, "matches no name"),
        ("/api/v1/series?aggregate=", 400, "got an empty part"),
    ]:
        refused = client.get(wrong)
        assert refused.status_code == status and what in refused.json()["error"], wrong
    assert client.get(path, headers={"Host": "evil.example"}).status_code == 421
    outside = client_of("0.0.0.0:9464")
    assert outside.get(path).status_code == 401
    assert outside.get(path, headers={"Authorization": "Bearer " + TOKENS.read}).status_code == 200
