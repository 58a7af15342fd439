"""An offline run that the client of Weights & Biases itself wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = """
import json, sys
import wandb
settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True)
with wandb.init(project="p", id="abc", mode="offline", dir=sys.argv[1], settings=settings) as run:
    for row in json.load(sys.stdin):
        run.log({name: "y" * value if name == "long" else float(value) for name, value in row.items()})
"""


def write_wandb_run(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Return the run's directory. rows: of its history, numbers or their words; `long` has so many characters."""
    pytest.importorskip("wandb")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    command = [sys.executable, "-c", _PROGRAM, str(folder)]
    subprocess.run(command, input=json.dumps(rows), text=True, check=True, timeout=240, env=environ, capture_output=True)
    (run,) = (folder / "wandb").glob("offline-run-*")
    return run
