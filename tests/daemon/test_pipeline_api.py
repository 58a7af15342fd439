"""`/api/v1/pipeline`: a step as its ranks ran it, the incident on it in the causal order, and what is not known is said."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.daemon import pipeline_api
from sentinel.daemon.kept_steps import KeptSteps, LookedUpStep
from sentinel.daemon.pipeline_api import EQUAL_WIDTHS, FOLDED, NO_CALLS, NO_WAITS, PipelineQueries, PipelineRequest
from sentinel.daemon.series_api import Busy
from sentinel.daemon.serving import ServedRun
from sentinel.errors import ConfigError, NotThere
from sentinel.incident import Incident
from sentinel.testing import Nan

from ..support.hostile_run import write_hostile_run
from ..support.serving import catch_up, served, small_run

BAD = 12


def asked(**parameters: str) -> PipelineRequest:
    return PipelineRequest.parse([("run", "run"), *parameters.items()])


def opened(run: ServedRun) -> list[Incident]:
    return [msgspec.json.decode(one, type=Incident) for one in run.journal.found.newest_incidents(100)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    """Four stages under 1F1B; a NaN is born on rank 1 in micro-step 2, and goes up to the last stage and down again."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    source = small_run(run_dir, pp=4, dp=1, micro_steps=4, per_micro_step=True, schedule="1f1b")
    source.plant(Nan(step=BAD, module="layers.1.attn", micro_step=2)).write(16)
    one = served(run_dir)
    catch_up(one)
    yield one
    one.close()


@pytest.fixture(scope="module")
def incident(run: ServedRun) -> str:
    return next(one.id for one in opened(run) if "layers.1.attn" in one.title)


def answer(run: ServedRun, **parameters: str) -> dict[str, Any]:
    return PipelineQueries().answer(run, asked(**parameters), run.status.metrics().judged_step)


def test_a_step_is_drawn_as_its_schedule_ran_it(run: ServedRun) -> None:
    told = answer(run, step="5")

    assert (told["step"], told["is_recorded"], told["num_ranks"], told["num_columns"]) == (5, True, 4, 14)
    assert [one["label"] for one in told["rows"]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert told["orders_in_words"][told["rows"][3]["order"]] == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert told["orders"][told["rows"][3]["order"]][0] == ["F", 0, 0, 3]
    assert told["events"] == [] and told["way"] == []
    assert told["notes"] == [EQUAL_WIDTHS, NO_WAITS, NO_CALLS]


def test_the_incident_goes_up_the_stages_and_down_again_in_the_causal_order(run: ServedRun, incident: str) -> None:
    told = answer(run, incident=incident)
    events = told["events"]

    assert told["step"] == told["asked_step"] == BAD
    assert (events[0]["mark"], events[0]["name"], events[0]["ranks"]) == ("cause", "layers.1.attn", "rank 1")
    assert (events[0]["way"], events[0]["micro_step"], events[0]["rows"]) == ("F", 2, [1])
    first_of = {}
    for at, one in enumerate(events):
        for row in one["rows"] if one["step"] == BAD else ():
            first_of.setdefault((one["way"], row), at)
    ways = [(way, row) for way, row in sorted(first_of, key=first_of.__getitem__) if way]
    assert ways == [("F", 1), ("F", 2), ("F", 3), ("B", 3), ("B", 2), ("B", 1), ("B", 0)]
    assert "born on rank 1" in told["way"][0] and any(line.startswith("backward") for line in told["way"])
    assert sum(one["mark"] == "cause" for one in events) == 1 and told["num_events"] >= len(events)


def test_without_an_incident_what_was_found_in_the_step_is_there_and_nothing_is_called_a_cause(run: ServedRun) -> None:
    events = answer(run, step=str(BAD))["events"]

    assert events and {one["mark"] for one in events} <= {"nonfinite", "finite"} and {one["step"] for one in events} == {BAD}
    assert answer(run)["step"] == 15, "the newest"


def test_what_the_spool_no_longer_has_is_said_and_the_newest_schedule_drawn(run: ServedRun, incident: str) -> None:
    told = PipelineQueries().answer(run, asked(incident=incident, step="900"), 15)

    assert (told["asked_step"], told["step"]) == (900, 15) and len(told["rows"]) == 4
    assert told["notes"][0].startswith("Step 900 is no longer in the spool") and "step 15" in told["notes"][0]


def test_without_any_spool_the_anomalies_alone_are_drawn(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run", pp=2, dp=1, per_micro_step=True)
    source.plant(Nan(step=BAD, module="layers.1.attn", micro_step=1)).write(14)
    with_spool = served(tmp_path / "run")
    catch_up(with_spool)
    name = next(one.id for one in opened(with_spool) if "NaN" in one.title)
    for path in (tmp_path / "run" / "spool").glob("*/*.spool"):
        path.unlink()

    told = answer(with_spool, incident=name)
    with_spool.close()

    assert not told["is_recorded"] and told["events"][0]["mark"] == "cause"
    drawn = {row["label"]: told["orders_in_words"][row["order"]] for row in told["rows"]}
    assert set(drawn) == {"rank 0", "rank 1"} and "F1" in drawn["rank 0"] and "F0" not in drawn["rank 0"]
    assert NO_WAITS not in told["notes"] and "no longer in the spool" in told["notes"][0]


def test_many_ranks_share_rows_and_those_that_differ_stand_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_api, "SINGLE_RANKS", 4)
    source = small_run(tmp_path / "run", pp=2, dp=6)
    source.plant(Nan(step=10, module="layers.1.attn", rank=3)).write(12)
    run = served(tmp_path / "run")
    catch_up(run)

    told = answer(run, step="10")
    run.close()

    labels = [(one["pp_stage"], one["num_ranks"], one["label"]) for one in told["rows"]]
    assert told["num_ranks"] == 12 and sum(num for _, num, _ in labels) == 12 and len(labels) < 8
    assert labels[0] == (0, 1, "rank 3") and (0, 5, "ranks 0-2, 4, 5") in labels
    assert FOLDED in told["notes"]


def test_hostile_names_come_through_as_they_are(tmp_path: Path) -> None:
    write_hostile_run(tmp_path / "run", is_skipped=False)
    run = served(tmp_path / "run")
    catch_up(run)

    told = answer(run, step="8")
    run.close()

    assert any("<script>" in one["name"] for one in told["events"])
    msgspec.json.encode(told)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ([("run", "run"), ("stepp", "1")], 'unknown parameter "stepp"'),
        ([("run", "run"), ("step", "-1")], "step must be a whole number"),
        ([("run", "run"), ("step", "1"), ("step", "2")], "expected it once"),
        ([], "expected the name of a run"),
    ],
)
def test_a_wrong_request_is_told_what_was_expected(parameters: list[tuple[str, str]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PipelineRequest.parse(parameters)


def test_an_unknown_incident_and_a_second_question_are_refused(run: ServedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotThere, match='incident "nobody"'):
        answer(run, incident="nobody")
    monkeypatch.setattr(pipeline_api, "WAIT_S", 0.01)
    queries = PipelineQueries()

    with queries._asking, pytest.raises(Busy, match="try again"):
        queries.answer(run, asked(), 15)


def test_a_run_without_steps_has_nothing_to_draw(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    run = served(tmp_path / "run")
    catch_up(run)

    told = answer(run)
    run.close()

    assert (told["step"], told["rows"], told["events"], told["notes"]) == (None, [], [], [])


def kept_again(queries: PipelineQueries, run: ServedRun, step: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether a step is answered without a look into the spools."""
    looked_up: list[int] = []
    look_up = KeptSteps.look_up

    def counted(self: KeptSteps, run_dir: Path, step: int, goes_on: Callable[[], bool]) -> LookedUpStep:
        looked_up.append(step)
        return look_up(self, run_dir, step, goes_on)

    with monkeypatch.context() as patch:
        patch.setattr(KeptSteps, "look_up", counted)
        told = queries.answer(run, asked(step=str(step)), None)
    assert told == PipelineQueries().answer(run, asked(step=str(step)), None)
    return not looked_up


def test_a_step_is_looked_up_once_for_as_long_as_nothing_of_it_can_be_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_run(tmp_path / "run")
    source.write(5)
    with contextlib.closing(served(tmp_path / "run")) as run:
        queries = PipelineQueries()

        def is_kept(step: int) -> bool:
            return kept_again(queries, run, step, monkeypatch)

        assert [is_kept(step) for step in (3, 3, 4, 4, 5, 5)] == [False, True, False, True, False, True]
        source.write(1)
        # Of a step that all ranks had left behind nothing can come; of the newest, and of one that was not there, much.
        assert [is_kept(step) for step in (3, 4, 5)] == [True, False, False]
        source.restart(3, attempt=1)
        source.write(1)
        assert not is_kept(3)
        assert queries.answer(run, asked(step="3"), None)["attempt"] == 1
        assert [is_kept(step) for step in (3, 4)] == [True, False]
        source.write(1)
        assert [is_kept(step) for step in (3, 4)] == [False, False]
        assert queries.answer(run, asked(step="4"), None)["attempt"] == 1


def test_no_more_steps_are_kept_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.daemon.kept_steps.MOST_KEPT", 2)
    small_run(tmp_path / "run").write(5)
    kept = KeptSteps()
    for step in range(4):
        kept.look_up(tmp_path / "run", step, lambda: True)

    assert [kept.known(tmp_path / "run", step) is not None for step in range(4)] == [False, False, True, True]
    assert kept.look_up(tmp_path / "run", 3, lambda: False).num_unread == 4
    assert kept.known(tmp_path / "run", 3) is None, "what was not read whole is not kept"
