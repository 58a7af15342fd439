"""A history as it is written: each step once at any instant, whatever kills the writer, and within its bounds."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sentinel.errors import StoreError
from sentinel.history import compaction, history_files, writer
from sentinel.history.config import HistoryConfig
from sentinel.history.found_rows import FoundRows
from sentinel.history.manifest import GRACE_S, MANIFEST, read_manifest
from sentinel.history.questions import asking
from sentinel.history.writer import HistoryWriter

from ..support.merged_steps import FlatLayout, merged_step
from ..support.waiting import wait_for

LAYOUT = FlatLayout(3)
QUICK = HistoryConfig(enabled=True, flush_s=0.05)


@contextmanager
def writing(
    run: Path,
    config: HistoryConfig = QUICK,
    after: int = 0,
    clock: Callable[[], float] = lambda: 1e9,
    journal: Path | None = None,
) -> Iterator[HistoryWriter]:
    found = None if journal is None else FoundRows(journal)
    one = HistoryWriter(run / "history", config, after=after, found=found, clock=clock)
    try:
        yield one
    finally:
        one.close()


def write(one: HistoryWriter, first: int, last: int, *, at_once: int = 5) -> None:
    """Have decisions first to last written, `at_once` to a file."""
    for seq in range(first, last + 1):
        one.take(merged_step(LAYOUT, seq, num_nan=7 if seq == 20 else 0))
        if seq % at_once == 0 or seq == last:
            one.flush()
            wait_for(lambda seq=seq: one.decision >= seq, interval_s=0.001)


def answer(run: Path, query: str) -> list[tuple]:
    with asking({"run": run}) as connection:
        return connection.execute(query).fetchall()


def test_what_is_written_is_asked_in_sql(tmp_path: Path) -> None:
    with writing(tmp_path) as one:
        write(one, 1, 100)

    assert answer(tmp_path, "SELECT count(*), count(DISTINCT step), min(step), max(step) FROM moments") == [
        (300, 100, 0, 99)
    ]
    assert answer(tmp_path, "SELECT name, step, nans FROM moments WHERE nans > 0") == [("layers.0.weight", 19, 7)]
    assert answer(tmp_path, "SELECT count(*), min(value), max(value) FROM scalars WHERE name = 'loss'") == [(100, 2.0, 2.0)]
    for width in (16, 256, 4096):
        assert answer(tmp_path, f"SELECT sum(num_steps), sum(nans), sum(bad_steps) FROM moments_{width}") == [(400, 7, 1)]
    step = merged_step(LAYOUT, 50)
    (norm,) = answer(tmp_path, "SELECT norm FROM moments WHERE step = 49 AND name = 'layers.1.weight'")[0]
    squares = step.stats["m2"][1] + 1000 * step.stats["mean"][1] ** 2
    assert norm == pytest.approx(squares**0.5, rel=1e-6)


@pytest.mark.slow
def test_files_are_merged_and_a_row_takes_at_most_25_bytes(tmp_path: Path) -> None:
    wide = FlatLayout(200)
    with writing(tmp_path) as one:
        for seq in range(1, 641):
            one.take(merged_step(wide, seq))
            if seq % 10 == 0:
                one.flush()
                wait_for(lambda seq=seq: one.decision >= seq, interval_s=0.001)

    manifest = read_manifest(tmp_path / "history")
    moments = manifest.of("moments")
    assert len(moments) < 2 * compaction.FAN
    assert sum(one.rows for one in moments) == 640 * 201
    assert sum(one.bytes for one in moments) < 25 * 640 * 201


@pytest.mark.slow
def test_a_reader_sees_each_step_once_at_any_instant_and_a_kill_anywhere_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is copied before and behind each file and each manifest that is written: so a kill there would leave it."""
    run, copies = tmp_path / "run", []

    def copying(function):
        def copied(*arguments, **options):
            for moment in ("before", "behind"):
                if moment == "behind":
                    made = function(*arguments, **options)
                copies.append(tmp_path / f"killed{len(copies)}")
                shutil.copytree(run, copies[-1])
            return made

        return copied

    (run / "history").mkdir(parents=True, mode=0o700)
    run.chmod(0o700)
    for module, name in ((writer, "write_file"), (compaction, "write_file"), (writer, "publish"), (writer, "sweep")):
        monkeypatch.setattr(module, name, copying(getattr(module, name)))
    with writing(run) as one:
        write(one, 1, 45)
    monkeypatch.undo()
    everything = "SELECT * FROM moments ORDER BY series, step"
    expected = answer(run, everything)

    assert len(copies) > 60
    for copy in copies[::5]:
        decision = read_manifest(copy / "history").decision
        for view, num in (("moments", 3 * decision), ("scalars", decision), ("steps", decision)):
            assert answer(copy, f"SELECT count(*), count(DISTINCT step) FROM {view}") == [(num, decision)]
        assert answer(copy, "SELECT coalesce(sum(num_steps), 0) FROM moments_256") == [(4 * decision,)]
    for copy in copies[:: len(copies) // 5]:
        with writing(copy) as again:
            write(again, 1, 45)
        assert answer(copy, everything) == expected
        named = {MANIFEST, read_manifest(copy / "history").series}
        manifest = read_manifest(copy / "history")
        named |= {one.name for one in (*manifest.files, *manifest.retired)}
        assert {one.name for one in (copy / "history").iterdir()} == named


def test_a_step_that_a_later_attempt_repeats_counts_once(tmp_path: Path) -> None:
    with writing(tmp_path) as one:
        for seq in range(1, 31):
            one.take(merged_step(LAYOUT, seq, attempt=0, step=seq))
        for seq in range(31, 51):
            one.take(merged_step(LAYOUT, seq, attempt=1, step=seq - 10))

    found = answer(tmp_path, "SELECT attempt, count(*), min(step), max(step) FROM steps GROUP BY 1 ORDER BY 1")
    assert found == [(0, 20, 1, 20), (1, 20, 21, 40)]
    assert answer(tmp_path, "SELECT sum(num_steps) FROM moments_16 WHERE kind = 'scalar'") == [(40,)]


@pytest.mark.slow
def test_bytes_are_bounded_and_the_coarsest_buckets_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = FlatLayout(300)
    limit = 2**20
    now = [1e9]
    with writing(tmp_path, HistoryConfig(enabled=True, flush_s=0.05, bytes=limit), clock=lambda: now[0]) as one:
        for seq in range(1, 641):
            one.take(merged_step(wide, seq))
            if seq % 10 == 0:
                now[0] += GRACE_S
                one.flush()
                wait_for(lambda seq=seq: one.decision >= seq, interval_s=0.001)

    manifest = read_manifest(tmp_path / "history")
    young = sum(one.bytes for one in manifest.of("moments") if one.level == 0)
    assert manifest.num_bytes <= limit + young
    on_disk = sum(one.stat().st_size for one in (tmp_path / "history").glob("*.parquet"))
    assert on_disk < 3 * limit, "what no manifest names any longer is deleted"
    assert answer(tmp_path, "SELECT sum(num_steps) FROM moments_4096 WHERE kind = 'wgrad'") == [(300 * 640,)]


def test_a_full_disk_is_said_holds_nobody_up_and_is_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETRY_S", 0.05)
    written = history_files.write_file

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with writing(tmp_path) as one:
        write(one, 1, 10)
        monkeypatch.setattr(writer, "write_file", full)
        for seq in range(11, 31):
            one.take(merged_step(LAYOUT, seq))
        one.flush()
        wait_for(lambda: one.problem)
        assert "No space left on device" in one.problem and str(tmp_path) in one.problem
        assert one.decision == 30, "snapshots are not held back by a disk that is full"
        monkeypatch.setattr(writer, "write_file", written)
        wait_for(lambda: not one.problem)

    assert answer(tmp_path, "SELECT count(*), count(DISTINCT step) FROM steps") == [(30, 30)]
    assert read_manifest(tmp_path / "history").missing == 0


def test_a_defect_of_its_own_is_said_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST_WAITING", 20)
    monkeypatch.setattr(writer, "moments_rows", lambda *_: {}["nothing"])
    with writing(tmp_path) as one:
        for seq in range(1, 101):
            one.take(merged_step(LAYOUT, seq))
        wait_for(lambda: one.problem)

        assert "KeyError" in one.problem and str(tmp_path) in one.problem
        assert one.decision == 100


def test_steps_for_which_there_was_never_room_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST_WAITING", 20)
    monkeypatch.setattr(writer, "RETRY_S", 0.05)
    written = history_files.write_file
    with writing(tmp_path) as one:
        monkeypatch.setattr(writer, "write_file", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        one.take(merged_step(LAYOUT, 1))
        one.flush()
        wait_for(lambda: one.problem)
        for seq in range(2, 101):
            one.take(merged_step(LAYOUT, seq))
        monkeypatch.setattr(writer, "write_file", written)
        wait_for(lambda: not one.problem)

    manifest = read_manifest(tmp_path / "history")
    assert answer(tmp_path, "SELECT max(step), count(*) FROM steps") == [(99, 100 - manifest.missing)]
    assert one.num_missing == manifest.missing >= 90 and one.num_bytes == manifest.num_bytes


def test_what_nobody_can_give_again_is_counted_as_missing(tmp_path: Path) -> None:
    with writing(tmp_path) as one:
        write(one, 1, 10)

    with writing(tmp_path, after=15) as one:
        write(one, 16, 20)

    assert read_manifest(tmp_path / "history").missing == 5
    assert answer(tmp_path, "SELECT count(*) FROM steps") == [(15,)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "expected a manifest"),
        ('{"version": 9}', "expected version 1, got 9"),
        ('{"series": "../x"}', "expected names of files"),
    ],
)
def test_a_manifest_that_is_none_is_said(tmp_path: Path, text: str, words: str) -> None:
    folder = tmp_path / "history"
    folder.mkdir()
    (folder / MANIFEST).write_text(text)

    with pytest.raises(StoreError, match=words):
        read_manifest(folder)
