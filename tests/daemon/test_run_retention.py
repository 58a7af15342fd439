"""What a daemon keeps of a long run: bounded, with the evidence of what is open, and replayed from where it begins."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.serving import ServedRun
from sentinel.decision import decode_decision
from sentinel.incident import Incident
from sentinel.judge.config import JudgingConfig
from sentinel.judge.packs import RulePacks
from sentinel.judge.recorded import RecordedRun
from sentinel.judge.replay import replay
from sentinel.report.files import AppendLog
from sentinel.store.journal import Journal
from sentinel.store.retention import DAY_S, RetentionConfig
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan, SyntheticRun

from ..support.results import result_bytes
from ..support.serving import NOW, catch_up, judge_run, served, small_run, wait_for_history

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("snapshots_may_take_all_the_time")]

TWO_DAYS = DaemonConfig(
    judging=JudgingConfig(snapshot_interval_s=0.0), retention=RetentionConfig(age_days=2.0, incidents_bytes=2**16)
)


def a_run(directory: Path) -> SyntheticRun:
    """A NaN that is over soon, and later a NaN that stays."""
    run = small_run(directory, pp=1, layers=2, micro_steps=1)
    return run.plant(Nan(step=10, module="layers.0"), Nan(step=62, module="layers.1", is_skipped=False))


def days(run: SyntheticRun, one: ServedRun, first: int, last: int) -> None:
    """Have 20 steps come each day, and the daemon look at them."""
    for day in range(first, last):
        run.write(20)
        wait_for_history(one)
        catch_up(one, NOW + day * DAY_S)
        for _ in range(3):
            one.turn(NOW + day * DAY_S)


def undisturbed(directory: Path, num_steps: int) -> Path:
    run = a_run(directory / "undisturbed" / "run")
    run.write(num_steps)
    judge_run(run.directory)
    return run.directory


def journal_of(run: SyntheticRun) -> Journal:
    return Journal(RunPaths.of(run.directory).journal, read_only=True)


def test_a_journal_keeps_between_half_its_age_and_all_of_it(tmp_path):
    run = a_run(tmp_path / "run")
    one = served(run.directory, TWO_DAYS)

    days(run, one, 0, 6)
    journal = journal_of(run)
    kept = [seq for seq, _, _ in journal.decisions()]

    assert 20 <= len(kept) < 3 * 20 + 5
    assert kept[-1] == journal.last_seq
    assert journal.num_steps == 120
    assert len(list(journal.snapshots())) <= 4
    journal.close()
    one.close()


def test_a_replay_of_what_is_left_is_identical_byte_for_byte(tmp_path):
    run = a_run(tmp_path / "run")
    one = served(run.directory, TWO_DAYS)
    days(run, one, 0, 4)
    one.close()

    result = replay(RunPaths.of(run.directory), tmp_path / "replayed")

    assert result.first_difference is None
    assert result.num_before > 0
    assert 20 <= result.num_steps < 65
    assert result.num_revisions > 0
    replayed, written = result_bytes(tmp_path / "replayed"), result_bytes(run.directory)
    assert written[0].endswith(replayed[0])
    assert written[1].endswith(replayed[1])


def test_a_restart_behind_the_cut_loses_and_doubles_nothing(tmp_path):
    run = a_run(tmp_path / "run")
    for day in range(6):
        one = served(run.directory, TWO_DAYS)
        days(run, one, day, day + 1)
        one.close()

    ours, theirs = result_bytes(run.directory), result_bytes(undisturbed(tmp_path, 120))

    assert ours[0] == theirs[0]
    # Of incidents, those that were over and too old went with all their revisions.
    assert theirs[1].endswith(ours[1])


def test_rules_go_with_the_last_decision_that_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr("sentinel.daemon.kept_packs.DECISIONS_PER_TURN", 7)
    run, rules = a_run(tmp_path / "run"), tmp_path / "rules.yaml"
    hashes = []
    for day in range(8):
        # A day of rules of its own, but for the last, whose rules are those of the first day again.
        rules.write_text(f"rules: [{{name: non-finite, description: day {day % 7}}}]")
        packs = RulePacks([rules])
        packs.load()
        hashes.append(packs.pack_hash)
        one = served(run.directory, TWO_DAYS, packs)
        days(run, one, day, day + 1)
        for _ in range(40):
            one.turn(NOW + day * DAY_S)
        one.close()

    journal = journal_of(run)
    named = {decode_decision(kind, body).pack_hash for _, kind, body in journal.decisions()}
    assert 2 <= len(named) < 5
    assert hashes[0] == hashes[7] in journal.pack_hashes() == named
    journal.close()
    assert replay(RunPaths.of(run.directory), tmp_path / "replayed").first_difference is None


def test_the_evidence_of_an_open_incident_stays(tmp_path):
    run = a_run(tmp_path / "run")
    one = served(run.directory, TWO_DAYS)

    days(run, one, 0, 8)
    journal = journal_of(run)
    lines = [msgspec.json.decode(body, type=Incident) for _, body in journal.found.bodies("incidents")]
    still_open = [line for line in lines if line.state == "open"]
    kept = {msgspec.json.decode(body)["id"] for _, body in journal.found.bodies("anomalies")}

    assert still_open
    assert still_open[0].revision == 1
    assert still_open[0].opened_step == 62
    assert {still_open[0].root, *still_open[0].members} <= kept
    assert journal.cut.seq > 80
    assert [msgspec.json.encode(line) for line in lines] == [
        msgspec.json.encode(msgspec.json.decode(line, type=Incident)) for line in result_bytes(run.directory)[1].splitlines()
    ]
    journal.close()
    one.close()


def test_old_anomaly_files_go_whole_and_those_with_evidence_stay(tmp_path, monkeypatch):
    # A file for each anomaly, those of what is over first.
    monkeypatch.setattr(AppendLog.__init__, "__kwdefaults__", {"file_bytes": 1, "max_pending_bytes": 2**20})
    run = a_run(tmp_path / "run")
    one = served(run.directory, TWO_DAYS)
    days(run, one, 0, 1)
    of_what_is_over = set(_dated(run))
    days(run, one, 1, 4)
    of_what_is_open = [path for path, step in _dated(run).items() if step == 62]

    days(run, one, 4, 8)
    left = set((run.directory / "anomalies").iterdir())

    assert of_what_is_over
    assert not of_what_is_over & left
    assert len(of_what_is_open) > 3
    assert left.issuperset(of_what_is_open)
    one.close()


def _dated(run: SyntheticRun) -> dict[Path, int]:
    """Return the step of each file with one anomaly, and date them all on the first day."""
    files = list((run.directory / "anomalies").iterdir())
    for path in files:
        os.utime(path, (NOW, NOW))
    return {path: msgspec.json.decode(path.read_bytes())["step"] for path in files}


def test_steps_behind_the_cut_are_there_for_whoever_reads_the_recording(tmp_path):
    run = a_run(tmp_path / "run")
    one = served(run.directory, TWO_DAYS)
    days(run, one, 0, 5)
    one.close()

    with RecordedRun(RunPaths.of(run.directory)) as recorded:
        steps = [view.step for view, _ in recorded.views()]

    assert steps[-1] == 99
    assert steps == list(range(steps[0], 100))
    assert steps[0] > 0
