"""The mirrors of a served run: TensorBoard reads every judged step once, and judging is as it is without one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sentinel.cli.main import CLEAN, FOUND, run_cli
from sentinel.daemon.config import DaemonConfig, load_config
from sentinel.errors import ConfigError
from sentinel.judge.config import JudgingConfig
from sentinel.mirrors.mirror import Mirror, MirrorParts
from sentinel.mirrors.mirror_select import MirrorSelect, TensorSeries
from sentinel.mirrors.tensorboard_mirror import TensorBoardConfig
from sentinel.testing import Nan

from ..support.hostile_run import write_hostile_run
from ..support.results import anomalies, result_bytes
from ..support.serving import catch_up, judge_run, served, small_run
from ..support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("snapshots_may_take_all_the_time")]

SELECT = MirrorSelect(flush_s=0.05, tensors=(TensorSeries(kinds=("wgrad",), statistics=("norm",)),))
EVERY_STEP = JudgingConfig(snapshot_interval_s=0.0)
WITH = DaemonConfig(judging=EVERY_STEP, mirrors=(TensorBoardConfig(select=SELECT),))


def shown(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def steps_of(found: EventAccumulator, tag: str = "loss") -> list[int]:
    return [one.step for one in found.Scalars(tag)]


def test_tensorboard_shows_each_judged_step_and_what_was_found(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    source = small_run(run_dir).plant(Nan(step=12, module="layers.2"))
    source.write(40)
    source.end()
    judge_run(run_dir, WITH, is_over=True)

    found = shown(run_dir)

    for tag in ("loss", "grad_norm", "lr", "step_time_s", "wgrad/layers.2.mlp.weight/norm"):
        assert set(steps_of(found, tag)) >= set(range(40)) - {12} and len(steps_of(found, tag)) <= 40, tag
    onsets = [one for one in anomalies(run_dir) if one.event == "onset" and one.severity.level > 0]
    assert sum(one.value for one in found.Scalars("anomalies/onsets")) == len(onsets) > 0
    assert {one.step for one in found.Scalars("anomalies/onsets")} == {12}
    told = [one.tensor_proto.string_val[0].decode() for one in found.Tensors("incidents/text")]
    assert "**opened** (critical, open): NaN born in layers.2" in told[0]


def test_a_healthy_run_tells_of_nothing(tmp_path: Path) -> None:
    small_run(tmp_path / "run").write(20)
    judge_run(tmp_path / "run", WITH)

    assert steps_of(shown(tmp_path / "run")) == list(range(20))
    assert not [tag for tag in shown(tmp_path / "run").Tags()["tensors"] if tag.endswith("/text")]


def test_anomalies_and_incidents_are_the_same_bytes_with_it_and_without(tmp_path: Path) -> None:
    found = []
    for name, config in (("with", WITH), ("without", DaemonConfig(judging=EVERY_STEP))):
        source = small_run(tmp_path / name / "run").plant(Nan(step=12, module="layers.2"))
        source.write(20)
        judge_run(tmp_path / name / "run", config, is_over=True)
        found.append(result_bytes(tmp_path / name / "run"))

    assert found[0] == found[1] and any(found[0])


def test_daemons_that_follow_each_other_repeat_nothing_and_leave_nothing_out(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    source = small_run(run_dir).plant(Nan(step=7, module="layers.2"))
    for _ in range(4):
        source.write(5)
        run = served(run_dir, WITH)
        catch_up(run)
        run.close()

    found = shown(run_dir)
    assert steps_of(found) == list(range(20))
    assert sum(one.value for one in found.Scalars("anomalies/onsets")) == sum(
        one.event == "onset" and one.severity.level > 0 for one in anomalies(run_dir)
    )


def test_what_a_killed_daemon_had_written_and_not_remembered_is_not_there_twice(tmp_path: Path) -> None:
    run_dir, seldom = tmp_path / "run", DaemonConfig(judging=JudgingConfig(snapshot_interval_s=1e6), mirrors=WITH.mirrors)
    position = run_dir / ".daemon" / "mirrors" / "tensorboard.json"
    source = small_run(run_dir)
    run = served(run_dir, seldom)
    source.write(5)
    catch_up(run)
    wait_for(lambda: run.mirrors.counts["tensorboard"].num_steps == 5)
    shutil.copy(position, tmp_path / "position")
    source.write(5)
    catch_up(run)
    run.close()
    # As if it had been killed between the write and the note of it, in the middle of the next one.
    shutil.copy(tmp_path / "position", position)
    with next((run_dir / "tensorboard").iterdir()).open("ab") as file:
        file.write(b"\x10\x00\x00")

    source.write(5)
    judge_run(run_dir, seldom)

    assert steps_of(shown(run_dir)) == list(range(15))


def test_a_run_that_is_resumed_from_an_earlier_step_is_shown_as_it_went_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    source = small_run(run_dir)
    source.write(10)
    source.restart(6, attempt=1)
    source.write(6)
    source.end()
    judge_run(run_dir, WITH, is_over=True)

    assert steps_of(shown(run_dir)) == list(range(12))


def test_names_that_others_made_reach_no_terminal_and_no_page(tmp_path: Path) -> None:
    write_hostile_run(tmp_path / "run")
    judge_run(tmp_path / "run", WITH, is_over=True)

    found = shown(tmp_path / "run")
    tags = found.Tags()
    told = [one.tensor_proto.string_val[0].decode() for tag in tags["tensors"] for one in found.Tensors(tag)]
    assert any("owned" in tag for tag in tags["scalars"]) and any("owned" in text for text in told)
    assert all(tag.isprintable() for tag in tags["scalars"])
    assert all("<script" not in text and text.replace("\n", "").isprintable() for text in told)


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a mirror of another package that does not answer, or cannot be built."""

    name: str = "slow"
    select: MirrorSelect = SELECT
    builds: Callable[[], Mirror]

    def problem(self, environ: Mapping[str, str]) -> str:
        return ""

    def build(self, parts: MirrorParts) -> Mirror:
        return self.builds()


def test_a_mirror_that_hangs_or_fails_is_a_problem_of_the_run_that_is_judged_and_of_no_other_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sentinel.mirrors.mirror_worker.STUCK_S", 0.0)
    monkeypatch.setattr("sentinel.mirrors.mirror_worker.CLOSE_S", 1.0)

    def fail() -> Mirror:
        raise RuntimeError("no such account")

    hangs, fails = Foreign(builds=lambda: time.sleep(60)), Foreign(name="broken", builds=fail)  # type: ignore[arg-type, return-value]
    small_run(tmp_path / "run").write(20)
    run = served(tmp_path / "run", msgspec.structs.replace(WITH, mirrors=(hangs, fails, *WITH.mirrors)))
    catch_up(run)
    wait_for(lambda: len(run.status.problems()) >= 2)

    problems = run.status.problems()
    assert problems[0].startswith("mirror slow has not answered for")
    assert problems[1].startswith("mirror broken: RuntimeError: no such account")
    assert run.status.metrics().num_steps_judged == 20
    described = run.status.describe()["mirrors"]
    assert described["slow"]["num_waiting"] == 20 and described["broken"]["num_failures"] >= 1
    run.close()
    assert steps_of(shown(tmp_path / "run")) == list(range(20))


def test_the_section_is_read_with_all_that_can_be_said(tmp_path: Path) -> None:
    path = tmp_path / "daemon.yaml"
    path.write_text(
        "mirrors:\n"
        "- type: tensorboard\n"
        "  select: {max_series: 10, severity: info, tensors: [{kinds: [wgrad], statistics: [norm]}]}\n"
        "- {type: tensorboard, name: team, directory: /srv/tensorboard}\n",
    )

    first, second = load_config(path).mirrors

    assert (first.name, first.select.max_series, first.select.severity.value) == ("tensorboard", 10, "info")
    assert first.select.tensors[0].names == ("*",)
    assert (second.name, second.directory) == ("team", "/srv/tensorboard")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("- type: tensorbord\n", '2: mirrors[0].type: expected one of tensorboard, '),
        ("- type: slack\n", '2: mirrors[0].type: expected one of tensorboard, '),
        ("- type: tensorboard\n  dir: x\n", '3: mirrors[0]: unknown key "dir"'),
        ("- type: tensorboard\n- type: tensorboard\n", "mirrors: expected every name once, got 'tensorboard' 2 times"),
        ("- {type: tensorboard, name: ../x}\n", "mirrors: expected a name of letters, digits"),
        ("- {type: tensorboard, name: ..}\n", "mirrors: expected a name of letters, digits"),
        ("- type: tensorboard\n  select:\n    max_series: 0\n", "select.max_series must be at least 1, got 0"),
        ("- {type: otlp, endpoint: 'collector:4318'}\n", "mirrors.otlp.endpoint must be an http or https address"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_section_is_told_by_line(lines: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "daemon.yaml"
    path.write_text(f"mirrors:\n{lines}")

    with pytest.raises(ConfigError) as error:
        load_config(path)

    assert str(error.value).startswith(f"{path}:") and says in str(error.value)


def test_a_checked_configuration_says_which_library_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "daemon.yaml"
    path.write_text("mirrors:\n- type: tensorboard\n")
    assert run_cli(["check-config", str(path)]) == CLEAN

    monkeypatch.setattr("sentinel.mirrors.lacking_library.find_spec", lambda module: None)

    assert run_cli(["check-config", str(path)]) == FOUND
    words = "mirrors.tensorboard: tensorboard is not installed; pip install 'sentinel[tensorboard]'"
    assert f"{path}:2: {words}" in capsys.readouterr().out


def test_a_reload_that_would_change_the_mirrors_says_that_it_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_run(tmp_path / "run").write(2)
    run = served(tmp_path / "run", WITH)
    run.use(WITH)
    assert not caplog.records

    run.use(DaemonConfig(judging=EVERY_STEP))
    run.close()

    said = [one.getMessage() for one in caplog.records if "mirrors" in one.getMessage()]
    assert said == ["run run: the section mirrors has changed; in force when the daemon is started anew"]
