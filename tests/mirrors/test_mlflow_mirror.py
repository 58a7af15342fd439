"""Runs of MLflow, written and read back by its own client: in a store of files, and in MLflow's own tracking server."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.mirrors import mlflow_mirror
from sentinel.mirrors.mirror import MirrorBatch, MirroredIncident, MirroredStep, MirrorParts
from sentinel.mirrors.mlflow_mirror import MlflowConfig, MlflowMirror

from ..support.anomalies import a_nan, an_incident
from ..support.ports import free_port
from ..support.servers import program

pytestmark = pytest.mark.slow


class TrackingServer:
    """MLflow's server, with runs in SQLite, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._directory = directory
        self._running = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        """Start it; its runs are those that it had."""
        environment = {
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{self._directory / 'runs.sqlite'}",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(self._directory / "artifacts"),
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        }
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-W", "ignore", "-m", "uvicorn", "mlflow.server.fastapi_app:app", "--port", port]
        self._running.enter_context(
            program(["env", *(f"{name}={value}" for name, value in environment.items()), *command], f"{self.url}/health",
                    self._directory / "log")
        )  # fmt: skip

    def stop(self) -> None:
        self._running.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrackingServer]:
    pytest.importorskip("mlflow")
    running = TrackingServer(tmp_path_factory.mktemp("mlflow"))
    yield running
    running.stop()


@pytest.fixture(params=["files", "server"])
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> MlflowConfig:
    """Where the client itself writes files, or has the server write."""
    pytest.importorskip("mlflow")
    if request.param == "server":
        return MlflowConfig(tracking_uri=request.getfixturevalue("server").url, experiment=request.node.name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowConfig(tracking_uri=(tmp_path / "mlruns").as_uri())


def parts(run_dir: Path, mark: str = "", key: str = "0123") -> MirrorParts:
    return MirrorParts(run="run-7", key=key, run_dir=run_dir, mark=mark, labels={"team": "a"})


def steps(*numbers: int, attempt: int = 0, **values: float) -> list[MirroredStep]:
    given = tuple((values or {"loss": 2.0}).items())
    return [MirroredStep(attempt=attempt, step=one, time=1e9 + one, values=given) for one in numbers]


def points(mirror: MlflowMirror, name: str = "loss") -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in mirror._client.get_metric_history(mirror._id, name)]


def test_values_are_metrics_by_step_and_time_and_what_is_there_already_is_not_sent_again(
    config: MlflowConfig, tmp_path: Path
) -> None:
    first = config.build(parts(tmp_path))
    mark = first.write(MirrorBatch(steps=[*steps(0, 1), *steps(2, loss=math.nan)]))
    first.write(MirrorBatch(steps=steps(3)))
    first.close(is_over=False)

    # As behind a kill between the answer and the note of it, and with the note lost altogether.
    second = config.build(parts(tmp_path, mark))
    second.write(MirrorBatch(steps=steps(2, 3, 4)))
    third = config.build(parts(tmp_path))
    third.write(MirrorBatch(steps=steps(4, 5)))

    assert third._id == mark
    assert [step for step, _ in points(third)] == [0, 1, 2, 3, 4, 5] and math.isnan(points(third)[2][1])
    assert third._client.get_metric_history(mark, "loss")[5].timestamp == 1_000_000_005_000
    run = third._client.get_run(mark)
    assert run.info.run_name == "run-7" and run.info.status == "RUNNING"
    assert run.data.tags.items() >= {"sentinel.key": "0123", "sentinel.label.team": "a"}.items()


def test_another_run_of_the_same_name_is_another_one(config: MlflowConfig, tmp_path: Path) -> None:
    one, other = config.build(parts(tmp_path)), config.build(parts(tmp_path, key="4567"))
    one.write(MirrorBatch(steps=steps(0)))
    other.write(MirrorBatch(steps=steps(0, 1)))

    assert one._id != other._id and (len(points(one)), len(points(other))) == (1, 2)


def test_a_run_that_goes_back_has_both_attempts(config: MlflowConfig, tmp_path: Path) -> None:
    mirror = config.build(parts(tmp_path))
    mirror.write(MirrorBatch(steps=[*steps(0, 1, 2), *steps(1, 2, attempt=1, loss=3.0)]))

    assert sorted(points(mirror)) == [(0, 2.0), (1, 2.0), (1, 3.0), (2, 2.0), (2, 3.0)]


def test_a_batch_of_many_values_is_several_requests(
    config: MlflowConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_mirror, "AT_ONCE", 5)
    mirror = config.build(parts(tmp_path))
    many = {f"v{at}": float(at) for at in range(12)}

    mirror.write(MirrorBatch(steps=[*steps(0, 1, 2, a=1.0, b=2.0), *steps(3, **many), *steps(4, a=1.0)]))

    assert points(mirror, "a") == [(0, 1.0), (1, 1.0), (2, 1.0), (4, 1.0)]
    assert [points(mirror, f"v{at}") for at in range(12)] == [[(3, float(at))] for at in range(12)]


def test_what_was_found_are_tags_and_artifacts(
    config: MlflowConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_mirror, "MOST_INCIDENTS", 2)
    (tmp_path / "anomalies").mkdir()
    (tmp_path / "anomalies" / "000000.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "incidents.jsonl").write_text("{}\n")
    told = [MirroredIncident(change="opened", incident=an_incident(at, title=f"NaN {at} \x1b[31m")) for at in range(4)]
    over = MirroredIncident(change="closed", incident=an_incident(1, revision=2, state="resolved"))
    mirror = config.build(parts(tmp_path))

    mirror.write(MirrorBatch(anomalies=[a_nan(step=5), a_nan(step=5, rank=1), a_nan(step=6)], incidents=[*told, over]))
    mirror.close(is_over=True)

    run: Any = mirror._client.get_run(mirror._id)
    tags = {name: value for name, value in run.data.tags.items() if name.startswith("sentinel.incident.")}
    assert tags == {
        "sentinel.incident.i0": "warning, open, steps 7 to 7: NaN 0 \\u001b[31m; suspected: unknown",
        "sentinel.incident.i1": "warning, resolved, steps 7 to 7: NaN in blocks.3; suspected: unknown",
    }
    assert points(mirror, "anomalies/onsets") == [(5, 2.0), (6, 1.0)]
    assert run.info.status == "FINISHED"
    assert {one.path for one in mirror._client.list_artifacts(mirror._id, "sentinel")} == {
        "sentinel/anomalies", "sentinel/incidents.jsonl",
    }  # fmt: skip


def test_names_that_mlflow_does_not_take_are_made_such_and_stay_apart(config: MlflowConfig, tmp_path: Path) -> None:
    names = ["a/../b", "/a//b/", "a:b", "a\u00e9b", "<script>", "x" * 400, "x" * 400 + "y", "..", "plain/name_1.5 -"]
    mirror = config.build(parts(tmp_path))

    mirror.write(MirrorBatch(steps=steps(0, **{name: float(at) for at, name in enumerate(names)})))

    metrics = mirror._client.get_run(mirror._id).data.metrics
    assert sorted(metrics.values()) == list(map(float, range(len(names)))), "each is there, under a name of its own"
    assert metrics["plain/name_1.5 -"] == 8.0


def test_a_server_that_was_away_has_each_step_once(
    server: TrackingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    mirror = MlflowConfig(tracking_uri=server.url, experiment="away").build(parts(tmp_path))
    mirror.write(MirrorBatch(steps=steps(0, 1)))
    server.stop()
    with pytest.raises(MlflowException, match="Max retries exceeded"):
        mirror.write(MirrorBatch(steps=steps(1, 2)))

    server.start()
    mirror.write(MirrorBatch(steps=steps(1, 2, 3)))

    assert [step for step, _ in points(mirror)] == [0, 1, 2, 3]
