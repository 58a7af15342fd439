"""What the daemon measures of its own work, on a run that it serves."""

from __future__ import annotations

from pathlib import Path

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.meters import DaemonMeters
from sentinel.daemon.serving import ServedRun
from sentinel.store.run_paths import RunPaths

from ..support.serving import catch_up, loaded_packs, small_run


def test_each_stage_counts_what_it_did_and_each_step_its_lag_once(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run")
    source.write(6)
    source.end()
    source.directory.chmod(0o700)
    meters = DaemonMeters()

    run = ServedRun(RunPaths.of(source.directory), DaemonConfig(), loaded_packs(), meters)
    catch_up(run)
    run.close()
    first = meters.judge_lag.read().cumulative[-1]
    again = ServedRun(RunPaths.of(source.directory), DaemonConfig(), loaded_packs(), meters)
    catch_up(again)
    again.close()

    stages = meters.stages.read()
    assert first == meters.judge_lag.read().cumulative[-1] == 6
    assert stages["follow"][1] >= 6 * 4
    assert stages["judge"][1] >= 6 and stages["commit"][1] >= 6 and stages["assemble"][1] >= 6
    assert all(seconds > 0 for stage, (seconds, _) in stages.items() if stage != "notify")


def test_where_a_run_trains_is_what_its_lowest_rank_says(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run")
    source.write(2)
    source.directory.chmod(0o700)

    run = ServedRun(RunPaths.of(source.directory), DaemonConfig(), loaded_packs())
    catch_up(run)
    metrics = run.status.metrics()
    [said] = {one.descriptor.environment.get("host", "") for one in run._stages.follower.incarnations.values()}
    run.close()

    assert metrics.host == said


def test_free_space_is_looked_at_now_and_then_and_a_disk_that_is_gone_has_none(tmp_path: Path) -> None:
    meters = DaemonMeters()

    meters.look_at_disks({"state": tmp_path, "runs": tmp_path / "gone"})
    first = meters.disks
    meters.look_at_disks({"state": tmp_path})

    assert first.keys() == {"state"} and 0 < first["state"][0] <= first["state"][1]
    assert meters.disks is first
