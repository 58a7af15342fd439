"""A daemon that is restarted in the middle says what one says that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.testing import SyntheticRun
from sentinel.wire.frame import FrameType

from ..support.results import anomalies, decisions, result_bytes
from ..support.serving import NOW, catch_up, served, small_run

pytestmark = pytest.mark.slow


def requeued(run_dir: Path, restarted_at: frozenset[str]) -> None:
    """Judge a run of which all ranks vanish and are started anew; restarted_at: the daemon is, behind these."""
    run = small_run(run_dir, dp=2, layers=2)
    daemon = served(run_dir)

    def behind(what: str) -> None:
        nonlocal daemon
        catch_up(daemon)
        if what in restarted_at:
            daemon.close()
            daemon = served(run_dir)
            catch_up(daemon)

    behind("begin")
    run.write(6)
    behind("first steps")
    run.restart(run.step, attempt=1)
    behind("requeue")
    run.write(6)
    behind("later steps")
    run.end()
    catch_up(daemon)
    daemon.finish(NOW, is_over=True, deadline=float("inf"))
    daemon.close()


@pytest.mark.parametrize("restarted_at", ["first steps", "requeue", "later steps"])
def test_beside_a_requeue_nothing_false_is_said_of_ranks_that_vanished(tmp_path: Path, restarted_at: str) -> None:
    requeued(tmp_path / "once" / "run", frozenset())
    requeued(tmp_path / "again" / "run", frozenset({restarted_at}))
    assert decisions(tmp_path / "again" / "run") == decisions(tmp_path / "once" / "run")
    assert result_bytes(tmp_path / "again" / "run") == result_bytes(tmp_path / "once" / "run")
    assert not anomalies(tmp_path / "again" / "run")


def test_a_frame_that_was_refused_is_told_of_by_who_comes_after(tmp_path: Path) -> None:
    for name in ("once", "again"):
        run_dir = tmp_path / name / "run"
        run: SyntheticRun = small_run(run_dir, dp=2, layers=2)
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
