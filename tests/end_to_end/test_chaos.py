"""A daemon amid whatever goes wrong: nothing is lost, nothing is told that did not happen, and a repeat says so."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from chaos import FAULTS, campaign


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["close", "kill", "full", "page", "stop", "header"], id="six faults"),
        pytest.param(sorted(FAULTS) * 2, id="each twice, long", marks=pytest.mark.long),
    ],
)
def test_chaos_loses_nothing_and_tells_nothing_false(tmp_path: Path, names: list[str]) -> None:
    outcome = campaign(tmp_path, names, 200, random.Random(7))

    assert outcome.differences == []
    assert outcome.num_lines > 20
    assert outcome.num_heard >= 5
    assert outcome.done.total() >= len(names) - 4
