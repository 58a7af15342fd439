"""A real trainer whose spool is small, and a daemon that comes late or stands still: the loss is told, the NaN found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.cli.status import run_status
from sentinel.decision import Decision
from sentinel.store.journal import Journal
from sentinel.store.lock import holder
from sentinel.wire.spool_files import list_kept

from ..support.results import anomalies, incidents
from ..support.servers import get_json
from ..support.waiting import wait_for
from ..support.warm import cli, interpreter

TRAINER = """
import sys, time, torch, sentinel
steps, bad, max_bytes = map(int, sys.argv[1:])
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), 0.001)
monitor = sentinel.attach(model, optimizer, {"spool": {"max_bytes": max_bytes, "file_bytes": 65536}})
sent = 0
hand_over = monitor.session.handover.submit
def submit(batch):
    global sent
    sent += batch.num_rows
    return hand_over(batch)
monitor.session.handover.submit = submit
for step in range(steps):
    x = torch.randn(8, 16)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    if step == bad:
        model[3][0].weight.grad[0, 0] = float("nan")
        optimizer.zero_grad()
    optimizer.step()
    monitor.log(loss=loss)
    time.sleep(0.002)
monitor.detach()
print(sent)
"""
MODULE = "3.0.weight"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINER)
    return path


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "PYTHON_EXEC": interpreter(), "SENTINEL_DIR": str(home), "SENTINEL_RUN": "run"}


def num_judged(run_dir: Path) -> int:
    """Return the rows that were judged."""
    journal = Journal(run_dir / ".daemon" / "journal.sqlite", read_only=True)
    try:
        closed: list[Decision] = [
            msgspec.msgpack.decode(body, type=Decision) for _, kind, body in journal.decisions() if kind == "step"
        ]
    finally:
        journal.close()
    return sum(one.num_rows for decision in closed for one in decision.ranks)


def losses(run_dir: Path) -> list[Any]:
    return [one for one in anomalies(run_dir) if one.rule == "rows-lost" and one.event == "onset"]


def the_nan(run_dir: Path) -> set[tuple[int, int | None, str]]:
    found = [one for one in anomalies(run_dir) if one.rule == "non-finite" and one.event == "onset"]
    return {(one.step, one.rank, one.tag_name) for one in found}


def test_a_daemon_that_comes_late_finds_the_nan_and_tells_what_was_lost(tmp_path: Path, script: Path) -> None:
    ended = subprocess.run(
        [interpreter(), str(script), "600", "100", str(2**19)], env=environment(tmp_path / "runs"),
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    sent, run_dir = int(ended.stdout), tmp_path / "runs" / "run"
    assert "sentinel serve" in ended.stderr and "finite rows" in ended.stderr, "the trainer's own log says it"

    before = subprocess.run([*cli(), "status", str(run_dir)], capture_output=True, text=True).stdout
    assert "spool.max_bytes is used up" in before and "sentinel serve" in before
    with subprocess.Popen(
        [*cli(), "serve", str(run_dir), "--listen", "127.0.0.1:0", "--open-reads"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as daemon:
        try:
            url = wait_for(lambda: _url(run_dir), timeout_s=240)
            wait_for(lambda: get_json(f"{url}/api/v1/runs")["runs"][0]["judged_step"] == 599, timeout_s=240)
            [described] = get_json(f"{url}/api/v1/runs")["runs"]
            health = get_json(f"{url}/healthz")
        finally:
            daemon.terminate()
            daemon.communicate(timeout=240)

    lost = described["num_rows_lost"]
    (onset,) = losses(run_dir)
    assert num_judged(run_dir) + lost == sent and lost > 0
    assert onset.value == lost, "told once, with all of it"
    assert f"{lost:,} of " in onset.message and "spool.max_bytes (512 KiB)" in onset.message
    assert the_nan(run_dir) == {(100, 0, MODULE)}
    assert described["is_complete"] is False
    assert health["status"] == "degraded" and any(f"{lost:,} rows" in one for one in health["problems"])
    state = run_status(run_dir)
    assert state["is_complete"] is False and state["num_rows_lost"] == lost
    ended = subprocess.run([*cli(), "status", str(run_dir)], capture_output=True, text=True)
    assert f"lost: {lost:,} rows" in ended.stdout and ended.returncode == 1


@pytest.mark.parametrize(
    ("max_bytes", "is_lossy"), [(2**18, True), pytest.param(2**30, False, marks=pytest.mark.long)], ids=["no room", "room"]
)
def test_a_daemon_that_stands_still_for_a_while(tmp_path: Path, script: Path, max_bytes: int, is_lossy: bool) -> None:
    run_dir, report_file = tmp_path / "runs" / "run", tmp_path / "report.json"
    with subprocess.Popen(
        [*cli(), "run", "--open-reads", "--fail-on", "warning", "--drain-s", "60", "--report", str(report_file), "--",
         interpreter(), str(script), "900", "150", str(max_bytes)],
        env=environment(tmp_path / "runs"), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as run:  # fmt: skip
        daemon = wait_for(lambda: holder(run_dir / ".daemon"), timeout_s=240)
        url = wait_for(lambda: _url(run_dir), timeout_s=240)
        wait_for(lambda: (get_json(f"{url}/api/v1/runs")["runs"][0]["judged_step"] or 0) >= 10, timeout_s=240)
        pid = int(str(daemon).split()[0])
        os.kill(pid, signal.SIGSTOP)
        time.sleep(5.0)
        if is_lossy:
            wait_for(lambda: any(list_kept(folder) for folder in run_dir.glob("spool/*")), timeout_s=240)
        os.kill(pid, signal.SIGCONT)
        out, err = run.communicate(timeout=240)
    sent = int(out)

    report = json.loads(report_file.read_text())
    lost = report["num_rows_lost"]
    assert num_judged(run_dir) + lost == sent
    assert the_nan(run_dir) == {(150, 0, MODULE)}
    assert report["is_complete"] is not is_lossy, err
    if is_lossy:
        # A daemon that a busy machine keeps waiting may have the room used up a second time, behind steps that were whole.
        assert losses(run_dir) and lost > 0
        assert "LOST" in err
        assert any("rows-lost" in one.title or "lost" in one.title for one in incidents(run_dir))
    else:
        assert lost == 0 and not losses(run_dir)
    assert run.returncode == 1, "the NaN, and where there is one the loss, fail the command"


def _url(run_dir: Path) -> str | None:
    path = run_dir / ".daemon" / "http.json"
    return str(json.loads(path.read_text())["url"]) if path.exists() else None
