"""Random plants in synthetic runs, read back through `topk`; all of them are benchmarks/origin.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("num", [6, pytest.param(20, marks=pytest.mark.long)])
def test_planted_origins_come_first_whatever_the_layout(num: int) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "origin.py"), "--num", str(num), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, stdin=subprocess.DEVNULL)

    assert done.stdout, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["nan_first"]["of"] == found["finite_in_three"]["of"] == num // 2
    assert found["num_rows"] > 500 * num
    assert [one for one in found["wrong"] if one["nature"] == "nan"] == []
    assert found["finite_in_three"]["right"] >= num // 2 - 1, found["wrong"]
