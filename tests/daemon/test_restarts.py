"""A daemon that is restarted in the middle says what one says that was not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel.decision import Decision
from sentinel.messages import Bye
from sentinel.testing import Nan, SyntheticRun
from sentinel.wire.frame import FrameType, encode_message

from ..support.results import anomalies, decisions, result_bytes
from ..support.serving import NOW, catch_up, served, small_run

pytestmark = pytest.mark.slow


Look = Callable[[], None]


def requeued(run_dir: Path, look: Look) -> None:
    """All ranks vanish, and are started anew."""
    run = small_run(run_dir, pp=1, dp=2, layers=2)
    look()
    run.write(6)
    look()
    run.restart(run.step, attempt=1)
    look()
    run.write(6)
    look()
    run.end()
    look()


def submitted_again(run_dir: Path, look: Look) -> None:
    """A job whose launcher counts from 0 once more, after many attempts."""
    run = small_run(run_dir, pp=1, dp=2, layers=2)
    for attempt in range(1, 12):
        run.write(1)
        run.end()
        run.clock.advance(10)
        run.restart(run.step, attempt=attempt)
    look()
    run.write(1)
    run.end()
    run.clock.advance(10)
    run.restart(run.step, attempt=0)
    look()
    run.write(1)
    look()
    run.write(3)
    run.end()
    look()


def lost_peer(run_dir: Path, look: Look) -> None:
    """A rank runs out of memory, and another one, which lost it, says so first."""
    run = small_run(run_dir, pp=1, dp=3, layers=2)
    look()
    run.write(2)

    def leave(rank: int, **why: Any) -> None:
        run.clock.advance(1)
        bye = Bye(reason="exception", step=run.step - 1, **why)
        run._write_message(run._ranks[rank], FrameType.BYE, encode_message(bye), run.step - 1, 0)
        run._ranks[rank].spool.close()
        run._ranks[rank].is_dead = True

    leave(0, error="RuntimeError", message="NCCL: peer went away", is_lost_peer=True)
    run.write(1)
    look()
    leave(1, error="OutOfMemoryError", message="CUDA out of memory", is_memory=True)
    look()
    leave(2, error="RuntimeError", message="NCCL: peer went away", is_lost_peer=True)
    look()


def replaced(run_dir: Path, look: Look) -> None:
    """A rank ends, and its next process has described itself before a NaN is born in its first step."""
    run = small_run(run_dir, pp=1, dp=2, layers=2)
    run.plant(Nan(step=4, module="layers.1", rank=1, micro_step=0, phase="backward"))
    look()
    run.write(4)
    run.end(1)
    run.start(1)
    look()
    run.clock.advance(0.1)
    run.write_rank(0, 4)
    look()
    run.write_rank(1, 4)
    run.step = 5
    look()
    run.write(2)
    run.end()
    look()


def killed_at_once(run_dir: Path, look: Look) -> None:
    """A rank's first process is killed before its first step, and nobody waits for it once the next one has ended."""
    run = small_run(run_dir, pp=1, dp=2, layers=2)
    run.kill(1, in_frame=False)
    run.clock.advance(5)
    run.start(1)
    look()
    run.write(2)
    look()
    run.end(1)
    look()
    run.write(2)
    look()
    run.end()
    look()


def told(run_dir: Path, story: Callable[[Path, Look], None], restarted_at: int = -1, *, is_killed: bool = True) -> int:
    """Have a daemon watch a story, and be restarted behind one of its looks; return how many there were.

    is_killed: it leaves no snapshot of that moment.
    """
    run_dir.mkdir(parents=True)
    daemon, num_looks = served(run_dir), 0

    def look() -> None:
        nonlocal daemon, num_looks
        catch_up(daemon)
        if num_looks == restarted_at:
            if not is_killed:
                daemon.finish(NOW, is_over=False, deadline=float("inf"))
            daemon.close()
            daemon = served(run_dir)
            catch_up(daemon)
        num_looks += 1

    story(run_dir, look)
    daemon.finish(NOW, is_over=True, deadline=float("inf"))
    daemon.close()
    return num_looks


@pytest.mark.parametrize("story", [requeued, submitted_again, lost_peer, replaced, killed_at_once])
def test_a_restart_changes_nothing_of_what_is_told(tmp_path: Path, story: Callable[[Path, Look], None]) -> None:
    once = tmp_path / "once" / "run"
    for restarted_at, is_killed in itertools.product(range(told(once, story)), (True, False)):
        again = tmp_path / f"{restarted_at} {is_killed}" / "run"
        told(again, story, restarted_at, is_killed=is_killed)
        assert decisions(again) == decisions(once), (restarted_at, is_killed)
        assert result_bytes(again) == result_bytes(once), (restarted_at, is_killed)
    rules = [one.rule for one in anomalies(once)]
    if story in (requeued, submitted_again, killed_at_once):
        assert not rules
    if story is submitted_again:
        assert len(decisions(once)) == 16
    if story is lost_peer:
        assert ["memory" in one.message for one in anomalies(once)] == [True]
    if story is replaced:
        assert "non-finite" in rules
    if story is killed_at_once:
        assert [one.why for one in decisions(once) if isinstance(one, Decision)] == ["complete"] * 4


def test_a_frame_that_was_refused_is_told_of_by_who_comes_after(tmp_path: Path) -> None:
    for name in ("once", "again"):
        run_dir = tmp_path / name / "run"
        run: SyntheticRun = small_run(run_dir, pp=1, dp=2, layers=2)
        run.write(4)
        run._write_message(run._ranks[1], FrameType.HEALTH, b"\xc1", 4, 0)
        daemon = served(run_dir)
        catch_up(daemon)
        if name == "again":
            daemon.finish(NOW, is_over=False, deadline=float("inf"))
            daemon.close()
            daemon = served(run_dir)
        run.write(4)
        run.end()
        catch_up(daemon)
        daemon.finish(NOW, is_over=True, deadline=float("inf"))
        daemon.close()
        assert [one.rule for one in anomalies(run_dir)] == ["impossible-frame"], name
    assert decisions(tmp_path / "again" / "run") == decisions(tmp_path / "once" / "run")
