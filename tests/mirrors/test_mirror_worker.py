"""The thread of a mirror: each step once and in order, whatever the mirror does; and nobody waits for it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.mirrors import mirror_worker
from sentinel.mirrors.mirror import MirrorBatch, MirrorError, MirrorParts
from sentinel.mirrors.mirror_select import MirrorSelect
from sentinel.mirrors.mirror_worker import MirrorWorker
from sentinel.report.files import anomaly_line, json_line
from sentinel.store.found import FoundAnomaly, FoundIncident
from sentinel.store.journal import Commit, Journal

from ..support.anomalies import a_nan, an_excursion, an_incident
from ..support.merged_steps import FlatLayout, merged_step
from ..support.waiting import wait_for

LAYOUT, LAYOUT_OF_NONE = FlatLayout(3), merged_step(FlatLayout(0), 1)
QUICK = MirrorSelect(flush_s=0.05)


class Place:
    """Where a mirror writes; behaves as a test says."""

    def __init__(self) -> None:
        self.batches: list[MirrorBatch] = []
        self.marks: list[str] = []
        self.ends: list[bool] = []
        self.trouble: Callable[[], None] = lambda: None

    @property
    def steps(self) -> list[int]:
        return [one.step for batch in self.batches for one in batch.steps]

    @property
    def incidents(self) -> list[tuple[str, int, str]]:
        return [(one.incident.id, one.incident.revision, one.change) for batch in self.batches for one in batch.incidents]


class Hanging(Place):
    """One whose first write takes until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.is_there = threading.Event(), threading.Event()
        self.trouble = self._hang

    def _hang(self) -> None:
        self.is_there.set()
        self.go_on.wait(30.0)


class PlaceConfig(msgspec.Struct, frozen=True, kw_only=True):
    place: Any
    name: str = "place"
    select: MirrorSelect = QUICK

    def problem(self, environ: Mapping[str, str]) -> str:
        return ""

    def build(self, parts: MirrorParts) -> PlaceMirror:
        self.place.marks.append(parts.mark)
        return PlaceMirror(self.place)


class PlaceMirror:
    def __init__(self, place: Place) -> None:
        self.place = place

    def write(self, batch: MirrorBatch) -> str:
        self.place.trouble()
        self.place.batches.append(batch)
        return f"batch {len(self.place.batches)}"

    def close(self, *, is_over: bool) -> None:
        self.place.ends.append(is_over)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(tmp_path / "state" / "journal.sqlite")) as opened:
        yield opened


@pytest.fixture
def start(tmp_path: Path, journal: Journal) -> Iterator[Callable[..., MirrorWorker]]:
    """Starts the worker of a place; all of them end with the test."""
    workers: list[MirrorWorker] = []

    def started(place: Place, select: MirrorSelect = QUICK, after: int = 0) -> MirrorWorker:
        parts = MirrorParts(run="run", key="", run_dir=tmp_path, mark="")
        config = PlaceConfig(place=place, select=select)
        workers.append(MirrorWorker(config, parts, journal, tmp_path / "state/mirrors/place.json", after=after))
        return workers[-1]

    yield started
    for one in workers:
        one.close()


def give(worker: MirrorWorker, *seqs: int) -> None:
    for seq in seqs:
        worker.take(merged_step(LAYOUT, seq), 0.5)


def find(journal: Journal, *found: Any) -> None:
    """Commit anomalies and incidents."""
    commit = Commit(judged=0)
    for one in found:
        if hasattr(one, "revision"):
            commit.incidents.append((1, FoundIncident(id=one.id, revision=one.revision, body=json_line(one))))
        else:
            body = anomaly_line(one)
            commit.anomalies.append(
                (1, FoundAnomaly(id=one.id, attempt=0, step=one.step, severity=one.severity.value, body=body))
            )
    journal.commit(commit)


def test_each_step_is_written_once_over_restarts_and_what_is_given_again_is_left(
    start: Callable[..., MirrorWorker],
) -> None:
    place = Place()
    first = start(place)
    give(first, 1, 2, 3)
    first.close()
    second = start(place, after=1)
    give(second, 2, 3, 4, 5, 5)
    second.close()

    assert place.steps == [0, 1, 2, 3, 4]
    assert place.marks == ["", f"batch {len(place.batches) - 1}"], "the second is built with what the first said"
    assert (first.counts.num_steps, second.counts.num_steps, second.counts.num_dropped) == (3, 2, 0)


def test_steps_that_nobody_gives_again_are_counted(start: Callable[..., MirrorWorker], journal: Journal) -> None:
    place = Place()
    first = start(place)
    give(first, 1)
    first.close()
    journal.record([(1, "step", b""), (2, "step", b""), (3, "tick", b""), (4, "step", b"")])
    second = start(place, after=4)
    give(second, 5)
    second.close()

    assert place.steps == [0, 4]
    assert second.counts.num_dropped == 2, "the steps of decisions 2 and 4"


def test_only_every_so_many_steps_where_that_is_asked_for(start: Callable[..., MirrorWorker]) -> None:
    place = Place()
    worker = start(place, MirrorSelect(step_interval=3, flush_s=0.05))
    give(worker, *range(1, 9))
    worker.close()

    assert place.steps == [0, 3, 6]


def test_what_is_found_is_written_once_by_its_severity_with_what_is_new_in_it(
    start: Callable[..., MirrorWorker], journal: Journal
) -> None:
    find(journal, a_nan(step=1), an_incident(9))
    place = Place()
    first = start(place)
    find(
        journal, a_nan(step=2), a_nan(step=2, event="end", rank=1), an_excursion(step=3, severity=Severity.INFO),
        an_incident(1, severity=Severity.INFO), an_incident(1, revision=2), an_incident(2),
    )  # fmt: skip
    give(first, 1)
    first.close()
    find(journal, an_incident(1, revision=3), an_incident(2, revision=2, state="resolved"))
    second = start(place)
    give(second, 2)
    second.close()

    assert [one.step for batch in place.batches for one in batch.anomalies] == [2], "one from before, one end, one info"
    assert place.incidents == [
        ("i1", 2, "opened"), ("i2", 1, "opened"), ("i1", 3, "changed"), ("i2", 2, "closed"),
    ]  # fmt: skip


def test_a_mirror_that_fails_is_tried_again_and_said_once(
    start: Callable[..., MirrorWorker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror_worker, "RETRY_S", 0.01)
    monkeypatch.setattr(mirror_worker, "MOST_RETRY_S", 0.02)
    place, failures = Place(), 3

    def refuse() -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise MirrorError("the collector is away") if failures else SystemExit(1)

    place.trouble = refuse
    with caplog.at_level(logging.INFO, "sentinel.mirrors"):
        worker = start(place)
        give(worker, 1, 2)
        wait_for(lambda: worker.problem == "mirror place: the collector is away" or place.steps)
        wait_for(lambda: place.steps)
        give(worker, 3)
        wait_for(lambda: len(place.steps) == 3)

    assert place.steps == [0, 1, 2]
    assert worker.counts.num_failures == 3 and worker.counts.num_dropped == 0
    assert worker.problem == ""
    said = [one.getMessage() for one in caplog.records]
    assert said[0] == "mirror place of run run: the collector is away; tried again"
    assert said[1].startswith("mirror place of run run: SystemExit: 1") and said[-1].endswith("is written again")
    assert len(said) == 3, "the same words once"


def test_a_mirror_that_hangs_holds_up_nobody_and_the_oldest_steps_go_counted(
    start: Callable[..., MirrorWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_worker, "MOST_WAITING", 10)
    monkeypatch.setattr(mirror_worker, "CLOSE_S", 0.1)
    place = Hanging()
    worker = start(place)
    give(worker, 1)
    place.is_there.wait(30.0)
    give(worker, *range(2, 32))

    assert worker.counts.num_dropped == 20 and worker.counts.num_waiting == 11
    monkeypatch.setattr(mirror_worker, "STUCK_S", 0.0)
    assert worker.problem.startswith("mirror place has not answered for")
    worker.close()
    place.go_on.set()
    wait_for(lambda: len(place.steps) == 11)
    assert place.steps == [0, *range(21, 31)]


def test_what_was_not_written_by_the_end_is_said(
    start: Callable[..., MirrorWorker], caplog: pytest.LogCaptureFixture
) -> None:
    place = Place()

    def refuse() -> None:
        raise MirrorError("the collector is away")

    place.trouble = refuse
    worker = start(place)
    give(worker, 1, 2)
    worker.close()

    assert caplog.records[-1].getMessage() == "mirror place of run run: 2 steps were not written by the end"


def test_the_memory_of_waiting_steps_is_bounded(start: Callable[..., MirrorWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    size = replace(merged_step(LAYOUT, 1), index=LAYOUT_OF_NONE.index, stats=LAYOUT_OF_NONE.stats).num_bytes
    monkeypatch.setattr(mirror_worker, "WAITING_BYTES", 7 * size)
    place = Hanging()
    worker = start(place)
    give(worker, 1)
    place.is_there.wait(30.0)
    give(worker, *range(2, 41))

    assert (worker.counts.num_waiting, worker.counts.num_dropped) == (1 + 7, 32)
    place.go_on.set()


def test_an_end_of_the_run_is_told_once_and_a_run_that_goes_on_begins_anew(start: Callable[..., MirrorWorker]) -> None:
    place = Place()
    worker = start(place)
    give(worker, 1)
    worker.end()
    wait_for(lambda: place.ends)
    worker.end()
    give(worker, 2)
    worker.close()

    assert place.ends == [True, False]
    assert place.steps == [0, 1] and place.marks == ["", "batch 1"]


def test_an_end_that_fails_is_tried_again(start: Callable[..., MirrorWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_worker, "RETRY_S", 0.01)
    place = Place()
    original, failures = PlaceMirror.close, [True, True]

    def close(self: PlaceMirror, *, is_over: bool) -> None:
        if is_over and failures:
            failures.pop()
            raise MirrorError("the artifact is not taken")
        original(self, is_over=is_over)

    monkeypatch.setattr(PlaceMirror, "close", close)
    worker = start(place)
    give(worker, 1)
    worker.end()
    wait_for(lambda: True in place.ends)

    assert worker.counts.num_failures == 2 and place.steps == [0]
    assert place.marks == ["", "batch 1", "batch 1"]


@pytest.mark.parametrize("harm", ["torn", "of another journal", "a directory"])
def test_a_position_that_cannot_be_used_repeats_nothing(
    start: Callable[..., MirrorWorker], journal: Journal, tmp_path: Path, harm: str
) -> None:
    place = Place()
    find(journal, a_nan(step=1))
    path = tmp_path / "state/mirrors/place.json"
    path.parent.mkdir()
    if harm == "a directory":
        path.mkdir()
    else:
        path.write_text('{"journal": "' + ('x"}' if harm == "of another journal" else ""))
    worker = start(place, after=5)
    give(worker, 3, 6)
    worker.end()
    wait_for(lambda: place.steps)

    assert place.steps == [5]
    assert not [one for batch in place.batches for one in batch.anomalies]
