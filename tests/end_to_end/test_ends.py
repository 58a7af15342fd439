"""Real ranks under a launcher that are killed, raise, exit or run to their end: what is told, live and found later."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.cli.status import run_status

from ..support.results import anomalies, incidents
from ..support.warm import cli, interpreter
from .ranks import EXAMPLE, ROOT

TRAINER = Path(__file__).parent / "ending_trainer.py"
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("SENTINEL_")}

PATIENT = 'export WORLD_SIZE=2; RANK=0 "$@" & RANK=1 "$@"; code=$?; wait; exit $code'
"""A launcher that ends nobody: the other rank always has the time to notice that it lost one, which is all that a daemon
finds on disk later. A launcher that sends SIGTERM at once may leave two ranks that are gone without a word."""


def environment(folder: Path) -> dict[str, str]:
    return {
        **CLEAN, "PYTHONPATH": str(ROOT), "SENTINEL_DIR": str(folder), "SENTINEL_RUN": "run", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder), "PYTHON_EXEC": interpreter(),
    }  # fmt: skip


def command(mode: str, *, launcher: str = "forked", num_ranks: int = 2, restarts: int = 0) -> list[str]:
    trainer = [str(TRAINER), mode, "12", str(min(1, num_ranks - 1))]
    if num_ranks == 1:
        return [interpreter(), *trainer]
    if launcher == "forked":
        return [interpreter(), str(EXAMPLE / "launch.py"), "-n", str(num_ranks), "--", *trainer]
    if launcher == "patient":
        return ["bash", "-c", PATIENT, "launcher", interpreter(), *trainer]
    return [
        interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
        "--max-restarts", str(restarts), *trainer,
    ]  # fmt: skip


def live(folder: Path, mode: str, *, fail_on: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a trainer with a daemon beside it, to its end."""
    folder.chmod(0o700)
    said = ["--fail-on", fail_on] if fail_on else []
    watched = [*cli(), "run", "--dir", str(folder), "--name", "run", *said, "--", *command(mode, **options)]
    done = subprocess.run(watched, env=environment(folder), capture_output=True, text=True, timeout=240, check=False)
    print(done.stdout, done.stderr)  # shown where the test fails
    return done


def later(folder: Path, mode: str, **options: Any) -> None:
    """Run a trainer alone, and have a daemon look at what it left."""
    folder.chmod(0o700)
    subprocess.run(command(mode, **options), env=environment(folder), capture_output=True, timeout=240, check=False)
    serve = [*cli(), "serve", str(folder / "run"), "--no-http"]
    with (folder / "daemon.log").open("wb") as log:
        daemon = subprocess.Popen(serve, env=environment(folder), stdout=log, stderr=log)
        try:
            until = time.monotonic() + 60
            while run_status(folder / "run")["ended"] is None and time.monotonic() < until:
                time.sleep(0.2)
            time.sleep(1.0)
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(240)


def ends(folder: Path) -> list[Anomaly]:
    return [one for one in anomalies(folder / "run") if one.rule in ("run-ended", "stale-rank") and one.event == "onset"]


CASES = {
    "kill": ("signal", ""),
    "raise": ("exception", ", after step 11, raised ValueError: no such token: 50257"),
    "raise_inside": ("exception", ", in step 12, raised ValueError: no such token: 50257"),
    "memory": ("out_of_memory", ", after step 11, ran out of memory: MemoryError: cannot hold 3 GiB"),
    "exit": ("exception", ", after step 11, ended with exit code 3"),
    "hard_exit": ("exception", "ended with exit code 7"),
    "crash": ("signal", ""),
}
CODES = {"kill": 128 + signal.SIGKILL, "crash": 128 + signal.SIGSEGV, "exit": 3, "hard_exit": 7}
"""Of the example's launcher, which ends with its first rank's; torchrun ends with 1."""


@pytest.mark.parametrize(
    ("launcher", "mode"),
    [
        *[pytest.param("forked", mode, marks=() if mode == "raise" else pytest.mark.long) for mode in CASES],
        *[pytest.param("torchrun", mode, marks=() if mode == "kill" else pytest.mark.long) for mode in CASES],
    ],
)
def test_the_first_rank_to_go_is_told_once_and_the_run_is_over(tmp_path: Path, launcher: str, mode: str) -> None:
    how, words = CASES[mode]
    done = live(tmp_path, mode, launcher=launcher)

    (onset,) = ends(tmp_path)
    assert (onset.rank, onset.severity, onset.rule) == (1, Severity.CRITICAL, "run-ended")
    assert words in onset.message
    status = run_status(tmp_path / "run")
    assert (status["ended"]["how"], status["ended"]["rank"]) == (how, 1)
    assert (status["num_ranks"], status["num_steps"] >= 11) == (2, True)
    assert {one.state for one in incidents(tmp_path / "run")} == {"ended"}
    assert done.returncode == (1 if launcher == "torchrun" else CODES.get(mode, 1)), "the command's own"
    assert "ended: rank 1" in done.stderr and "watched: " in done.stderr


@pytest.mark.parametrize(
    ("launcher", "mode"), [("patient", "kill"), pytest.param("forked", "raise", marks=pytest.mark.long)]
)
def test_an_end_that_is_found_later_is_told_once(tmp_path: Path, launcher: str, mode: str) -> None:
    later(tmp_path, mode, launcher=launcher)

    (onset,) = ends(tmp_path)
    assert (onset.rank, onset.severity) == (1, Severity.CRITICAL)
    assert run_status(tmp_path / "run")["ended"]["how"] == CASES[mode][0]


def test_an_exit_whose_code_nobody_told_is_the_first_to_go(tmp_path: Path) -> None:
    live(tmp_path, "system_exit")

    (onset,) = ends(tmp_path)
    assert onset.rank == 1


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_run_that_ended_well_pages_nobody(tmp_path: Path, num_ranks: int) -> None:
    done = live(tmp_path, "none", num_ranks=num_ranks, fail_on="warning")

    assert (done.returncode, ends(tmp_path)) == (0, [])
    assert run_status(tmp_path / "run")["ended"]["how"] == "goodbye"
    assert "ended: every rank" in done.stderr


def test_an_interrupt_by_hand_pages_nobody(tmp_path: Path) -> None:
    live(tmp_path, "interrupt", num_ranks=1)

    assert ends(tmp_path) == []
    assert run_status(tmp_path / "run")["ended"]["detail"] == "SIGINT"


def test_the_end_of_an_attempt_that_the_launcher_restarts_is_told(tmp_path: Path) -> None:
    done = live(tmp_path, "raise", launcher="torchrun", restarts=1)

    (onset,) = ends(tmp_path)
    assert (onset.rank, onset.attempt) == (1, 0)
    assert done.returncode == 0, done.stderr[-2000:]
    assert run_status(tmp_path / "run")["ended"]["how"] == "goodbye", "the second attempt ended well"


def test_a_run_that_is_ended_from_outside_is_a_warning_at_most(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    watched = [*cli(), "run", "--dir", str(tmp_path), "--name", "run", "--", *command("none")]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(watched, env=environment(tmp_path), stderr=quiet, stdout=quiet) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "run" / "spool").is_dir() or len(list((tmp_path / "run" / "spool").glob("r*/*.spool"))) < 2:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.1)
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        process.wait(240)

    assert {one.severity for one in ends(tmp_path)} <= {Severity.WARNING}
    ended = run_status(tmp_path / "run")["ended"]
    assert (ended["rank"], ended["detail"]) == (None, "SIGTERM")


def test_a_command_that_never_attached_is_said_so_and_is_not_clean(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for fail_on, code in (([], 0), (["--fail-on", "critical"], 1)):
        run = [*cli(), "run", "--dir", str(tmp_path), "--name", f"run{code}", *fail_on, "--", "true"]
        done = subprocess.run(run, env=environment(tmp_path), capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == code
        assert "nothing was watched: the command never attached; call sentinel.attach" in done.stderr
