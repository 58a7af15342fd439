"""What ranks measured and nobody judged, as a rule: told once, with counts, steps, ranks, why, and what to do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.collect.retention.worth import is_precious
from sentinel.decision import Decision
from sentinel.ingest.merge import ClosedStep
from sentinel.messages import EndStep, Health
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.run_end import RunEnd
from sentinel.testing import SyntheticRun
from sentinel.wire.frame import FrameType, encode_message

from ...support.closed_steps import FollowedRun


class Lossy:
    """A run some of whose steps lose rows, as a rank tells it, and the judge's rules."""

    def __init__(self, directory: Path, **more: int) -> None:
        self.run = SyntheticRun(directory / "run", layers=2, elements=8, **more)
        self.followed = FollowedRun(self.run.directory)
        self.engine = Engine(load_pack())
        self.found: list[Anomaly] = []

    def write(self, num_steps: int, *, lossy: tuple[int, ...] = (), is_finite: bool = True, lost_to: str = "cap") -> None:
        """Write steps; lossy: ranks that keep only what is precious."""
        for _ in range(num_steps):
            self.run.write(ranks=[rank for rank in range(self.run.num_ranks) if rank not in lossy])
            for rank in lossy:
                self._write_lossy(rank, self.run.step - 1, is_finite, lost_to)

    def _write_lossy(self, rank: int, step: int, is_finite: bool, lost_to: str) -> None:
        rows, end = self.run.observe(rank, step)
        kept = rows[is_precious(rows)]
        num_lost = len(rows) - len(kept)
        reported = msgspec.structs.replace(
            end, num_rows=len(kept), num_dropped_rows=num_lost, num_finite_dropped=num_lost * is_finite, lost_to=lost_to
        )
        one = self.run._ranks[rank]
        self.run._write_message(one, FrameType.ROWS, kept.tobytes(), step, len(kept))
        self.run._write_message(one, FrameType.END_STEP, encode_message(reported), step, 0)

    def judge(self, *, is_over: bool = False) -> list[Anomaly]:
        """Return what the rule on losses says of what was written since; others' records are in `found`."""
        views: list[ClosedStep] = self.followed.finish() if is_over else self.followed.listen()
        new = [one for view in views for one in self.engine.judge(view)]
        self.found += new
        return [one for one in new if one.rule == "rows-lost"]


@pytest.fixture
def lossy(tmp_path: Path) -> Lossy:
    return Lossy(tmp_path)


def test_a_run_that_loses_nothing_says_nothing(lossy: Lossy) -> None:
    lossy.write(60)

    assert lossy.judge(is_over=True) == []
    assert lossy.followed.assembler.losses.is_complete
    assert lossy.engine.num_rows_judged == 60 * lossy.run.rows_per_step


def test_a_daemon_that_comes_late_tells_all_that_was_lost_at_once(lossy: Lossy) -> None:
    lossy.write(5)
    lossy.write(30, lossy=(0,))
    lossy.write(5)

    (onset,) = lossy.judge()

    sent = 40 * lossy.run.rows_per_step
    assert (onset.kind, onset.rank, onset.ranks, onset.step, onset.severity) == ("health", 0, (0,), 5, Severity.WARNING)
    assert onset.value is not None and lossy.engine.num_rows_judged + onset.value == sent
    assert onset.message.startswith(f"rank 0: {onset.value:,.0f} of {30 * lossy.run.rows_per_step:,} rows of steps 5 to 34 ")
    assert "spool.max_bytes" in onset.message and "sentinel serve" in onset.message
    assert "all of them were finite" in onset.message
    assert lossy.followed.assembler.losses.num_rows == onset.value


@pytest.mark.slow
def test_a_live_loss_is_told_at_its_first_step_and_its_sum_at_its_end(lossy: Lossy) -> None:
    lossy.write(5)
    assert lossy.judge() == []
    lossy.write(1, lossy=(0,), lost_to="writer")
    (onset,) = lossy.judge()
    for _ in range(3):
        lossy.write(1, lossy=(0,), lost_to="writer")
        assert lossy.judge() == [], "told once"
    lossy.write(600)
    (end,) = lossy.judge()

    assert (onset.step, end.event, end.onset_id, end.count) == (5, "end", onset.id, 4)
    assert end.value == 4 * (onset.value or 0)
    assert f"{end.value:,.0f}" in end.message and "steps 5 to 8" in end.message


@pytest.mark.slow
def test_losses_with_pauses_between_are_one_episode(lossy: Lossy) -> None:
    reported = []
    for _ in range(8):
        lossy.write(1, lossy=(0,), lost_to="writer")
        lossy.write(50)
        reported += lossy.judge()

    assert len(reported) == 1
    assert "writer thread" in reported[0].message


def test_rows_that_may_have_held_a_nan_are_graver_and_told_again(lossy: Lossy) -> None:
    lossy.write(1, lossy=(0,), lost_to="writer")
    (mild,) = lossy.judge()
    lossy.write(1, lossy=(0,), is_finite=False, lost_to="disk")
    grave, end = lossy.judge()

    assert (mild.severity, grave.severity) == (Severity.WARNING, Severity.CRITICAL)
    assert (end.event, end.onset_id) == ("end", mild.id)
    assert "a NaN may be among" in grave.message and "make room on the disk" in grave.message


def test_whole_steps_that_are_gone_are_counted(lossy: Lossy) -> None:
    lossy.write(3)
    health = Health(
        code="steps_dropped", message="", count=7, first_step=3, step=9, num_rows=7 * lossy.run.rows_per_step, lost_to="cap"
    )
    lossy.run.report(0, health)
    lossy.run.step = 10
    lossy.write(3)

    (onset,) = lossy.judge()

    assert onset.severity is Severity.CRITICAL
    assert "7 steps whole" in onset.message and "steps 3 to 9" in onset.message
    assert lossy.engine.num_rows_judged + (onset.value or 0) == 13 * lossy.run.rows_per_step


def test_several_ranks_are_one_episode(tmp_path: Path) -> None:
    lossy = Lossy(tmp_path, dp=3)
    lossy.write(4)
    lossy.write(6, lossy=(0, 2))
    lossy.write(3)

    (onset,) = lossy.judge()

    assert (onset.rank, onset.ranks) == (None, (0, 2))
    assert onset.message.startswith("ranks 0, 2: ")


@pytest.mark.slow
# Which rows are lost is a matter of the rank alone: of its axes one stands for the others.
@pytest.mark.parametrize("shape", [{}, {"dp": 2}, *(pytest.param({one: 2}, marks=pytest.mark.long) for one in ("tp", "pp"))])
def test_what_is_left_of_steps_that_lost_rows_is_not_judged_as_the_whole(tmp_path: Path, shape: dict[str, int]) -> None:
    lossy = Lossy(tmp_path, **shape)
    lossy.write(150)
    lossy.write(60, lossy=(0,))
    lossy.write(60)
    lossy.judge(is_over=True)

    whole = Lossy(tmp_path / "whole", **shape)
    whole.write(270)
    whole.judge(is_over=True)

    assert {one.rule for one in lossy.found if one.severity is not Severity.INFO} == {"rows-lost"}
    assert {one.rule for one in whole.found if one.severity is not Severity.INFO} == set()


def test_decisions_say_what_was_lost_so_that_a_replay_does(lossy: Lossy) -> None:
    lossy.write(2)
    lossy.write(3, lossy=(0,), lost_to="writer")
    lossy.judge()

    decisions: list[Decision] = lossy.followed.decisions
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(decisions), type=list[Decision])

    assert [one.ranks[0].num_lost > 0 for one in again] == [False, False, True, True, True]
    assert [one.is_catching_up for one in again] == [False, False, True, True, False]
    assert {one.ranks[0].lost_to for one in again[2:]} == {"writer"}


def test_what_was_cut_at_a_cap_is_told_whole_in_however_small_pieces_it_is_read(lossy: Lossy, tmp_path: Path) -> None:
    at_once = Lossy(tmp_path / "at once")
    found = []
    for one in (lossy, at_once):
        for num_steps, ranks in ((3, ()), (4, (0,)), (3, ())):
            for _ in range(num_steps):
                one.write(1, lossy=ranks)
                found += lossy.judge()

    (onset,) = found
    assert [onset] == at_once.judge()
    assert [one.is_catching_up for one in lossy.followed.decisions] == [False] * 3 + [True] * 4 + [False] * 3
    assert lossy.followed.decisions == at_once.followed.decisions


def test_what_waits_to_be_told_is_told_at_the_end_of_the_run_and_not_again(lossy: Lossy) -> None:
    lossy.write(3)
    lossy.write(2, lossy=(0,))
    assert lossy.judge() == []
    restored = Engine(load_pack())
    restored.restore(lossy.engine.snapshot())
    moment = lossy.followed.assembler.tick((), 1.0)
    over = lossy.followed.assembler.tick((), 2.0, ended=RunEnd(how="goodbye"))
    former = msgspec.structs.replace(over, attempt=-1)

    for engine in (lossy.engine, restored):
        assert [one.rule for one in engine.judge_tick(moment)] == []
        assert "rows-lost" not in [one.rule for one in engine.judge_tick(former)]
        (onset,) = (one for one in engine.judge_tick(over) if one.rule == "rows-lost")
        assert onset.value == lossy.followed.assembler.losses.num_rows and "steps 3 to 4" in onset.message
        assert "rows-lost" not in [one.rule for one in engine.judge_tick(over)]


def test_where_losses_do_not_end_they_are_told_after_an_hour(lossy: Lossy) -> None:
    found = []
    for _ in range(62):
        lossy.run.clock.advance(60.0)
        lossy.write(1, lossy=(0,))
        found += lossy.judge()

    (onset,) = found
    assert "steps 0 to 60" in onset.message


@pytest.mark.slow
def test_a_restored_watch_goes_on_as_the_other_would(lossy: Lossy) -> None:
    lossy.write(3)
    lossy.write(2, lossy=(0,))
    lossy.judge()
    later = Engine(load_pack())
    later.restore(lossy.engine.snapshot())
    lossy.write(600)
    views = lossy.followed.listen()

    first, second = ([one for view in views for one in engine.judge(view)] for engine in (lossy.engine, later))

    assert [one for one in first if one.rule == "rows-lost"] == [one for one in second if one.rule == "rows-lost"] != []


def test_an_end_of_an_older_rank_says_what_it_lost(lossy: Lossy) -> None:
    rows, end = lossy.run.observe(0, 0)
    old = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(end, num_dropped_rows=9)), type=EndStep)
    one = lossy.run._ranks[0]
    lossy.run._write_message(one, FrameType.ROWS, rows.tobytes(), 0, len(rows))
    lossy.run._write_message(one, FrameType.END_STEP, encode_message(old), 0, 0)

    (onset,) = lossy.judge()

    assert (onset.value, onset.severity) == (9.0, Severity.CRITICAL)
