"""Online runs of Weights & Biases: its own client against a server of ours, which fails, goes away and comes back."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.anomaly import Severity
from sentinel.errors import LogError
from sentinel.logs.log_file import read_log
from sentinel.mirrors import mirror_worker, wandb_mirror
from sentinel.mirrors.mirror import Mirror, MirrorBatch, MirroredIncident, MirroredStep, MirrorParts
from sentinel.mirrors.mirror_select import MirrorSelect
from sentinel.mirrors.mirror_worker import MirrorWorker
from sentinel.mirrors.wandb_mirror import WandbConfig
from sentinel.store.journal import Journal

from ..support.anomalies import a_nan, an_incident
from ..support.merged_steps import FlatLayout, merged_step
from ..support.waiting import wait_for
from ..support.wandb_server import KEY, WandbRun, WandbServer

pytestmark = pytest.mark.slow

WRONG_KEY = "fedcba9876543210" * 2 + "76543210"
QUICKLY = {
    "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1",
    **{
        f"WANDB__{client}_RETRY_WAIT_{end}_SECONDS": "1"
        for client in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")
        for end in ("MIN", "MAX")
    },
}
"""How soon the client sends and tries again, in whole seconds; of itself it takes 15 s, and 2 s to minutes."""

DAEMON = f"""
import sys
from pathlib import Path
from sentinel.mirrors import mirror_worker
from sentinel.mirrors.mirror import MirrorParts
from sentinel.mirrors.mirror_select import MirrorSelect
from sentinel.mirrors.wandb_mirror import WandbConfig
from sentinel.store.journal import Journal
from tests.support.merged_steps import FlatLayout, merged_step
from tests.support.waiting import wait_for

mirror_worker.CLOSE_S = 0.5
here = Path(sys.argv[1])
config = WandbConfig(mode="online", api_key_env="KEY_OF_TEAM", select=MirrorSelect(flush_s=0.05))
parts = MirrorParts(run="run-7", key="", run_dir=here, mark="", environ={{"KEY_OF_TEAM": "{KEY}"}})
worker = mirror_worker.MirrorWorker(config, parts, Journal(here / "journal.sqlite"), here / "wandb.json", after=0)
for seq in (1, 2, 3):
    worker.take(merged_step(FlatLayout(0), seq), 0.5)
    wait_for(lambda: worker.counts.num_steps == seq)
    sys.stdin.readline()
worker.close()
"""
"""A process that mirrors a step for each line that it is given, and ends."""


@pytest.fixture(scope="module")
def service() -> Iterator[WandbServer]:
    """The server, and one process of the client that is pointed to it for all of these tests."""
    wandb = pytest.importorskip("wandb")
    server = WandbServer()
    with pytest.MonkeyPatch.context() as patched, server.running():
        for name, value in {**QUICKLY, "WANDB_BASE_URL": server.url}.items():
            patched.setenv(name, value)
        wandb.teardown()
        yield server
        server.answers_as_asked()
        wandb.teardown()


@pytest.fixture
def server(service: WandbServer) -> Iterator[WandbServer]:
    """The server with nothing on it, which answers, and has an answer for all that is asked."""
    service.answers_as_asked()
    service.forget()
    yield service
    assert service.unknown == []


@pytest.fixture
def online(tmp_path: Path, server: WandbServer, request: pytest.FixtureRequest) -> Iterator[Callable[..., Mirror]]:
    """Builds the mirror of a run of the test's own; what a test leaves open is closed."""
    built: list[Mirror] = []

    def begun(mark: str = "", key: str = KEY, **fields: Any) -> Mirror:
        parts = MirrorParts(
            run="run-7", key=f"{abs(hash(request.node.name)):016x}", run_dir=tmp_path, mark=mark, labels={"team": "a"},
            environ={"KEY_OF_TEAM": key},
        )  # fmt: skip
        built.append(WandbConfig(mode="online", api_key_env="KEY_OF_TEAM", **fields).build(parts))
        return built[-1]

    yield begun
    server.answers_as_asked()
    for one in built:
        one.close(is_over=False)


def steps_of(*numbers: int, attempt: int = 0, loss: float = 2.0) -> list[MirroredStep]:
    return [MirroredStep(attempt=attempt, step=one, time=1e9 + one, values=(("loss", loss),)) for one in numbers]


def the_run(server: WandbServer) -> WandbRun:
    """Return the only run that the server has."""
    (run,) = server.runs.values()
    return run


def rows_of(run: WandbRun) -> list[tuple[int, int, int]]:
    """Return (number of the row, attempt, step) of each row of a step, in their order."""
    return [(row["_step"], row["attempt"], row["step"]) for row in run.history if "loss" in row]


def steps_on_disk(run_dir: Path) -> list[int]:
    """Return the steps that W&B's own file of the only run in a directory has so far."""
    (file,) = run_dir.glob("wandb/run-*/run-*.wandb")
    with contextlib.suppress(LogError):
        return [int(step) for step in read_log(file).steps]
    return []


def retries_of(run_dir: Path) -> list[str]:
    """Return what the client notes of requests that it sends again."""
    lines = (run_dir / "wandb" / "debug-internal.log").read_text().splitlines()
    return [line for line in lines if '"api: retrying' in line]


def numbered(*steps: int, first: int = 0) -> list[tuple[int, int, int]]:
    return [(first + at, 0, step) for at, step in enumerate(steps)]


def test_each_step_is_a_row_once_with_its_step_and_attempt_also_over_two_daemons(
    online: Callable[..., Mirror], server: WandbServer
) -> None:
    first = online()
    before = first.write(MirrorBatch(steps=steps_of(0, 1, loss=math.nan)))
    mark = first.write(MirrorBatch(steps=steps_of(2)))
    wait_for(lambda: len(rows_of(the_run(server))) == 3, "the newest row, with none behind it")
    first.close(is_over=False)
    second = online(mark)
    second.write(MirrorBatch(steps=steps_of(1, 2, attempt=1)))
    second.close(is_over=False)
    # As behind a kill between what was written and the note of it.
    third = online(before)
    last = third.write(MirrorBatch(steps=[*steps_of(2), *steps_of(1, 2, 3, attempt=1)]))
    third.close(is_over=True)

    assert rows_of(the_run(server)) == [*numbered(0, 1, 2), (3, 1, 1), (4, 1, 2), (5, 1, 3)]
    assert [math.isnan(row["loss"]) for row in the_run(server).history] == [True, True, False, False, False, False]
    assert last.endswith(" 6") and the_run(server).exit_codes == [0, 0, 0]


def test_the_run_has_our_name_and_labels_and_nothing_of_the_machine(
    online: Callable[..., Mirror], server: WandbServer
) -> None:
    mirror = online(project="llm")
    mirror.write(MirrorBatch(steps=steps_of(0, 1)))
    mirror.close(is_over=True)

    assert the_run(server).config["sentinel"]["value"] == {"run": "run-7", "team": "a"}
    assert (the_run(server).params["displayName"], the_run(server).params["project"]) == ("run-7", "llm")
    assert the_run(server).summary["loss"] == 2 and the_run(server).summary["step"] == 1
    assert not the_run(server).params.keys() & {"host", "program", "repo", "commit"}
    assert the_run(server).files.keys() == {"config.yaml", "wandb-summary.json"} and the_run(server).lines.keys() <= {
        "wandb-history.jsonl", "wandb-summary.json",
    }  # fmt: skip


def test_an_incident_is_an_alert_once_and_what_was_found_is_an_artifact_when_the_run_is_over(
    online: Callable[..., Mirror], server: WandbServer, tmp_path: Path
) -> None:
    (tmp_path / "anomalies").mkdir()
    (tmp_path / "anomalies" / "000000.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "incidents.jsonl").write_text('{"id": 2}\n')
    grave = an_incident(3, severity=Severity.CRITICAL, evidence=("suspected data: replica 0 alone \x1b[31m",))
    told = [MirroredIncident(change=change, incident=grave) for change in ("opened", "changed", "closed")]
    first = online()
    mark = first.write(MirrorBatch(steps=steps_of(0), anomalies=[a_nan(step=0)], incidents=told[:1]))
    first.close(is_over=False)
    assert server.artifacts == [], "the run is not over"
    second = online(mark)
    # Another incident of the same title, at once behind the first.
    second.write(MirrorBatch(incidents=[*told[1:], MirroredIncident(change="opened", incident=an_incident(4))]))
    second.close(is_over=True)

    assert [(one["title"], one["severity"]) for one in server.alerts] == [
        ("run-7: NaN in blocks.3", "ERROR"), ("run-7: NaN in blocks.3", "WARN"),
    ]  # fmt: skip
    assert {one["waitDuration"] for one in server.alerts} == {1}, "W&B leaves out no alert that comes soon behind another"
    lines = server.alerts[0]["text"].splitlines()
    assert lines == ["steps 7 to 7, suspected: unknown", "replica 0 alone \\u001b[31m"]
    (artifact,) = server.artifacts
    assert (artifact.kind, artifact.name, artifact.is_committed) == ("anomalies", f"anomalies-{artifact.run}", True)
    assert artifact.files == {"anomalies/000000.jsonl": b'{"id": 1}\n', "incidents.jsonl": b'{"id": 2}\n'}


@pytest.mark.parametrize("trouble", ["wrong key", "503"])
def test_a_run_that_could_not_begin_says_why_soon_and_begins_when_the_server_is_back(
    trouble: str, online: Callable[..., Mirror], server: WandbServer,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    import wandb

    monkeypatch.setattr(wandb_mirror, "INIT_S", 1.0)
    key, words = {"wrong key": (WRONG_KEY, "401"), "503": (KEY, "503")}[trouble]
    if trouble == "503":
        server.failing = 503
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(wandb.errors.CommError, match=words) as raised:
            online(key=key)
        assert time.monotonic() - began < 30.0
        assert key not in str(raised.value) and "in use" not in str(raised.value)
    server.answers_as_asked()

    mirror = online()
    mirror.write(MirrorBatch(steps=steps_of(0, 1)))
    mirror.close(is_over=True)

    assert rows_of(the_run(server)) == numbered(0, 1)
    told = [caplog.text.encode(), *(text.encode() for text in capfd.readouterr())]
    told += [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not [text for text in told if KEY.encode() in text or WRONG_KEY.encode() in text]


@pytest.mark.parametrize("trouble", ["503", "away", "answers are lost"])
def test_a_server_that_fails_while_a_run_goes_on_has_each_row_once_and_the_alert_when_it_is_back(
    trouble: str, online: Callable[..., Mirror], server: WandbServer, tmp_path: Path
) -> None:
    mirror = online()
    mirror.write(MirrorBatch(steps=steps_of(0, 1)))
    wait_for(lambda: len(rows_of(the_run(server))) == 2)
    if trouble == "503":
        server.failing = 503
    elif trouble == "away":
        server.stop()
    else:
        server.loses_answers = True
    began = time.monotonic()
    opened = MirroredIncident(change="opened", incident=an_incident(1))
    mirror.write(MirrorBatch(steps=steps_of(2, 3), incidents=[opened]))
    mirror.write(MirrorBatch(steps=steps_of(4)))
    assert time.monotonic() - began < 10.0, "writing waits for no server"
    wait_for(lambda: "file_stream" in "".join(retries_of(tmp_path)), "a request for rows that failed")
    server.answers_as_asked()
    mirror.close(is_over=True)

    assert (
        rows_of(the_run(server)) == numbered(0, 1, 2, 3, 4) and len(server.alerts) == 1 and the_run(server).exit_codes == [0]
    )


def test_rows_that_the_client_gave_up_are_said_by_the_next_daemon_which_goes_on_behind_them(
    online: Callable[..., Mirror], server: WandbServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    first = online()
    first.write(MirrorBatch(steps=steps_of(0, 1)))
    wait_for(lambda: len(rows_of(the_run(server))) == 2)
    # The key is not valid any more: the client sends nothing of this run from now on, and raises nothing.
    server.failing = 401
    mark = first.write(MirrorBatch(steps=steps_of(2, 3)))
    first.close(is_over=False)
    assert "wandb sync" not in caplog.text
    server.answers_as_asked()
    second = online(mark)
    second.write(MirrorBatch(steps=steps_of(4, 5)))
    second.close(is_over=True)

    assert f"W&B has 2 of 4 rows; wandb sync --include-online has the others, of {tmp_path / 'wandb'}" in caplog.text
    assert rows_of(the_run(server)) == [*numbered(0, 1), *numbered(4, 5, first=4)]


def test_a_daemon_begins_while_the_server_is_away_and_mirrors_all_when_it_comes(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_mirror, "INIT_S", 0.5)
    monkeypatch.setattr(mirror_worker, "RETRY_S", 0.1)
    monkeypatch.setattr(mirror_worker, "CLOSE_S", 60.0)
    caplog.set_level(logging.INFO)
    server.stop()
    config = WandbConfig(mode="online", api_key_env="KEY_OF_TEAM", select=MirrorSelect(flush_s=0.05))
    parts = MirrorParts(run="run-7", key="", run_dir=tmp_path, mark="", environ={"KEY_OF_TEAM": KEY})
    with contextlib.closing(Journal(tmp_path / "journal.sqlite")) as journal:
        worker = MirrorWorker(config, parts, journal, tmp_path / "wandb.json", after=0)
        for seq in (1, 2, 3):
            worker.take(merged_step(FlatLayout(0), seq), 0.5)
        wait_for(lambda: worker.counts.num_failures >= 2)
        assert "connection refused" in worker.problem and KEY not in worker.problem
        server.start()
        wait_for(lambda: worker.counts.num_steps == 3)
        worker.end()
        wait_for(lambda: [one.exit_codes for one in server.runs.values()] == [[0]])
        worker.close()

    assert rows_of(the_run(server)) == numbered(0, 1, 2) and worker.problem == "" and worker.counts.num_dropped == 0
    assert "is written again" in caplog.text and KEY not in caplog.text


def test_a_daemon_ends_soon_while_the_server_is_away_and_has_its_rows_on_disk(server: WandbServer, tmp_path: Path) -> None:
    # With W&B's process of its own, not that of these tests, which its client would find by this variable.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(tmp_path)], env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert daemon.stdin is not None
        wait_for(lambda: server.runs and rows_of(the_run(server)), "the first row")
        server.stop()
        began = time.monotonic()
        _, said = daemon.communicate(b"\n\n\n", timeout=60)
    finally:
        daemon.kill()
        daemon.wait()

    assert daemon.returncode == 0 and time.monotonic() - began < 30.0 and KEY.encode() not in said
    assert rows_of(the_run(server)) == numbered(0)
    wait_for(
        lambda: steps_on_disk(tmp_path) == [0, 1, 2], "W&B's process, which writes behind the end of ours", timeout_s=30.0
    )
