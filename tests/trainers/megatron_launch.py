"""The launcher of `megatron_train.py`, for the tests: one process imports Megatron and forks the ranks of every job."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..support.ports import free_port

ROOT = Path(__file__).parents[2]
EVERYTHING = {"kinds": ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]}


class Launcher:
    """One process that has imported Megatron and forks the ranks of each job."""

    def __init__(self, folder: Path) -> None:
        """folder: for what `once` trains."""
        self._folder, self._known = folder, dict[str, Path]()
        command = [sys.executable, "-m", "tests.trainers.megatron_train"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def train(self, folder: Path, **job: Any) -> list[dict[str, Any]]:
        """Return what each rank says of its bare and of its watched training."""
        port = free_port()
        assert self.process.stdin is not None and self.process.stdout is not None
        config = job.pop("config", EVERYTHING)
        job.setdefault("steps", 2)
        self.process.stdin.write(json.dumps({"folder": str(folder), "port": port, "config": config, **job}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                answer = json.loads(line.removeprefix("ANSWER "))
                assert "error" not in answer, answer["error"]
                return list(answer["ranks"])
        raise AssertionError("the launcher ended")

    def once(self, **job: Any) -> Path:
        """Return the folder of a watched training that tests only read: the same job is trained once."""
        key = json.dumps(job, sort_keys=True)
        if key not in self._known:
            folder = self._folder / str(len(self._known))
            self.train(folder, bare=False, **job)
            self._known[key] = folder
        return self._known[key]


def launched(folder: Path) -> Iterator[Launcher]:
    """A launcher, for as long as a test file needs it. folder: for what its tests share."""
    one = Launcher(folder)
    yield one
    one.process.stdin.close()  # type: ignore[union-attr]
    one.process.wait(240)


def truth_of(ranks: list[dict[str, Any]], step: int) -> dict[str, list[float]]:
    """Canonical name -> [sum of squares, sum, count] in float64, the pieces of all ranks added up."""
    found: dict[str, list[float]] = {}
    for rank in ranks:
        for name, numbers in rank["watched"]["truth"][step].items():
            found[name] = [a + b for a, b in zip(found.get(name, [0.0] * 3), numbers, strict=True)]
    return found
