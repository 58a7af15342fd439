"""The history of a served run: every judged step once, whatever ended the daemon; and the judgement is as without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.serving import ServedRun
from sentinel.history import writer
from sentinel.history.config import HistoryConfig
from sentinel.history.questions import asking
from sentinel.judge.config import JudgingConfig
from sentinel.messages import Vectors
from sentinel.store.journal import Journal
from sentinel.testing import Nan, SyntheticRun
from sentinel.wire.frame import FrameType, encode_message

from ..history.test_vector_rows import histogram
from ..support.results import decisions, result_bytes
from ..support.serving import catch_up, judge_run, served, small_run
from ..support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("snapshots_may_take_all_the_time")]

EVERY_STEP = JudgingConfig(snapshot_interval_s=0.0)
WITH = DaemonConfig(judging=EVERY_STEP, history=HistoryConfig(enabled=True, flush_s=0.05))


class Killed(BaseException):
    """The daemon is gone, in the middle of what it did."""


def answer(run_dir: Path, query: str) -> list[Any]:
    with asking({"run": run_dir}) as connection:
        return connection.execute(query).fetchall()


def let_go(run: ServedRun) -> None:
    """End the threads of a daemon that was killed; what it would still have written is published to nobody."""
    run._history._writer._publish = lambda manifest: None
    run.close()


def test_every_judged_step_is_in_it_with_what_was_found(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run").plant(Nan(step=12, module="layers.2"))
    source.write(40)
    source.end()
    judge_run(tmp_path / "run", WITH, is_over=True)

    assert answer(tmp_path / "run", "SELECT count(*), min(step), max(step) FROM steps") == [(40, 0, 39)]
    names = answer(tmp_path / "run", "SELECT DISTINCT name FROM moments WHERE nans > 0 AND step = 12 ORDER BY name")
    assert any(name.startswith("layers.2") for (name,) in names)
    joined = (
        "SELECT DISTINCT m.name FROM moments m JOIN anomalies a ON a.tag_name = m.name AND a.step = m.step WHERE m.nans > 0"
    )
    assert answer(tmp_path / "run", joined)
    assert answer(tmp_path / "run", "SELECT count(DISTINCT id) > 0 FROM incidents") == [(True,)]


def test_anomalies_and_incidents_are_the_same_bytes_with_it_and_without(tmp_path: Path) -> None:
    found = []
    for name, config in (("with", WITH), ("without", DaemonConfig(judging=EVERY_STEP))):
        source = small_run(tmp_path / name / "run").plant(Nan(step=12, module="layers.2"))
        source.write(40)
        judge_run(tmp_path / name / "run", config, is_over=True)
        found.append(result_bytes(tmp_path / name / "run"))

    assert found[0] == found[1] and any(found[0])


@pytest.mark.parametrize(
    ("point", "after", "flushes"),
    [
        ("record", 3, True),
        ("commit", 17, True),
        ("record", 17, False),
        ("commit", 3, False),
        *(pytest.param(*one, marks=pytest.mark.long) for one in (
            ("record", 17, True), ("commit", 3, True), ("record", 3, False), ("commit", 17, False)
        )),
    ],
)  # fmt: skip
def test_a_daemon_that_is_killed_leaves_a_history_that_the_next_one_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, after: int, flushes: bool
) -> None:
    source = small_run(tmp_path / "run")
    source.write(20)
    config = WITH
    if not flushes:
        monkeypatch.setattr(writer.HistoryWriter, "flush", lambda self: None)
        config = DaemonConfig(judging=EVERY_STEP, history=HistoryConfig(enabled=True, flush_s=1000.0))
    original: Callable[..., Any] = getattr(Journal, point)
    calls = []

    def killed(self: Journal, *arguments: Any, **options: Any) -> Any:
        calls.append(point)
        if len(calls) == after:
            raise Killed
        return original(self, *arguments, **options)

    for _ in range(3):
        run = served(tmp_path / "run", config)
        with monkeypatch.context() as patched:
            patched.setattr(Journal, point, killed)
            calls.clear()
            with pytest.raises(Killed):
                for _ in range(50):
                    source.write(1)
                    catch_up(run)
        let_go(run)
    judge_run(tmp_path / "run", WITH)

    num = source.step
    assert [one.step for one in decisions(tmp_path / "run")] == list(range(num))
    for view in ("steps", "scalars WHERE name = 'loss'"):
        assert answer(tmp_path / "run", f"SELECT count(*), count(DISTINCT step), max(step) FROM {view}") == [
            (num, num, num - 1)
        ]
    assert not answer(tmp_path / "run", "SELECT series, step FROM moments GROUP BY ALL HAVING count(*) > 1")


def test_a_daemon_that_is_killed_twice_before_anything_was_published_has_all_of_it_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_run(tmp_path / "run")
    for publishes in (5, 0, 0):
        publish = writer.HistoryWriter._publish
        run = served(tmp_path / "run", WITH)
        for at in range(10):
            source.write(1)
            if at == publishes:
                monkeypatch.setattr(writer.HistoryWriter, "_publish", lambda self, manifest: None)
            catch_up(run)
            if at < publishes:
                wait_for(lambda run=run: run._history._writer.decision >= run._commits.seq)
        let_go(run)
        monkeypatch.setattr(writer.HistoryWriter, "_publish", publish)
    judge_run(tmp_path / "run", WITH)

    assert answer(tmp_path / "run", "SELECT count(*), count(DISTINCT step), max(step) FROM steps") == [(30, 30, 29)]


def test_a_history_that_cannot_be_written_is_a_problem_of_the_run_that_judges_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_file", full)
    source = small_run(tmp_path / "run").plant(Nan(step=12, module="layers.2"))
    source.write(40)
    run = served(tmp_path / "run", WITH)
    catch_up(run)
    run.finish(0.0, is_over=False, deadline=float("inf"))
    run.close()

    (problem,) = [one for one in run.status.problems() if "history" in one]
    assert "No space left on device" in problem
    assert run.status.metrics().num_steps_judged == 40


@pytest.mark.parametrize("harm", ["torn", "no directory"])
def test_a_history_that_cannot_be_read_or_made_is_said_and_the_run_is_judged(tmp_path: Path, harm: str) -> None:
    source = small_run(tmp_path / "run")
    source.write(20)
    if harm == "torn":
        (tmp_path / "run" / "history").mkdir(mode=0o700)
        (tmp_path / "run" / "history" / "manifest.json").write_text('{"version": 1, "files": [')
    else:
        (tmp_path / "run" / "history").write_text("a file of somebody")

    run = served(tmp_path / "run", WITH)
    catch_up(run)
    run.close()

    (problem,) = [one for one in run.status.problems() if "history" in one]
    assert str(tmp_path / "run" / "history") in problem
    assert run.status.metrics().num_steps_judged == 20


def test_a_reload_that_would_change_the_history_says_that_it_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_run(tmp_path / "run").write(2)
    run = served(tmp_path / "run", WITH)
    run.use(WITH)
    assert not caplog.records

    run.use(DaemonConfig(judging=EVERY_STEP))
    run.close()

    assert [one.getMessage() for one in caplog.records if "history" in one.getMessage()] == [
        f"{tmp_path / 'run' / 'history'}: the section history has changed; in force when the daemon is started anew"
    ]


def write_vectors(run: SyntheticRun, num_steps: int) -> None:
    """Each rank measures a histogram of its first tensor in each step: (its rank, the step)."""
    for _ in range(num_steps):
        for rank in range(run.num_ranks):
            message = encode_message(Vectors(items=(histogram(0, rank, run.step),)))
            run._write_message(run._ranks[rank], FrameType.VECTOR, message, run.step, 0)
        run.write(1)


def test_every_vector_of_a_judged_step_is_there_once_also_behind_restarts(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    for _ in range(4):
        write_vectors(run, 5)
        daemon = served(tmp_path / "run", WITH)
        catch_up(daemon)
        daemon.close()
    run.end()
    judge_run(tmp_path / "run", WITH, is_over=True)

    names = ["embed.weight", "embed.weight", "layers.2.norm.weight", "layers.2.norm.weight"]
    found = answer(tmp_path / "run", "SELECT name, step, rank, shape, values, edges FROM vectors ORDER BY step, rank")
    assert found == [
        (names[rank], step, rank, [2], [float(rank), float(step)], [0.0, 1.0, 2.0])
        for step in range(20) for rank in range(run.num_ranks)
    ]  # fmt: skip
