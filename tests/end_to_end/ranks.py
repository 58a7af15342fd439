"""Real ranks for the tests: the example trainer as processes of its own, bounded in time, and what they left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..support.warm import cli, interpreter

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt"
SMALL = ("--width", "16", "--sequence", "16")
"""A model of the example's shape, each of whose steps takes half as long."""
EVERYTHING = {"kinds": ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]}


@dataclass(frozen=True)
class Ended:
    """A command that is over."""

    run_dir: Path
    stdout: str
    stderr: str


def train_example(
    folder: Path,
    *arguments: str,
    num_ranks: int = 4,
    is_judged: bool = True,
    config: dict[str, Any] | None = None,
    faults: Sequence[dict[str, Any]] = (),
    pack: str = "",
    environment: dict[str, str] | None = None,
    timeout_s: float = 150.0,
) -> Ended:
    """Train the example's GPT, made small, with `num_ranks` processes; with a daemon beside it unless told not to.

    config: of the monitor; pack: YAML of rules, merged over the default pack. Fails on any exit code but 0.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [interpreter(), str(EXAMPLE / "launch.py"), "-n", str(num_ranks), "--", str(EXAMPLE / "train.py")]
    command += [*SMALL, *arguments]
    if config is not None:
        (folder / "monitor.yaml").write_text(json.dumps(config))
        command += ["--sentinel-config", str(folder / "monitor.yaml")]
    if faults:
        (folder / "faults.json").write_text(json.dumps(list(faults)))
        command += ["--faults", str(folder / "faults.json")]
    if is_judged:
        watched = [*cli(), "run", "--dir", str(folder), "--name", "run", "--drain-s", "60"]
        if pack:
            (folder / "pack.yaml").write_text(pack)
            watched += ["--rules", str(folder / "pack.yaml")]
        command = [*watched, "--", *command]
    return run_command(folder, command, environment, timeout_s)


def run_command(folder: Path, command: Sequence[str], environment: dict[str, str] | None, timeout_s: float) -> Ended:
    """Run a command in a session of its own; past the time its whole session is ended, and the test fails."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SENTINEL_")}
    process = subprocess.Popen(
        command,
        env={
            **clean, "PYTHONPATH": str(ROOT), "SENTINEL_DIR": str(folder), "SENTINEL_RUN": "run",
            "PYTHON_EXEC": interpreter(), **(environment or {}),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            stdout, stderr = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
        raise AssertionError(f"{command[-1]}: not over after {timeout_s:g} s\n{stdout[-2000:]}\n{stderr[-4000:]}") from None
    assert process.returncode == 0, f"exit code {process.returncode}\n{stdout[-2000:]}\n{stderr[-4000:]}"
    return Ended(folder / "run", stdout, stderr)
