"""A run whose node sends no rows holds up itself and no other run of the join."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sentinel.daemon import run_turns
from sentinel.daemon.daemon import Daemon, ServeOptions
from sentinel.daemon.run_turns import SharedTurns
from sentinel.errors import StoreError
from sentinel.fleet import fetched_rows
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths
from sentinel.testing import SyntheticRun

from ..support.fleet_parts import CONFIG
from ..support.results import decisions, result_bytes
from ..support.serving import judge_run, small_run
from ..support.waiting import wait_for
from .test_fetched_rows import ThinFleet

pytestmark = pytest.mark.slow


class TwoRuns:
    """The daemon of a join that serves `run`, whose rows are away, and `unaffected`, all of which is there."""

    def __init__(self, where: Path, turns: SharedTurns, drain_s: float = 30.0) -> None:
        self.fleet = ThinFleet(where)
        self.fleet.wait = turns.wait
        self.fleet.restarted()
        self.other: SyntheticRun = small_run(self.fleet.joined / "unaffected")
        self.options = ServeOptions(
            directory=self.fleet.joined, http=None, config=CONFIG, arrivals=self.fleet.copies.arrivals,
            rows_from=self.fleet.copies.rows_of, turns=turns, drain_s=drain_s,
        )  # fmt: skip
        self.sends_rows = self.is_over = False

    def speak(self) -> None:
        """Be the node until it is over."""
        while not self.is_over:
            (self.fleet.turn if self.sends_rows else self.fleet.talk)()
            time.sleep(0.01)

    def num_judged(self, run: str) -> int:
        try:
            return len(decisions(self.fleet.joined / run))
        except StoreError:  # The journal is only being made.
            return 0

    def num_reloads(self, run: str) -> int:
        """Return how often it was written down in a run that files were read again."""
        journal = Journal(RunPaths.of(self.fleet.joined / run).journal, read_only=True)
        try:
            return sum(one.action == "reload" for one in journal.audit.newest())
        finally:
            journal.close()

    def other_goes_on(self) -> None:
        """Have the other run write some steps; fails where they are not judged."""
        self.other.write(4)
        wait_for(lambda: self.num_judged("unaffected") == self.other.step)


def told(both: TwoRuns, story: Callable[[Daemon], None]) -> int:
    """Run a daemon beside its node and what happens meanwhile; return its exit code."""
    daemon = Daemon(both.options, os.environ, sys.stderr)
    both.is_over = False

    def tell() -> None:
        try:
            story(daemon)
        finally:
            daemon.stop()

    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(both.speak), threads.submit(tell)]
        try:
            code = daemon.run()
            done[1].result()
        finally:
            both.is_over = True
        done[0].result()
    return code


def assert_judged_as_alone(both: TwoRuns, where: Path) -> None:
    for run in (both.fleet.run, both.other):
        alone, joined = where / "alone" / run.directory.name, both.fleet.joined / run.directory.name
        shutil.copytree(run.directory / "spool", alone / "spool", ignore=shutil.ignore_patterns("ack"))
        judge_run(alone)
        assert result_bytes(alone) == result_bytes(joined) and decisions(alone) == decisions(joined)


@pytest.mark.parametrize("slice_s", [run_turns.SLICE_S, 0.0], ids=["turns to their end", "way given at each step"])
def test_one_run_waits_for_rows_and_the_other_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_s: float
) -> None:
    monkeypatch.setattr(fetched_rows, "STALLED_S", 200.0)
    monkeypatch.setattr(run_turns, "SLICE_S", slice_s)
    turns = SharedTurns()
    both = TwoRuns(tmp_path, turns)

    def story(daemon: Daemon) -> None:
        wait_for(lambda: both.fleet.copies.rows_of("run").num_fetched)
        for _ in range(3):
            both.other_goes_on()
        # Nor does anything wait that is done with every run.
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(lambda: both.num_reloads("unaffected"))
        both.other_goes_on()
        assert both.num_judged("run") <= 1 and turns.is_left("run") and not both.num_reloads("run")
        both.sends_rows = True
        wait_for(lambda: both.num_judged("run") == both.fleet.run.step)
        wait_for(lambda: both.num_reloads("run"))

    assert told(both, story) == 0
    assert_judged_as_alone(both, tmp_path)


def test_a_join_that_ends_while_a_run_waits_leaves_it_whole_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_rows, "STALLED_S", 200.0)
    both = TwoRuns(tmp_path, SharedTurns(), drain_s=0.3)

    def first(daemon: Daemon) -> None:
        wait_for(lambda: both.fleet.copies.rows_of("run").num_fetched)
        both.other_goes_on()

    assert told(both, first) == 0
    both.sends_rows = True

    def second(daemon: Daemon) -> None:
        wait_for(lambda: both.num_judged("run") == both.fleet.run.step)

    assert told(both, second) == 0
    assert_judged_as_alone(both, tmp_path)
