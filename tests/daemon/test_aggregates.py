"""Rules on groups in the daemon: crashes and replays change nothing of what they say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sentinel.anomaly import Anomaly
from sentinel.daemon.config import DaemonConfig
from sentinel.judge.config import JudgingConfig
from sentinel.judge.replay import replay
from sentinel.store.run_paths import RunPaths
from sentinel.testing import BlowUp, Nan, SyntheticRun

from ..support.results import result_bytes
from ..support.serving import catch_up, loaded_packs, served

PACK = """
builtin: false
rules:
  - name: whole
    detector: AnomalyTurbulence
    match: {kind: [wgrad, activation], aggregate: {model: "*"}, statistic: [norm, kurtosis]}
    severity: critical
  - name: layers
    detector: AnomalyTurbulence
    match: {kind: [wgrad, activation, dgrad], aggregate: "layers.{}.*", statistic: norm}
    severity: warning
  - name: bad
    detector: AnomalyNan
    match: {kind: activation, aggregate: ["layers.{}", "layers.{}.*"]}
"""


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "pack.yaml"
    path.write_text(PACK)
    return path


def write(run_dir: Path) -> None:
    """A run with a fault, a NaN, a rank that is late for a while, and one that is missing."""
    source = SyntheticRun(run_dir, pp=2, dp=2, layers=4, d_model=16, elements=8)
    source.plant(BlowUp(step=40, module="layers.1"), Nan(step=62, module="layers.2"))
    source.write(50)
    source.write(4, skip=[1])
    source.hold(3)
    source.write(6)
    source.release(3)
    source.write(20)
    source.end()


@pytest.mark.slow
def test_crashes_and_replays_change_nothing(tmp_path: Path, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.daemon.snapshots.SNAPSHOT_SHARE", float("inf"))
    monkeypatch.setattr("sentinel.daemon.commits.STEPS_PER_COMMIT", 7)
    for name in ("calm", "crashing"):
        write(tmp_path / name / "run")
    calm = served(tmp_path / "calm" / "run", packs=loaded_packs(pack))
    catch_up(calm)
    calm.close()

    num_crashes = 0
    for crash in range(6):
        # A snapshot after every commit, or none but the first: then all is judged again.
        config = DaemonConfig(judging=JudgingConfig(snapshot_interval_s=0.0 if crash % 2 else 1e9))
        run = served(tmp_path / "crashing" / "run", config, loaded_packs(pack))
        commits = []
        real = run.journal.commit

        def commit(*args: object, commits: list[int] = commits, real: object = real, **more: object) -> None:
            commits.append(1)
            if len(commits) == 3:
                raise KeyboardInterrupt
            real(*args, **more)  # type: ignore[operator]

        monkeypatch.setattr(run.journal, "commit", commit)
        try:
            catch_up(run)
        except KeyboardInterrupt:
            num_crashes += 1
        run.close()
    run = served(tmp_path / "crashing" / "run", packs=loaded_packs(pack))
    catch_up(run)
    run.close()
    assert num_crashes > 2

    expected = result_bytes(tmp_path / "calm" / "run")[0]
    assert result_bytes(tmp_path / "crashing" / "run")[0] == expected
    result = replay(RunPaths.of(tmp_path / "calm" / "run"), tmp_path / "replayed")
    assert result.first_difference is None and result.num_anomalies == len(expected.splitlines())
    found = [msgspec.json.decode(line, type=Anomaly) for line in expected.splitlines()]
    assert {one.rule for one in found} == {"whole", "layers", "bad"}
    assert all(one.num_members for one in found if one.event == "onset")
    assert {one.tag_name for one in found if one.rule == "bad" and one.step == 62} >= {"layers.2"}


def test_a_rule_that_is_blind_is_said_in_health(tmp_path: Path, pack: Path) -> None:
    """Under tensor parallelism nobody may merge activations that have no placement."""
    for tp in (1, 2):
        source = SyntheticRun(tmp_path / f"tp{tp}", tp=tp, layers=2, d_model=16, elements=8)
        for rank in range(source.num_ranks):
            table = source._ranks[rank].table
            unknown = tuple(
                msgspec.structs.replace(one, placements={"tp": "unknown"}) if one.kind == "activation" else one
                for one in table.descriptor.tensors
            )
            table.descriptor = msgspec.structs.replace(table.descriptor, tensors=unknown)
            source.start(rank)
        source.write(2)
        run = served(tmp_path / f"tp{tp}", packs=loaded_packs(pack))
        catch_up(run)

        said = [problem for problem in run.status.problems() if problem.startswith("rule ")]
        assert len(said) == (3 if tp == 2 else 0)
        assert all("activation" in problem and "no known placement" in problem for problem in said)
        run.close()
