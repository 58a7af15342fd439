"""What happens to a run as it is served: ranks replaced, worlds of another size, steps repeated, clocks that disagree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.anomaly import Anomaly
from sentinel.daemon.config import DaemonConfig
from sentinel.judge.replay import replay
from sentinel.store.run_paths import RunPaths
from sentinel.testing import BlowUp, FakeClock, SyntheticRun
from sentinel.testing.faults import Fault
from sentinel.wire.clock import Clock

from ..support.results import decisions, result_bytes
from ..support.serving import NOW, catch_up, judge_run, served
from .test_serving import EVERY_STEP

pytestmark = pytest.mark.slow


def run_of(directory: Path, **options: Any) -> SyntheticRun:
    return SyntheticRun(directory, **{"layers": 2, "d_model": 16, "elements": 16, **options})


def found(run_dir: Path) -> list[Anomaly]:
    return [msgspec.json.decode(line, type=Anomaly) for line in result_bytes(run_dir)[0].splitlines()]


def worlds(
    directory: Path, sizes: Sequence[int], *, num_steps: int, faults: Sequence[Fault] = (), attempt: int | None = None
) -> int:
    """Write one run of one world after the other, each from where the last one was killed; returns the rows."""
    clock, num_rows = FakeClock(), 0
    for at, size in enumerate(sizes):
        source = run_of(directory, dp=size, ranks=(), first_step=at * num_steps, clock=clock, attempt=attempt)
        source.plant(*faults)
        source._num_incarnations = 100 * at
        for rank in range(size):
            source.start(rank)
        source.write(num_steps)
        num_rows += num_steps * source.rows_per_step
        if at < len(sizes) - 1:
            for rank in range(size):
                source.kill(rank)
    source.end()
    return num_rows


@pytest.mark.parametrize("attempt", [None, 0], ids=["nobody counts attempts", "the launcher counts none"])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (4, 2, 3)], ids=str)
def test_a_world_that_changes_size_goes_on(tmp_path: Path, sizes: tuple[int, ...], attempt: int | None) -> None:
    num_rows = worlds(tmp_path / "run", sizes, num_steps=12, attempt=attempt)
    run = served(tmp_path / "run", EVERY_STEP)
    catch_up(run)
    run.finish(NOW, is_over=True, deadline=float("inf"))

    decided = decisions(tmp_path / "run")
    assert [one.step for one in decided] == list(range(12 * len(sizes)))
    assert [len(one.ranks) for one in decided] == [size for size in sizes for _ in range(12)]
    assert not any(one.missing for one in decided)
    assert run.status.metrics().num_records == num_rows
    assert run.status.metrics().num_frames_duplicate == 0
    run.close()
    # The first of three worlds was silent for so long, when the last began, that it is told to be over.
    assert {(one.rule, one.attempt) for one in found(tmp_path / "run")} <= {("run-ended", 0)}
    assert replay(RunPaths.of(tmp_path / "run"), tmp_path / "again").first_difference is None


def test_baselines_survive_a_world_that_changes_size(tmp_path: Path) -> None:
    """A spike five steps into the new world is seen by what was learned in the old one: a fresh baseline is too young."""
    spike = BlowUp(step=35, module="layers.1.mlp", factor=50.0, kind="wgrad", for_steps=4)
    worlds(tmp_path / "old" / "run", (4, 2), num_steps=30, faults=[spike])
    young = run_of(tmp_path / "young" / "run", dp=2, first_step=30).plant(spike)
    young.write(30)
    young.end()
    for name in ("old", "young"):
        judge_run(tmp_path / name / "run", EVERY_STEP, is_over=True)

    assert {one.step for one in found(tmp_path / "old" / "run") if one.rule == "turbulent-norm"} & {35, 36, 37}
    assert not [one for one in found(tmp_path / "young" / "run") if one.rule == "turbulent-norm"], "the control"


def test_a_rank_that_is_replaced_loses_no_row(tmp_path: Path) -> None:
    """test_new_life_is_not_a_duplicate, as it is served: the new incarnation numbers its frames from the beginning again."""
    source = run_of(tmp_path / "run", dp=3)
    run = served(tmp_path / "run", EVERY_STEP)
    source.write(10)
    catch_up(run)
    source.kill(1)
    source.write(1, skip=(1,))
    catch_up(run)
    source.step = 10
    source.start(1)
    source.write_rank(1, 10)
    source.step = 11
    source.write(10)
    source.end()
    catch_up(run)

    assert run.status.metrics().num_records == 21 * source.rows_per_step
    assert run.status.metrics().num_frames_duplicate == 0
    run.close()
    assert not any(one.missing for one in decisions(tmp_path / "run"))
    assert found(tmp_path / "run") == []


def test_steps_repeated_after_an_older_checkpoint_are_judged_again(tmp_path: Path) -> None:
    spike = BlowUp(step=40, module="layers.1.mlp", factor=80.0, for_steps=4, kind="wgrad")
    source = run_of(tmp_path / "run", dp=2).plant(spike)
    source.write(60)
    for rank in range(2):
        source.kill(rank)
    source.restart(35, attempt=0)
    source.write(25)
    source.end()

    judge_run(tmp_path / "run", EVERY_STEP, is_over=True)

    again = [one for one in found(tmp_path / "run") if one.event == "onset" and one.step in (40, 41, 42)]
    assert {one.attempt for one in again} == {0, 1}
    assert len({one.id for one in again}) == len(again)
    decided = [(one.attempt, one.step) for one in decisions(tmp_path / "run")]
    assert decided == [(0, step) for step in range(60)] + [(1, step) for step in range(35, 60)]


class Off:
    """A rank's clock that is off, and jumps."""

    def __init__(self, clock: Clock, offsets_s: Sequence[float]) -> None:
        self._clock, self._offsets_s, self._calls = clock, offsets_s, 0

    def wall_ns(self) -> int:
        self._calls += 1
        return self._clock.wall_ns() + round(self._offsets_s[self._calls // 7 % len(self._offsets_s)] * 1e9)

    def mono_ns(self) -> int:
        return self._clock.mono_ns()


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "a backlog"])
def test_clocks_that_disagree_make_nobody_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_live: bool) -> None:
    monkeypatch.setattr("sentinel.ingest.follow.MIN_WINDOW_BYTES", 8192)
    monkeypatch.setattr("sentinel.ingest.follow.POLL_BYTES", 65536)
    source = run_of(tmp_path / "run", dp=4, ranks=())
    for rank, offsets_s in enumerate(([0.0], [7200.0], [-86400.0], [0.0, 3600.0, -3600.0])):
        source.start(rank)
        spool = source._ranks[rank].spool
        assert spool is not None
        spool._clock = Off(source.clock, offsets_s)
    run = served(tmp_path / "run", DaemonConfig()) if is_live else None
    for _ in range(60):
        source.write(1)
        if run is not None:
            catch_up(run)
    source.end()
    run = run or served(tmp_path / "run", DaemonConfig())
    catch_up(run)

    assert run.status.metrics().num_records == 60 * source.rows_per_step
    run.finish(NOW, is_over=True, deadline=float("inf"))
    run.close()
    assert {one.why for one in decisions(tmp_path / "run")} == {"complete"}
    assert [one.step for one in decisions(tmp_path / "run")] == list(range(60))
    assert found(tmp_path / "run") == []


def test_runs_of_one_directory_know_nothing_of_each_other(tmp_path: Path) -> None:
    """The same ranks, the same lives' numbers, the same steps."""
    spike = BlowUp(step=40, module="layers.1.mlp", factor=80.0, for_steps=4, kind="wgrad")
    sources = {name: run_of(tmp_path / name, dp=2) for name in ("a", "b", "c")}
    sources["b"].plant(spike)
    runs = {name: served(tmp_path / name, EVERY_STEP) for name in sources}
    for step in range(60):
        for name, source in sources.items():
            if name != "c" or step < 20:
                source.write(1)
                catch_up(runs[name])
    for name, run in runs.items():
        assert run.status.metrics().num_records == (20 if name == "c" else 60) * sources[name].rows_per_step
        run.close()

    assert found(tmp_path / "a") == found(tmp_path / "c") == []
    assert {one.run for one in found(tmp_path / "b")} == {"b"}
