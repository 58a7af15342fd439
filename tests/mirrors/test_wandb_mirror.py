"""Offline runs of Weights & Biases, read back by W&B's own messages and by our importer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.anomaly import Severity
from sentinel.logs.log_file import read_log
from sentinel.logs.rows import Rows
from sentinel.logs.wandb_file import _records
from sentinel.mirrors.mirror import MirrorBatch, MirroredIncident, MirroredStep, MirrorParts
from sentinel.mirrors.wandb_mirror import WandbConfig

from ..support.anomalies import a_nan, an_incident
from ..support.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _one_service() -> Iterator[None]:
    """W&B's own process is started once, and ends with these tests."""
    wandb = pytest.importorskip("wandb")
    yield
    wandb.teardown()


def parts(run_dir: Path, mark: str = "") -> MirrorParts:
    return MirrorParts(run="run-7", key="0123456789abcdef0123", run_dir=run_dir, mark=mark, labels={"team": "a"})


def steps(*numbers: int, attempt: int = 0, loss: float = 2.0) -> list[MirroredStep]:
    values = (("loss", loss), ("_own", 1.0), ("step", 5.0), ("grad norm/\u00e9", 3.0))
    return [MirroredStep(attempt=attempt, step=one, time=1e9 + one, values=values) for one in numbers]


def records(run_dir: Path) -> list[Any]:
    """Return the records of all files of the run, the oldest file first, as W&B's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    return [Record.FromString(one) for file in files for one in _records(Rows(file, "wandb"), file.open("rb"))]


def history(run_dir: Path) -> list[dict[str, Any]]:
    found = [one.history for one in records(run_dir) if one.WhichOneof("record_type") == "history"]
    return [{one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in row.item} for row in found]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that two daemons mirrored, and that is over."""
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "anomalies").mkdir()
    (run_dir / "anomalies" / "000000.jsonl").write_text("{}\n")
    (run_dir / "incidents.jsonl").write_text("{}\n")
    reason = "suspected data: replica 0 alone <!channel> \x1b[31m"
    incident = an_incident(3, severity=Severity.CRITICAL, evidence=(reason, "suspected data: to do: skip it"))
    first = WandbConfig().build(parts(run_dir))
    mark = first.write(
        MirrorBatch(
            steps=steps(0, 1, 2, loss=math.nan), anomalies=[a_nan(step=1), a_nan(step=1, rank=1)],
            incidents=[MirroredIncident(change="opened", incident=incident)],
        )
    )  # fmt: skip
    first.close(is_over=False)
    second = WandbConfig(alerts=False).build(parts(run_dir, mark))
    changed = [MirroredIncident(change=change, incident=incident) for change in ("opened", "closed")]
    assert second.write(MirrorBatch(steps=steps(1, 2, 3, attempt=1), incidents=changed)) == "0123456789abcdef 7"
    second.close(is_over=True)
    # W&B's process writes the last records behind the answer that the run has ended.
    wait_for(lambda: sum(one.WhichOneof("record_type") == "exit" for one in records(run_dir)) == 2)
    return run_dir


def test_each_step_is_a_row_with_its_step_and_attempt_and_rows_are_numbered_over_restarts(run_dir: Path) -> None:
    rows = [one for one in history(run_dir) if "loss" in one]

    assert [(one["attempt"], one["step"]) for one in rows] == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]
    assert [one["_step"] for one in history(run_dir)] == [0, 1, 2, 3, 4, 5, 6]
    assert [math.isnan(one["loss"]) for one in rows] == [True] * 3 + [False] * 3
    assert rows[0]["logged_own"] == 1.0 and rows[0]["loggedstep"] == 5.0 and rows[0]["grad norm/\u00e9"] == 3.0


def test_anomalies_are_counted_at_their_step_and_an_incident_is_an_alert_once(run_dir: Path) -> None:
    assert next(one for one in history(run_dir) if "anomalies/onsets" in one).items() >= {
        "anomalies/onsets": 2, "anomalies/step": 1,
    }.items()  # fmt: skip
    (alert,) = [one.alert for one in records(run_dir) if one.WhichOneof("record_type") == "alert"]
    assert (alert.title, alert.level, alert.wait_duration) == ("run-7: NaN in blocks.3", "ERROR", 1)
    assert alert.text.splitlines()[0] == "steps 7 to 7, suspected: unknown"
    assert alert.text.splitlines()[1] == "replica 0 alone <!channel> \\u001b[31m" and "to do: skip it" in alert.text


def test_what_was_found_is_an_artifact_of_a_run_that_is_over_and_nothing_of_the_daemon_is_there(run_dir: Path) -> None:
    (artifact,) = [one.artifact for one in records(run_dir) if one.WhichOneof("record_type") == "artifact"]
    first, second = [one.run for one in records(run_dir) if one.WhichOneof("record_type") == "run"]

    assert (artifact.type, artifact.name) == ("anomalies", "anomalies-0123456789abcdef")
    assert {one.path for one in artifact.manifest.contents} == {"anomalies/000000.jsonl", "incidents.jsonl"}
    assert first.run_id == second.run_id == "0123456789abcdef" and first.display_name == "run-7"
    assert "team" in str(first.config)
    kinds = {one.WhichOneof("record_type") for one in records(run_dir)}
    assert not kinds & {"output", "output_raw", "stats", "environment"}
    assert not [*run_dir.rglob("requirements.txt"), *run_dir.rglob("*.patch")]


def test_our_importer_reads_what_the_mirror_wrote(run_dir: Path) -> None:
    first = sorted(run_dir.glob("wandb/offline-run-*"))[0]

    log = read_log(first)

    assert log.steps[:3].tolist() == [0, 1, 2] and log.present["loss"].sum() == 3


def test_a_key_of_an_online_run_is_looked_for_and_never_told(tmp_path: Path) -> None:
    online, offline = WandbConfig(mode="online"), WandbConfig()
    nowhere = {"HOME": str(tmp_path)}

    assert offline.problem(nowhere) == "" == online.problem({**nowhere, "WANDB_API_KEY": "k" * 40})
    assert "expected a key in WANDB_API_KEY" in online.problem(nowhere)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    assert online.problem(nowhere) == ""
    lacking = WandbConfig(mode="online", api_key_env="KEY_OF_TEAM")
    assert "KEY_OF_TEAM" in lacking.problem(nowhere) and lacking.problem({"KEY_OF_TEAM": "k"}) == ""
