"""Two models that one process trains side by side under `sentinel run`: two runs, both watched, both told."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from ..support.warm import cli, interpreter

SCRIPT = """
import time
import torch
from torch import nn
import sentinel

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

pairs = []
for _ in range(2):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pairs.append((model, optimizer, sentinel.attach(model, optimizer)))
for step in range(12):
    for number, (model, optimizer, monitor) in enumerate(pairs):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        if number == 1 and step == 10:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss)
    time.sleep(0.02)
"""


def test_both_are_watched_and_the_ill_one_decides_the_exit_code(tmp_path: Path) -> None:
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(SCRIPT)

    done = subprocess.run(
        [*cli(), "run", "--dir", str(tmp_path / "runs"), "--name", "two", "--fail-on",
         "critical", "--report", str(report), "--", interpreter(), str(script)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip

    notified = json.loads(report.read_text())
    assert done.returncode == 1, done.stderr
    assert (notified["num_anomalies"], notified["incidents"]) == (0, [])
    (further,) = notified["further_runs"]
    assert further["run"] == "two+2"
    assert [one["severity"] for one in further["incidents"]] == ["critical"]
    assert "run two+2:" in done.stderr
