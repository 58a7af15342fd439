"""Real ranks that wait for one another for ever, and real ranks that only wait for long: what is told, and what is not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.cli.status import run_status

from ..support.results import anomalies, incidents
from ..support.warm import cli, interpreter
from .ranks import EXAMPLE, ROOT

TRAINER = Path(__file__).parent / "deadlock_trainer.py"
SMALL = [
    "--step-time", "0.1", "--layers", "2", "--width", "32", "--sequence", "16", "--micro-batch", "2", "--micro-batches", "2"
]  # fmt: skip
PACK = """
rules:
  - name: stale-rank
    args: {{deadlock_after_s: {deadlock_after_s}, hang_after_s: {hang_after_s}, stale_after_s: 120, quiet_after_s: 120}}
"""


def start(
    folder: Path, kind: str, at: int, num_ranks: int, pp: int, *, steps: int, waiting_s: float = 0.0, **limits: int
) -> subprocess.Popen[bytes]:
    """Start ranks with a daemon beside them."""
    folder.chmod(0o700)
    (folder / "pack.yaml").write_text(PACK.format(**limits))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SENTINEL_")}
    environment = {
        **clean, "PYTHONPATH": str(ROOT), "SENTINEL_DIR": str(folder), "SENTINEL_RUN": "run", "PYTHON_EXEC": interpreter(),
        "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder), "WAITING_S": str(waiting_s),
    }  # fmt: skip
    watched = [
        *cli(), "run", "--dir", str(folder), "--name", "run",
        "--rules", str(folder / "pack.yaml"),
    ]  # fmt: skip
    trains = [
        interpreter(), str(EXAMPLE / "launch.py"), "-n", str(num_ranks), "--", str(TRAINER), kind, str(at), "--pp", str(pp),
        "--steps", str(steps), *SMALL,
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([*watched, "--", *trains], env=environment, stdout=log, stderr=log)


def notified(folder: Path) -> list[Anomaly]:
    return [one for one in anomalies(folder / "run") if one.rule in ("stale-rank", "run-ended")]


@pytest.mark.parametrize(
    ("kind", "at", "num_ranks", "pp", "where"),
    [
        pytest.param("order", 0, 2, 1, ["forward of blocks.0, call "], marks=pytest.mark.long),
        ("alone", 12, 2, 1, ["rank 0 in step 12, forward of blocks.0, call ", "rank 1 in step 12, backward of "]),
        pytest.param(
            "message",
            0,
            2,
            2,
            ["rank 0 in step 0, forward of blocks.0, call ", "rank 1 in step 0, "],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "order",
            12,
            4,
            2,
            ["ranks 0, 1 in step 12, forward of blocks.0, call ", "ranks 2, 3 in step 1"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_ranks_that_wait_for_each_other_are_told_once_and_none_is_blamed(
    tmp_path: Path, kind: str, at: int, num_ranks: int, pp: int, where: list[str]
) -> None:
    everybody = tuple(range(num_ranks))
    process = start(tmp_path, kind, at, num_ranks, pp, steps=100_000, deadlock_after_s=8, hang_after_s=8)
    try:
        until = time.monotonic() + 150
        while not notified(tmp_path):
            assert time.monotonic() < until and process.poll() is None, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(240)

    onset, *rest = notified(tmp_path)
    assert (onset.rank, onset.ranks, onset.severity) == (None, everybody, Severity.CRITICAL)
    named = ", ".join(map(str, everybody))
    assert onset.message.startswith(f"ranks {named} wait for each other: no progress for ")
    for words in where:
        assert words in onset.message
    # The line at which each stands, of the user's own code.
    assert onset.message.count(", at ") == onset.message.count(" in step ")
    assert "deadlock_trainer.py:" in onset.message and "(Plan.in_forward)" in onset.message
    assert [(one.event, one.message) for one in rest] == [("end", f"ranks {named}: the run is over")]
    assert {one.state for one in incidents(tmp_path / "run")} == {"ended"}
    assert run_status(tmp_path / "run")["ended"]["detail"] == "SIGTERM"


@pytest.mark.parametrize(
    ("kind", "at", "num_ranks", "pp"),
    [pytest.param("load", 0, 2, 1, marks=pytest.mark.long), ("broadcast", 0, 2, 1)],
)
def test_ranks_that_wait_for_what_takes_long_are_told_of_to_nobody(
    tmp_path: Path, kind: str, at: int, num_ranks: int, pp: int
) -> None:
    process = start(tmp_path, kind, at, num_ranks, pp, steps=3, waiting_s=14.0, deadlock_after_s=6, hang_after_s=120)

    assert process.wait(150) == 0, (tmp_path / "log").read_text()[-4000:]
    assert notified(tmp_path) == []
    assert run_status(tmp_path / "run")["ended"]["how"] == "goodbye"
