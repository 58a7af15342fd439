"""One run as it is served: rows counted, crashes survived at every point, replays identical, rules changed midway."""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.command import EnableMonitoring
from sentinel.daemon import commits
from sentinel.daemon.config import DaemonConfig, load_config
from sentinel.daemon.serving import ServedRun
from sentinel.daemon.snapshots import Acknowledgement
from sentinel.decision import Decision
from sentinel.errors import StoreError
from sentinel.incident import Incident
from sentinel.ingest import follow
from sentinel.judge.config import JudgingConfig
from sentinel.judge.judge import Judge
from sentinel.judge.replay import replay
from sentinel.messages import Health
from sentinel.report.files import AppendLog
from sentinel.report.metrics import MetricsSnapshot
from sentinel.report.prometheus_page import MetricsCollector
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths
from sentinel.testing import LossJump, Nan, SyntheticRun
from sentinel.wire.spool import read_ack

from ..support.results import decisions, result_bytes
from ..support.serving import NOW, catch_up, judge_run, loaded_packs, served, small_run, wait_for_history

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("snapshots_may_take_all_the_time")]

EVERY_STEP = DaemonConfig(judging=JudgingConfig(snapshot_interval_s=0.0))


def planted_run(directory: Path, **options: Any) -> SyntheticRun:
    return small_run(directory, **options).plant(Nan(step=12, module="layers.2"), LossJump(step=40))


def queued(run_dir: Path) -> list[tuple[str, str]]:
    journal = Journal(RunPaths.of(run_dir).journal, read_only=True)
    try:
        return list(journal._file.db.execute("SELECT topic, key FROM outbox ORDER BY position"))
    finally:
        journal.close()


def test_rows_judged_equals_rows_expected(tmp_path: Path) -> None:
    source = planted_run(tmp_path / "run")
    source.write(60)
    source.end()

    run = served(tmp_path / "run", EVERY_STEP)
    catch_up(run)

    metrics = run.status.metrics()
    assert metrics.num_records == 60 * source.rows_per_step
    assert metrics.num_steps_judged == 60
    assert [one.step for one in decisions(tmp_path / "run")] == list(range(60))
    assert not any(one.missing for one in decisions(tmp_path / "run"))
    assert run.status.describe()["num_anomalies"] > 0
    run.close()


def test_a_planted_nan_is_found_where_it_was_born(tmp_path: Path) -> None:
    source = planted_run(tmp_path / "run")
    source.write(60)
    source.end()

    judge_run(tmp_path / "run", EVERY_STEP)

    incidents = [msgspec.json.decode(line, type=Incident) for line in result_bytes(tmp_path / "run")[1].splitlines()]
    assert (incidents[0].opened_step, incidents[0].severity) == (12, Severity.CRITICAL)
    assert "layers.2" in incidents[0].root_name


def test_a_loss_that_is_nan_is_shown_as_nan(tmp_path: Path) -> None:
    small_run(tmp_path / "run").plant(Nan(step=5, module="layers.2")).write(6)
    run = served(tmp_path / "run")
    catch_up(run)
    metrics = run.status.metrics()
    run.close()

    assert math.isnan(metrics.scalars["loss"])
    scrape = MetricsCollector(lambda: MetricsSnapshot(runs=(metrics,))).render()[0].decode()
    assert 'sentinel_loss{run="run"} NaN' in scrape and 'sentinel_grad_norm{run="run"} NaN' in scrape
    assert 'aggregate="max",kind="wgrad",pp_stage="1",run="run"} NaN' in scrape, "a norm of nothing but NaN is no 0"


def test_each_decision_is_in_the_journal_before_its_step_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = planted_run(tmp_path / "run")
    source.write(20)
    run = served(tmp_path / "run", EVERY_STEP)
    kept: list[tuple[int, int]] = []
    judge = Judge.judge

    def judge_and_look(self: Judge, decision: Decision | None, view: Any) -> Any:
        kept.append((view.decision.seq, run.journal.last_seq))
        return judge(self, decision, view)

    monkeypatch.setattr(Judge, "judge", judge_and_look)
    catch_up(run)
    run.close()

    assert kept == [(seq, seq) for seq in range(1, 21)]


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the daemon runs after it."""


def abandon(run: ServedRun) -> None:
    """What the kernel does with a killed process: descriptors are closed, transactions roll back, locks go."""
    run.journal.close()
    run._lock.close()


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, nth: int, *, after: bool) -> None:
    original: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        is_now = next(calls) == nth
        if is_now and not after:
            raise Killed
        result = original(self, *arguments, **options)
        if is_now:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, wrapped)


POINTS = [
    (Journal, "record", False),
    (Journal, "record", True),
    (Journal, "commit", False),
    (Journal, "commit", True),
    (AppendLog, "append", True),
    (Acknowledgement, "advance", False),
]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A planted run that was judged without a kill; beside its folder, in `unread`, it lies as nobody has read it."""
    directory = tmp_path_factory.mktemp("golden")
    source = planted_run(directory / "golden" / "run")
    source.write(50)
    source.end()
    shutil.copytree(directory / "golden" / "run", directory / "unread" / "run")
    judge_run(directory / "golden" / "run", EVERY_STEP)
    return directory / "golden" / "run"


WITHOUT_SNAPSHOTS = [(*point, 3600.0) for point in POINTS]


@pytest.mark.parametrize(
    ("owner", "name", "after", "interval_s"),
    [
        *((*point, 0.0) for point in POINTS),
        *WITHOUT_SNAPSHOTS[:2],
        *(pytest.param(*one, marks=pytest.mark.long) for one in WITHOUT_SNAPSHOTS[2:]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_kill_at_every_point_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Path,
    owner: type,
    name: str,
    after: bool,
    interval_s: float,
) -> None:
    monkeypatch.setattr(commits, "STEPS_PER_COMMIT", 4)
    config = msgspec.structs.replace(EVERY_STEP, judging=JudgingConfig(snapshot_interval_s=interval_s))
    shutil.copytree(golden.parents[1] / "unread" / "run", tmp_path / "killed" / "run")
    num_kills = 0

    for nth in (1, 2, 3, 5, 8, 12):
        with monkeypatch.context() as patch:
            kill_at(patch, owner, name, nth, after=after)
            run = served(tmp_path / "killed" / "run", config)
            try:
                catch_up(run)
            except Killed:
                num_kills += 1
        abandon(run)
    judge_run(tmp_path / "killed" / "run", config)

    assert num_kills >= (1 if name == "advance" else 3)
    assert result_bytes(tmp_path / "killed" / "run") == result_bytes(golden)
    assert result_bytes(golden)[0]
    assert queued(tmp_path / "killed" / "run") == queued(golden)


def test_who_keeps_up_with_a_run_that_never_pauses_has_caught_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_run(tmp_path / "run")
    source.write(30)
    run = served(tmp_path / "run")

    def look() -> tuple[bool, bool]:
        source.write(1)
        return run.turn(NOW), run.has_caught_up

    with monkeypatch.context() as patch:
        for name in ("WINDOW_BYTES", "MIN_WINDOW_BYTES", "POLL_BYTES"):
            patch.setattr(follow, name, 4096)
        assert [look() for _ in range(3)] == [(True, False)] * 3, "control: much of it is not read yet"
    looks = [look() for _ in range(3)]
    num_judged = len(decisions(run.paths.run_dir))
    run.close()

    assert [has_moved for has_moved, _ in looks] == [True] * 3
    assert looks[-1][1] and num_judged >= 30


def test_a_long_turn_says_of_each_step_that_the_loop_goes_on(tmp_path: Path) -> None:
    small_run(tmp_path / "run").write(20)
    (tmp_path / "run").chmod(0o700)
    judged: list[int] = []
    run = ServedRun(RunPaths.of(tmp_path / "run"), DaemonConfig(), loaded_packs(), advanced=lambda: judged.append(1))
    run.turn(NOW)
    assert len(judged) == len(decisions(run.paths.run_dir)) >= 15
    run.close()


def test_an_end_while_decisions_are_judged_again_forgets_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Path
) -> None:
    shutil.copytree(golden.parents[1] / "unread" / "run", tmp_path / "other" / "run")
    late = msgspec.structs.replace(EVERY_STEP, judging=JudgingConfig(snapshot_interval_s=3600.0))
    monkeypatch.setattr(commits, "STEPS_PER_COMMIT", 4)
    killed = served(tmp_path / "other" / "run", late)
    catch_up(killed)
    judged = killed.journal.judged
    abandon(killed)
    assert judged >= 50

    with monkeypatch.context() as patch:
        for name in ("WINDOW_BYTES", "MIN_WINDOW_BYTES", "POLL_BYTES"):
            patch.setattr(follow, name, 4096)
        again = served(tmp_path / "other" / "run", late)
        for _ in range(3):
            again.turn(NOW)
        assert again._stages.assembler.is_replaying
        assert again.finish(NOW, is_over=False, deadline=float("inf"))
        again.close()

    journal = Journal(RunPaths.of(tmp_path / "other" / "run").journal, read_only=True)
    assert journal.judged == judged
    journal.close()
    judge_run(tmp_path / "other" / "run", EVERY_STEP)
    assert result_bytes(tmp_path / "other" / "run") == result_bytes(golden)
    assert queued(tmp_path / "other" / "run") == queued(golden)


@pytest.mark.parametrize("num_bytes", [1, 10, 500])
def test_a_line_cut_in_half_by_a_crash_is_completed(tmp_path: Path, golden: Path, num_bytes: int) -> None:
    shutil.copytree(golden, tmp_path / "run")
    whole = result_bytes(tmp_path / "run")
    file = tmp_path / "run" / "anomalies" / "000001.jsonl"
    os.truncate(file, file.stat().st_size - num_bytes)
    (tmp_path / "run" / "incidents.jsonl").unlink()

    judge_run(tmp_path / "run", EVERY_STEP)

    assert result_bytes(tmp_path / "run") == whole


def disorderly(directory: Path) -> Iterator[SyntheticRun]:
    """A run with late, missing, duplicated and reordered ranks, a crash and a resume; yields between its parts."""
    source = planted_run(directory, pp=1, dp=4)
    source.write(10)
    yield source
    source.write(1, ranks=(3, 1, 0, 2))
    source.repeat_last(1)
    source.reverse_last(2)
    source.write(2)
    yield source
    source.hold(3)
    source.write(5)
    yield source
    source.release(3)
    source.write(3)
    yield source
    source.write(3, skip=(2,))
    source.flip_bit(0)
    source.report(1, Health(code="hook_failed", message="x", count=2))
    source.write(4)
    yield source
    source.kill(0)
    source.write(4)
    yield source
    source.restart(22, attempt=1)
    source.write(25)
    yield source
    source.end(0)
    source.write(2, skip=(0,))
    source.end()
    yield source


def test_replay_is_identical(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run: ServedRun | None = None
    for number, _ in enumerate(disorderly(run_dir)):
        run = run or served(run_dir, EVERY_STEP)
        catch_up(run)
        if number % 3 == 2:
            abandon(run)
            run = None
    if run is not None:
        run.close()
    judge_run(run_dir, EVERY_STEP, is_over=True)
    made = decisions(run_dir)

    result = replay(RunPaths.of(run_dir), tmp_path / "again")

    assert {"late_steps", "complete", "superseded"} <= {one.why for one in made}
    assert any(one.blindness for one in made)
    assert len({one.attempt for one in made}) == 2
    assert (result.first_difference, result.num_incomplete) == (None, 0)
    assert result.num_steps == len(made)
    assert result_bytes(tmp_path / "again") == result_bytes(run_dir)
    assert len(result_bytes(run_dir)[0].splitlines()) > 20


def test_recompute_decides_anew(tmp_path: Path) -> None:
    for _ in disorderly(tmp_path / "run"):
        pass

    first = replay(RunPaths.of(tmp_path / "run"), tmp_path / "one", pack=loaded_packs().pack, recompute=True)
    second = replay(RunPaths.of(tmp_path / "run"), tmp_path / "two", pack=loaded_packs().pack, recompute=True)

    assert first == second
    assert first.num_anomalies > 0
    assert result_bytes(tmp_path / "one") == result_bytes(tmp_path / "two")
    with pytest.raises(StoreError, match="expected a new directory"):
        replay(RunPaths.of(tmp_path / "run"), tmp_path / "one", recompute=True)


def test_a_replay_says_what_differs(tmp_path: Path, golden: Path) -> None:
    shutil.copytree(golden, tmp_path / "run")
    (spool,) = (tmp_path / "run" / "spool").glob("r00001-*")
    shutil.rmtree(spool)

    result = replay(RunPaths.of(tmp_path / "run"), tmp_path / "again")

    assert result.num_incomplete == 50
    assert result.first_difference is not None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_reading_in_other_portions_decides_the_same(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    source = planted_run(tmp_path / "golden" / "run")
    source.write(45)
    source.end()
    shutil.copytree(tmp_path / "golden" / "run", tmp_path / "parts" / "run")
    judge_run(tmp_path / "golden" / "run", EVERY_STEP)
    # Every file grows by an uneven portion at a time, as slow writers' would.
    files = {path: path.read_bytes() for path in (tmp_path / "parts" / "run" / "spool").glob("*/*.spool")}
    for path in files:
        path.write_bytes(b"")
    run = served(tmp_path / "parts" / "run", EVERY_STEP)

    for part in range(1, 41):
        for path, data in files.items():
            jitter = rng.randint(-len(data) // 40, len(data) // 40) if part < 40 else 0
            size = max(path.stat().st_size, len(data) * part // 40 + jitter)
            path.write_bytes(data[:size])
            if rng.random() < 0.3:
                run.turn(NOW)
        run.turn(NOW)
    catch_up(run)
    run.close()

    late = [one for one in decisions(tmp_path / "parts" / "run") if one.why != "complete"]
    if not late:
        assert result_bytes(tmp_path / "parts" / "run") == result_bytes(tmp_path / "golden" / "run")
    again = replay(RunPaths.of(tmp_path / "parts" / "run"), tmp_path / "again")
    assert again.first_difference is None


def test_a_backlog_of_uneven_ranks_makes_nobody_late(tmp_path: Path) -> None:
    source = SyntheticRun(tmp_path / "run", pp=2, layers=3, d_model=16, elements=8)
    source.write(200)
    source.end()
    assert source.num_rows(0) != source.num_rows(1)

    judge_run(tmp_path / "run", DaemonConfig())

    assert {one.why for one in decisions(tmp_path / "run")} == {"complete"}
    assert len(decisions(tmp_path / "run")) == 200


RULE = """\
builtin: false
rules:
  - name: {name}
    detector: AnomalyNan
    match: {{kind: "*"}}
    severity: {severity}
"""


def test_rules_changed_midway_are_journalled_and_replayed(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(RULE.format(name="first", severity="critical"))
    rules = loaded_packs(file)
    source = planted_run(tmp_path / "run")
    source.plant(Nan(step=30, module="layers.1"))
    run = served(tmp_path / "run", EVERY_STEP, rules)
    source.write(25)
    catch_up(run)

    file.write_text(RULE.format(name="second", severity="warning"))
    assert rules.reload(NOW) == "ok"
    run.note_reload("ok", NOW)
    source.write(25)
    catch_up(run)
    file.write_text("rules: [")
    assert rules.reload(NOW) == "failed"
    run.note_reload("failed", NOW)
    source.write(5)
    catch_up(run)

    assert [entry.details["outcome"] for entry in run.journal.audit.newest()] == ["failed", "ok"]
    run.close()
    hashes = [one.pack_hash for one in decisions(tmp_path / "run")]
    assert len(set(hashes[:25])) == len(set(hashes[25:])) == 1
    assert hashes[24] != hashes[25]
    assert b'"rule":"first"' in result_bytes(tmp_path / "run")[0]
    assert b'"rule":"second"' in result_bytes(tmp_path / "run")[0]
    # A daemon that starts with yet other rules judges what was decided by the rules of the day.
    result = replay(RunPaths.of(tmp_path / "run"), tmp_path / "again")
    assert result.first_difference is None


def test_a_snapshot_that_cannot_be_read_costs_time_only(tmp_path: Path) -> None:
    source = planted_run(tmp_path / "golden" / "run")
    source.write(30)
    shutil.copytree(tmp_path / "golden" / "run", tmp_path / "other" / "run")
    for name in ("golden", "other"):
        judge_run(tmp_path / name / "run", EVERY_STEP)
    journal = Journal(RunPaths.of(tmp_path / "other" / "run").journal)
    journal._file.db.execute("UPDATE snapshots SET body = x'00'")
    journal.close()

    source.write(30)
    source.end()
    for path in (tmp_path / "golden" / "run" / "spool").glob("*/*.spool"):
        other = tmp_path / "other" / "run" / path.relative_to(tmp_path / "golden" / "run")
        other.write_bytes(path.read_bytes())
    for name in ("golden", "other"):
        judge_run(tmp_path / name / "run", EVERY_STEP)

    assert result_bytes(tmp_path / "other" / "run") == result_bytes(tmp_path / "golden" / "run")


def test_two_daemons_never_judge_one_run(tmp_path: Path) -> None:
    planted_run(tmp_path / "run").write(1)
    first = served(tmp_path / "run", EVERY_STEP)

    with pytest.raises(StoreError, match="another daemon judges it"):
        served(tmp_path / "run", EVERY_STEP)
    first.close()
    served(tmp_path / "run", EVERY_STEP).close()


def test_a_journal_elsewhere_is_remembered(tmp_path: Path) -> None:
    source = planted_run(tmp_path / "run")
    source.write(20)
    paths = RunPaths.of(tmp_path / "run", tmp_path / "state")
    run = ServedRun(paths, EVERY_STEP, loaded_packs())
    catch_up(run)
    run.close()

    assert paths.journal == tmp_path / "state" / "runs" / "run" / "journal.sqlite"
    assert RunPaths.of(tmp_path / "run") == paths
    with pytest.raises(StoreError, match="was judged with its journal in"):
        RunPaths.of(tmp_path / "run", tmp_path / "another")


def test_the_spool_is_acknowledged_behind_the_older_snapshot(tmp_path: Path) -> None:
    source = planted_run(tmp_path / "run")
    run = served(tmp_path / "run", EVERY_STEP)
    acks = []

    for _ in range(4):
        source.write(10)
        catch_up(run)
        acks.append(read_ack(source.folder(0)))
    run.close()

    assert acks[0] == (0, 0)
    assert acks == sorted(acks)
    assert acks[-1] > (0, 0)
    assert acks[-1][1] < sum(path.stat().st_size for path in source.folder(0).glob("*.spool"))


def test_old_spool_files_may_go_once_acknowledged(tmp_path: Path) -> None:
    source = planted_run(tmp_path / "run", file_bytes=100_000)
    run = served(tmp_path / "run", EVERY_STEP)
    for _ in range(6):
        source.write(10)
        wait_for_history(run)
        catch_up(run)
    abandon(run)
    for rank in range(source.num_ranks):
        folder = source.folder(rank)
        kept = read_ack(folder)[0]
        assert kept > 0
        for index in range(kept):
            (folder / f"{index:06d}.spool").unlink()

    run = served(tmp_path / "run", EVERY_STEP)
    source.write(10)
    catch_up(run)

    assert [one.step for one in decisions(tmp_path / "run")] == list(range(70))
    assert not any(one.missing for one in decisions(tmp_path / "run"))
    run.close()


def test_rubbish_in_the_spool_is_counted_and_survived(tmp_path: Path) -> None:
    source = planted_run(tmp_path / "run")
    source.write(10)
    source.flip_bit(0)
    (tmp_path / "run" / "spool" / "not-a-rank").mkdir()
    (tmp_path / "run" / "spool" / "r00009-00000000").mkdir()
    (tmp_path / "run" / "spool" / "r00009-00000000" / "000000.spool").write_bytes(os.urandom(5000))
    source.write(10)
    source.end()

    run = served(tmp_path / "run", EVERY_STEP)
    catch_up(run)

    assert run.status.metrics().frame_faults["corrupt"] >= 1
    assert run.status.metrics().judged_step == 19
    run.close()


NOTIFY = """\
notify:
  sinks:
    - {type: webhook, name: hook, url: "http://127.0.0.1:9/"}
"""


def test_alerts_are_queued_once_with_the_verdict(tmp_path: Path) -> None:
    file = tmp_path / "daemon.yaml"
    file.write_text(NOTIFY)
    config = msgspec.structs.replace(load_config(file), judging=EVERY_STEP.judging)
    source = planted_run(tmp_path / "run")
    source.write(30)
    run = served(tmp_path / "run", config)
    catch_up(run)

    assert run.take_alerts()
    abandon(run)
    judge_run(tmp_path / "run", config)
    alerts = [key for topic, key in queued(tmp_path / "run") if topic == "alert:hook"]
    assert len(alerts) == len(set(alerts)) >= 1


def test_an_alarm_escalates_while_ranks_live(tmp_path: Path) -> None:
    source = planted_run(tmp_path / "run")
    run = served(tmp_path / "run", EVERY_STEP)

    source.write(14)
    catch_up(run)
    run.turn(NOW)

    files = sorted((tmp_path / "run" / "control").glob("*.json"))
    command = msgspec.json.decode(files[0].read_bytes(), type=EnableMonitoring)
    assert len(files) == 1
    assert command.at_step > 12
    assert run.status.describe()["commands"][0]["source"] == "policy"
    abandon(run)
    again = served(tmp_path / "run", EVERY_STEP)
    again.turn(NOW)
    assert sorted((tmp_path / "run" / "control").glob("*.json")) == files
    again.close()


def test_a_full_disk_under_the_files_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = planted_run(tmp_path / "golden" / "run")
    source.write(50)
    source.end()
    shutil.copytree(tmp_path / "golden" / "run", tmp_path / "full" / "run")
    judge_run(tmp_path / "golden" / "run", EVERY_STEP)
    run = served(tmp_path / "full" / "run", EVERY_STEP)

    with monkeypatch.context() as patch:

        def refuse(fd: int, buffers: list[bytes], offset: int) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "pwritev", refuse)
        catch_up(run)
        assert any("No space left" in problem for problem in run.status.problems())
    run.turn(NOW)

    assert run.status.problems() == []
    run.close()
    assert result_bytes(tmp_path / "full" / "run") == result_bytes(tmp_path / "golden" / "run")


def test_an_end_that_is_decided_after_a_restart_is_of_the_same_moment(tmp_path: Path) -> None:
    source = small_run(tmp_path / "golden" / "run").plant(Nan(step=12, module="layers.2"))
    source.write(14)
    source.end()
    shutil.copytree(tmp_path / "golden" / "run", tmp_path / "restarted" / "run")
    judge_run(tmp_path / "golden" / "run", is_over=True)

    # The last words were read, and lie behind the snapshot, when another daemon finds that the run is over.
    judge_run(tmp_path / "restarted" / "run", EVERY_STEP)
    judge_run(tmp_path / "restarted" / "run", EVERY_STEP, is_over=True)

    ended = msgspec.json.decode(result_bytes(tmp_path / "golden" / "run")[1].splitlines()[-1], type=Incident)
    assert ended.state == "ended"
    assert result_bytes(tmp_path / "restarted" / "run") == result_bytes(tmp_path / "golden" / "run")


def test_what_is_said_to_be_found_is_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = planted_run(tmp_path / "run")
    source.write(60)
    source.end()
    run = served(tmp_path / "run")
    seen = list[tuple[int, int]]()

    def advanced() -> None:
        found, *_ = run.status.changes().found
        journal = Journal(RunPaths.of(tmp_path / "run").journal, read_only=True)
        seen.append((found, journal.found.num_onsets()))
        journal.close()

    monkeypatch.setattr(run, "_advanced", advanced)
    catch_up(run)
    said = run.status.changes().found[0]
    run.close()

    # Steps of one turn are committed together.
    assert len(seen) > 50 and said > 0 and all(one == kept for one, kept in seen)
