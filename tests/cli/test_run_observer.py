"""What `sentinel watch` reads: health of ranks, speed, losses, incidents and hot layers, and nothing that is not so."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import pytest

from sentinel.cli.recent_scalars import MAX_NAMES, RecentScalars
from sentinel.cli.run_observer import RunObserver
from sentinel.cli.run_picture import RunPicture
from sentinel.daemon.live_ranks import LIVE_S
from sentinel.ingest.processes import ProcessTable, Seen
from sentinel.messages import EndStep, Heartbeat
from sentinel.process import ProcessId
from sentinel.testing import Nan, SyntheticRun

from ..support.serving import NOW, catch_up, served, small_run


class NoProcesses(ProcessTable):
    """A table in which the ranks' processes are in one state."""

    def __init__(self, state: str = "unseen") -> None:
        self._seen = Seen(state)

    def look(self, process: ProcessId) -> Seen:
        return self._seen

    def close(self) -> None:
        pass


class Observed:
    """An observer of a run, by clocks that the test moves: that of the files is the machine's own."""

    def __init__(self, run: SyntheticRun, state: str = "unseen") -> None:
        self._run = run
        self._observer = RunObserver(run.directory, NoProcesses(state))
        self.mono = 100.0

    def after(self, seconds: float = 1.0, ahead_s: float = 0.0) -> RunPicture:
        """Look so many seconds after the last look. ahead_s: how far the wall clock is ahead of the disk's."""
        self.mono += seconds
        newest = max(file.stat().st_mtime for file in self._run.directory.rglob("*.spool"))
        return self._observer.look(newest + ahead_s, self.mono)


def health_of(picture: RunPicture) -> list[str]:
    return [one.health for one in picture.ranks]


def test_a_run_that_is_well_is_pictured_so(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(30)

    picture = Observed(run).after()

    assert (picture.state, picture.step, picture.attempt) == ("running", 29, 0)
    assert picture.steps_per_s == pytest.approx(10.0)
    assert health_of(picture) == ["alive"] * 4 and picture.num_ranks_missing == 0
    assert picture.loss is not None and picture.loss.name == "loss" and len(picture.loss.points) == 30
    assert picture.grad_norm is not None and picture.lr is not None and picture.lr.value == pytest.approx(1e-3)
    assert (picture.incidents, picture.anomalies, picture.hottest, picture.problems) == ((), (), (), ())
    assert picture.is_clean and picture.daemon is None and picture.judged_step is None


def test_each_look_adds_what_was_written_since(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(3)
    observed_run = Observed(run)
    before = observed_run.after()
    run.write(2)

    picture = observed_run.after()

    assert (before.step, picture.step) == (2, 4)
    assert picture.loss is not None and [step for step, _ in picture.loss.points] == [0, 1, 2, 3, 4]


def test_the_loss_is_the_mean_over_ranks_and_a_nan_stays_one(tmp_path: Path) -> None:
    scalars = RecentScalars()

    scalars.take(0, [EndStep(step=1, num_rows=0, num_calls=0, scalars={"loss": 2.0}), end_step(2, loss=1.0)])
    scalars.take(1, [EndStep(step=1, num_rows=0, num_calls=0, scalars={"loss": 4.0}), end_step(2, loss=math.nan)])

    found = scalars.of("loss")
    assert found is not None and found.points[0] == (1, 3.0) and math.isnan(found.value)


def end_step(step: int, **scalars: float) -> EndStep:
    return EndStep(step=step, num_rows=0, num_calls=0, scalars=scalars)


def test_a_rank_that_trains_steps_again_takes_back_what_it_said_of_them() -> None:
    scalars = RecentScalars()
    scalars.take(0, [end_step(step, loss=9.0) for step in range(6)])

    scalars.take(0, [end_step(3, loss=1.0)])

    found = scalars.of("loss")
    assert found is not None and found.points == ((0, 9.0), (1, 9.0), (2, 9.0), (3, 1.0))


def test_a_loss_is_found_by_the_name_that_its_trainer_gives_it_and_names_without_end_are_bounded() -> None:
    scalars = RecentScalars()
    scalars.take(0, [end_step(1, **{"train/loss": 2.0, "train/aux_loss": 7.0, "optim/total_grad_norm": 3.0})])

    for step in range(2, 8):
        scalars.take(0, [end_step(step, **{"train/loss": 2.0, **{f"{step}/{n}": 1.0 for n in range(MAX_NAMES // 2)}})])

    loss, norm = scalars.of("loss"), scalars.of("grad_norm")
    assert loss is not None and loss.name == "train/loss" and len(loss.points) == 7
    assert norm is not None and norm.name == "optim/total_grad_norm"
    assert scalars.of("lr") is None
    assert len(scalars._seen) <= 2 * MAX_NAMES


def test_ranks_that_are_late_silent_or_ended_are_told_apart(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(10)
    run.write(1, skip=[2])
    observed_run = Observed(run)
    one_behind = observed_run.after()
    run.write(2, skip=[2, 3])
    run.end(3)

    picture = observed_run.after()

    assert health_of(one_behind) == ["alive"] * 4
    assert health_of(picture) == ["alive", "alive", "late", "ended"]
    assert "3 steps behind" in picture.ranks[2].words and picture.ranks[3].words == "left in order (exit)"
    assert picture.state == "running"
    run.write(1, skip=[2])
    later = observed_run.after(LIVE_S + 1, ahead_s=LIVE_S + 1)
    assert health_of(later)[:3] == ["alive", "alive", "silent"]
    assert "nothing was heard for" in later.ranks[2].words


def test_a_wrong_clock_of_the_disk_makes_nobody_silent_who_writes(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(2)
    observed_run = Observed(run)
    assert set(health_of(observed_run.after(ahead_s=600.0))) == {"silent"}, "nothing else is known of it yet"
    run.write(1)
    for file in run.directory.rglob("*.spool"):
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**6))

    picture = observed_run.after(ahead_s=600.0)

    assert set(health_of(picture)) == {"alive"} and picture.quiet_s < 1.0


def test_a_rank_whose_process_is_gone_has_ended_and_so_has_a_run_of_them(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(3)

    seen = Observed(run, "gone").after(ahead_s=5.0)
    unseen = Observed(run, "unseen").after(ahead_s=5.0)
    young = Observed(run, "gone").after(ahead_s=1.0)

    assert set(health_of(seen)) == {"ended"} and seen.state == "ended" and not seen.is_clean
    assert set(health_of(unseen)) == set(health_of(young)) == {"alive"}


def test_a_run_of_which_every_rank_said_goodbye_is_over_without_a_daemon_too(tmp_path: Path) -> None:
    run = small_run(tmp_path / "well")
    run.write(3)
    run.end()
    broken = small_run(tmp_path / "broken")
    broken.write(3)
    broken.end(1, reason="exception", error="ValueError", message="no such token")
    for rank in (0, 2, 3):
        broken.end(rank)

    well, ill = Observed(run).after(), Observed(broken).after()

    assert (well.state, well.is_clean) == ("ended", True)
    assert (ill.state, ill.is_clean) == ("ended", False)
    assert "rank 1" in ill.course.lines[0] and "raised ValueError: no such token" in ill.course.lines[0]


def test_while_a_daemon_judges_a_run_is_over_when_the_daemon_says_so(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(3)
    run.end()
    one = served(run.directory)

    before = Observed(run).after()
    catch_up(one)
    one.finish(NOW, is_over=True, deadline=math.inf)
    after = Observed(run).after()
    one.close()

    assert (before.state, after.state) == ("running", "ended")


def test_ranks_that_never_began_are_missing_and_the_run_is_not_over_without_them(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", ranks=[0, 1])
    run.write(3)
    run.end(0)
    run.end(1)

    picture = Observed(run).after()

    assert picture.num_ranks_missing == 2 and picture.state == "running"


def test_a_new_attempt_takes_the_place_of_the_former(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(10)
    observed_run = Observed(run)
    observed_run.after()
    run.restart(4, attempt=1)
    run.write(2)

    picture = observed_run.after()

    assert (picture.attempt, picture.step) == (1, 5)
    assert picture.loss is not None and [step for step, _ in picture.loss.points] == [4, 5]
    assert health_of(picture) == ["alive"] * 4


def test_a_step_that_does_not_end_is_said(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(10)
    observed_run = Observed(run)
    assert observed_run.after().steps_per_s == pytest.approx(10.0)
    for rank in range(4):
        run.report(rank, Heartbeat(step=10, call_id=3, activity="train"))

    picture = observed_run.after(60.0, ahead_s=60.0)

    assert picture.steps_per_s == 0.0 and picture.quiet_s > 30


def test_the_slowest_is_who_works_longest_not_whose_step_is_long(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    observe = run.observe

    def observed(rank: int, step: int):  # type: ignore[no-untyped-def]
        rows, ended = observe(rank, step)
        return rows, msgspec.structs.replace(ended, step_time_s=1.0, wait_s=0.1 if rank == 2 else 0.7)

    run.observe = observed  # type: ignore[method-assign]
    run.write(10)

    slowest = Observed(run).after().slowest

    assert slowest[0].rank == 2
    assert [one.busy_s for one in slowest] == pytest.approx([0.9, 0.3, 0.3, 0.3])


def test_what_a_daemon_found_is_read_as_it_is_written(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.plant(Nan(step=12, module="layers.1")).write(10)
    one = served(run.directory)
    observed_run = Observed(run)
    catch_up(one)
    before = observed_run.after()
    run.write(10)
    catch_up(one)

    picture = observed_run.after()
    one.close()

    assert before.incidents == () and before.daemon is not None and before.judged_step is not None
    assert not picture.is_clean and picture.incidents[0].severity.value == "critical"
    assert "layers.1" in picture.incidents[0].title and picture.incidents[0].members == ()
    assert picture.anomalies[0].step == 12
    assert "layers.1" in {layer.name for layer in picture.hottest}
    assert all(layer.score is None for layer in picture.hottest[:1]), "a NaN is more than any number"
    assert picture.judged_step is not None and picture.judged_step > (before.judged_step or 0)


def test_layers_that_are_well_again_are_not_hot(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", kinds=("wgrad",), layers=2, d_model=8)
    run.plant(Nan(step=3, module="layers.1", is_skipped=True)).write(240)
    one = served(run.directory)
    catch_up(one)
    one.close()

    picture = Observed(run).after()

    assert picture.anomalies and picture.hottest == ()


def test_damaged_files_cost_what_is_damaged_alone(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.plant(Nan(step=5, module="layers.1")).write(10)
    one = served(run.directory)
    catch_up(one)
    one.close()
    with (run.directory / "incidents.jsonl").open("ab") as file:
        file.write(b'{"id": 3}\nnothing\n{"id":"i1","rev')
    for path in (run.directory / ".daemon").glob("journal.sqlite*"):
        path.write_bytes(b"no database at all" * 100)
    run.flip_bit(0)

    picture = Observed(run).after()

    assert picture.incidents and picture.step == 9
    assert any("journal" in one for one in picture.problems)


def test_nothing_is_written_into_the_run(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(5)
    before = {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")}

    Observed(run).after()

    assert {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")} == before
