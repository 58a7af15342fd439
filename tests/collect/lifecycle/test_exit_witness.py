"""What a rank writes down of how the other ranks of its launcher end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sentinel.wire.witness import read_witness

pytestmark = pytest.mark.slow

LAUNCHER = """
import subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", code]) for code in sys.argv[1:]]
for rank in ranks:
    rank.wait()
"""
RANK = """
import pathlib, sys, time
sys.path.insert(0, {root!r})
from sentinel.collect.lifecycle.exit_witness import ExitWitness
from sentinel.wire.witness import read_witness
folder = pathlib.Path({folder!r})
witness = ExitWitness(folder)
witness.start()
(folder / "ready").touch()
until = time.monotonic() + 60
while not read_witness(folder) and time.monotonic() < until:
    time.sleep(0.01)
witness.close()
"""
DIES = """
import os, pathlib, signal, time
while not (pathlib.Path({folder!r}) / "ready").exists():
    time.sleep(0.01)
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(
    not hasattr(os, "pidfd_open") or not Path(f"/proc/self/task/{os.getpid()}/children").exists(),
    reason="the kernel lists no children here",
)
def test_who_is_killed_is_seen_by_those_that_live(tmp_path: Path) -> None:
    names = {"root": str(Path(__file__).parents[3]), "folder": str(tmp_path)}
    before = time.time_ns()

    subprocess.run([sys.executable, "-c", LAUNCHER, RANK.format(**names), DIES.format(**names)], timeout=120, check=True)

    (seen,) = read_witness(tmp_path)
    assert seen.status == 9
    assert before < seen.wall_ns < time.time_ns()
