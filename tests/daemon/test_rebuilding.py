"""A journal that is damaged is rebuilt: nothing is deleted, nothing is found twice, and nobody is told twice."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.rebuilding import Repaired, repair, what_to_repair
from sentinel.errors import StoreError
from sentinel.judge.replay import replay
from sentinel.report.alert import RouteConfig
from sentinel.report.sinks.sink_table import NotifyConfig
from sentinel.report.sinks.webhook import WebhookConfig
from sentinel.store.journal import Journal
from sentinel.store.lock import LockHeld
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan

from ..support.results import incidents, result_bytes
from ..support.serving import NOW, catch_up, loaded_packs, served, small_run
from ..support.sink_bench import FakeSink, SinkBench

pytestmark = pytest.mark.slow

HOOK = WebhookConfig(name="hook", url="http://127.0.0.1:9/", route=RouteConfig(min_severity=Severity.INFO))
CONFIG = DaemonConfig(notify=NotifyConfig(sinks=(HOOK,)))


class Recorded:
    """A run that was judged up to step 40, to 60, and to 90, each on disk: tests work on copies.

    A NaN that is over soon, in step 10, and one that stays, in step 42.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        run = small_run(home / "run", pp=1, layers=2, micro_steps=1)
        run.plant(Nan(step=10, module="layers.0"), Nan(step=42, module="layers.1", is_skipped=False))
        written = 0
        for num_steps in (40, 60, 90):
            run.write(num_steps - written)
            written = num_steps
            judged(run.directory)
            shutil.copytree(run.directory, self._at(num_steps))
        self.result = result_bytes(self._at(90))
        self.alert_keys = alert_keys(self._at(90))

    def copy(self, directory: Path, num_steps: int) -> Path:
        """Return a copy of the run as it was judged up to a step."""
        return Path(shutil.copytree(self._at(num_steps), directory / "run"))

    def goes_on(self, run: Path, num_steps: int) -> None:
        """Have the steps up to this one be in the spool of a copy."""
        shutil.rmtree(run / "spool")
        shutil.copytree(self._at(num_steps) / "spool", run / "spool")

    def _at(self, num_steps: int) -> Path:
        return self._home / str(num_steps) / "run"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("recorded"))


def judged(run: Path) -> None:
    """Have a daemon judge what there is."""
    one = served(run, CONFIG)
    catch_up(one)
    one.close()


def journal_file(run: Path) -> Path:
    return RunPaths.of(run).journal


def repaired(run: Path, *, is_dry: bool = False) -> Repaired:
    return repair(RunPaths.of(run), CONFIG, loaded_packs(), is_dry=is_dry)


def alert_keys(run: Path) -> list[str]:
    journal = Journal(journal_file(run), read_only=True)
    try:
        query = "SELECT key FROM outbox WHERE topic = 'alert:hook' ORDER BY position"
        return [row[0] for row in journal._file.db.execute(query)]
    finally:
        journal.close()


def sent(run: Path) -> list[str]:
    """Take every message out of the outbox, as a sink would, and return the keys."""
    journal = Journal(journal_file(run))
    waiting = journal.outbox.waiting("alert:hook", 1e12, 10_000)
    journal.outbox.finish_delivery([row.position for row in waiting], "sent")
    journal.close()
    return [row.key for row in waiting]


def begun(run: Path) -> set[str]:
    """Have every message that waits have left, with no answer to it, and return their keys."""
    journal = Journal(journal_file(run))
    waiting = journal.outbox.waiting("alert:hook", 1e12, 10_000)
    journal.outbox.begin_delivery({row.position: f"{row.key}\n" for row in waiting})
    journal.close()
    return {row.key for row in waiting}


def told(run: Path) -> dict[str, bool]:
    """Send what waits; return the key of each message, and whether it says that it may have been received before."""
    journal = Journal(journal_file(run))
    bench = SinkBench(FakeSink(), journal.outbox, route=HOOK.route)
    bench.sink.name, bench.now = "hook", time.time() + 3600.0
    bench.run()
    journal.close()
    return {alert.key: alert.repeated for alerts in bench.sink.received for alert in alerts}


def flip(path: Path, offset: int, num_bytes: int = 64) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        some = file.read(num_bytes)
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in some))


def damage_header(run: Path) -> None:
    flip(journal_file(run), 0)


def damage_pages(run: Path) -> None:
    """Break the head of every fourth page, the first left alone."""
    path = journal_file(run)
    for at in range(2 * 4096, path.stat().st_size, 4 * 4096):
        flip(path, at, 32)


def remove(run: Path) -> None:
    journal_file(run).unlink()


def damage_version(run: Path) -> None:
    with closing(sqlite3.connect(journal_file(run), isolation_level=None)) as db:
        db.execute("UPDATE meta SET value = 99 WHERE key = 'schema'")


DAMAGES = [damage_header, damage_pages, remove, damage_version]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_repaired_run_goes_on_as_if_nothing_had_happened(tmp_path, recorded, damage):
    run = recorded.copy(tmp_path, 60)
    told = sent(run)
    damage(run)

    result = repaired(run)
    recorded.goes_on(run, 90)
    judged(run)

    assert result.reason
    assert result.num_steps == 60
    assert result_bytes(run) == recorded.result
    assert [*told, *sent(run)] == recorded.alert_keys
    assert what_to_repair(RunPaths.of(run)) == ""


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_daemon_says_what_to_do_and_the_damaged_journal_is_kept(tmp_path, recorded, damage):
    run = recorded.copy(tmp_path, 60)
    damage(run)
    if damage in (damage_header, damage_pages):
        recorded.goes_on(run, 90)
        with pytest.raises(StoreError, match=rf"sentinel repair {run} rebuilds it"):
            judged(run)
    before = journal_file(run).read_bytes() if journal_file(run).exists() else None

    result = repaired(run)

    aside = [Path(one) for one in result.set_aside if not one.endswith(("-wal", "-shm"))]
    assert [path.read_bytes() for path in aside] == ([] if before is None else [before])
    assert any(line.startswith("lost: ") for line in result.words)


def test_lost_writes_of_the_log_are_noticed_and_mended(tmp_path, recorded):
    run = recorded.copy(tmp_path, 90)
    # What a log leaves whose frames do not have their checksums: the journal as it was before them.
    shutil.copy(journal_file(recorded.copy(tmp_path / "before", 40)), journal_file(run))

    reason = what_to_repair(RunPaths.of(run))
    repaired(run)
    judged(run)

    assert "its newest writes are gone" in reason
    assert result_bytes(run) == recorded.result


def copied_if_there(source: str, target: str) -> str:
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)
    return target


def test_flipped_bytes_of_the_log_lose_nothing(tmp_path, recorded):
    run = recorded.copy(tmp_path, 60)
    recorded.goes_on(run, 90)
    one = served(run, CONFIG)
    catch_up(one)
    log = journal_file(run).with_name("journal.sqlite-wal")
    # The history writes on meanwhile, and gives its files their names.
    crashed = Path(shutil.copytree(run, tmp_path / "crashed" / "run", copy_function=copied_if_there))
    one.close()
    assert log.name in {path.name for path in (crashed / ".daemon").iterdir()}
    flip(crashed / ".daemon" / log.name, (crashed / ".daemon" / log.name).stat().st_size // 2)

    repaired(crashed)
    judged(crashed)

    assert result_bytes(crashed) == recorded.result


def test_what_waited_to_be_sent_waits_still(tmp_path, recorded):
    run = recorded.copy(tmp_path, 60)
    waiting = alert_keys(run)
    damage_version(run)

    result = repaired(run)

    assert waiting
    assert result.num_waiting >= len(waiting)
    assert alert_keys(run) == waiting


@pytest.mark.parametrize("has_deliveries", [True, False])
def test_what_had_left_without_an_answer_is_sent_as_a_repeat_behind_a_repair_too(tmp_path, recorded, has_deliveries):
    run = recorded.copy(tmp_path, 60)
    left = begun(run)
    if not has_deliveries:  # A journal of an earlier version.
        with closing(sqlite3.connect(journal_file(run), isolation_level=None)) as db:
            db.execute("ALTER TABLE outbox DROP COLUMN delivery")
    damage_version(run)

    repaired(run)

    found = told(run)
    assert found and set(found) <= left
    assert set(found.values()) == {True}


def test_what_had_not_left_is_no_repeat_behind_a_repair(tmp_path, recorded):
    run = recorded.copy(tmp_path, 60)
    damage_version(run)

    repaired(run)

    found = told(run)
    assert found and set(found.values()) == {False}


def test_what_the_files_lack_is_added_and_told(tmp_path, recorded):
    run = recorded.copy(tmp_path, 40)
    known = sent(run)
    recorded.goes_on(run, 90)
    remove(run)

    result = repaired(run)
    judged(run)

    assert result.num_new_anomalies > 0
    assert result_bytes(run) == recorded.result
    assert [*known, *alert_keys(run)] == recorded.alert_keys
    assert set(told(run).values()) == {True}, "what is sent of it may have been sent before"


def test_an_open_incident_that_the_spool_no_longer_explains_stays_open(tmp_path, recorded):
    run = recorded.copy(tmp_path, 60)
    before = {one.id: one for one in incidents(run)}
    still_open = [one for one in before.values() if one.state == "open"]
    known = sent(run)
    shutil.rmtree(run / "spool")
    (run / "spool").mkdir(mode=0o700)
    damage_header(run)

    result = repaired(run)
    one = served(run, CONFIG)
    catch_up(one)
    one.turn(NOW + 3600)
    one.close()

    after = {one.id: one for one in incidents(run)}
    assert len(still_open) == 1
    assert result.num_open == 1
    assert {one: incident.state for one, incident in after.items()} == {one: old.state for one, old in before.items()}
    assert after[still_open[0].id].revision == still_open[0].revision + 1
    assert "whether it goes on is not known" in after[still_open[0].id].evidence[-1]
    assert not set(alert_keys(run)) & set(known)


def test_a_dry_run_changes_nothing(tmp_path, recorded):
    run = recorded.copy(tmp_path, 60)
    damage_header(run)

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}

    before = content()

    result = repaired(run, is_dry=True)

    assert result.reason
    assert result.num_steps == 60
    assert content() == before


def test_a_whole_journal_is_left_alone(tmp_path, recorded):
    run = recorded.copy(tmp_path, 60)
    before = journal_file(run).read_bytes()

    assert repaired(run).words == ["the journal is whole: nothing to repair"]
    assert journal_file(run).read_bytes() == before


def test_it_is_refused_while_a_daemon_serves_the_run(tmp_path, recorded):
    run = recorded.copy(tmp_path, 60)
    one = served(run, CONFIG)

    with pytest.raises(LockHeld):
        repaired(run)

    one.close()


def test_a_replay_begins_behind_the_repair(tmp_path, recorded):
    run = recorded.copy(tmp_path, 60)
    remove(run)
    repaired(run)
    recorded.goes_on(run, 90)
    judged(run)

    result = replay(RunPaths.of(run), tmp_path / "replayed")

    assert result.first_difference is None
    assert (result.num_before, result.num_steps) == (60, 30)


def test_a_person_who_closed_an_incident_is_not_overruled(tmp_path, recorded):
    run = recorded.copy(tmp_path, 60)
    path = run / "incidents.jsonl"
    newest = msgspec.json.decode(path.read_bytes().splitlines()[-1])
    assert newest["state"] == "open"
    closed = newest | {"state": "closed", "revision": newest["revision"] + 1, "members": []}
    path.write_bytes(path.read_bytes() + msgspec.json.encode(closed) + b"\n")
    remove(run)

    result = repaired(run)
    recorded.goes_on(run, 90)
    judged(run)

    assert result.num_open == 0
    assert {one.id: one.state for one in incidents(run)}[newest["id"]] == "closed"
