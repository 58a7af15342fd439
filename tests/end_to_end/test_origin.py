"""NaN planted in every n-th (module, phase, micro-batch); the whole sweep is benchmarks/origin_sweep.py."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from ..support.warm import interpreter
from .ranks import ROOT, SMALL


def sweep(layout: str, monitoring: str, every: int, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [
            interpreter(), str(ROOT / "benchmarks" / "origin_sweep.py"), "--json",
            "--layout", layout, "--monitoring", monitoring, "--every", str(every), *options, "--", *SMALL,
        ],
        capture_output=True, text=True, timeout=240, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHON_EXEC": interpreter()},
    )  # fmt: skip
    assert done.stdout, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)[0]
    return found


@pytest.mark.parametrize(
    ("layout", "monitoring", "every", "options"),
    [
        # Monitored from the first step as the interleaved one, on the layout of the one that is monitored late.
        pytest.param("pp2dp2", "on", 11, (), marks=pytest.mark.long),
        pytest.param("pp2dp2", "on", 13, ("--sudden",), marks=pytest.mark.long),
        pytest.param("pp2dp2", "late", 23, (), marks=pytest.mark.long),
        pytest.param("pp2dp2", "late", 11, (), marks=pytest.mark.long),
        pytest.param("pp2dp2", "off", 11, (), marks=pytest.mark.long),
        ("interleaved", "on", 29, ()),
        pytest.param("interleaved", "on", 23, (), marks=pytest.mark.long),
        pytest.param("gpipe", "off", 23, (), marks=pytest.mark.long),
        pytest.param("pp2tp2", "on", 14, (), marks=pytest.mark.long),
        pytest.param("pp2tp2", "off", 13, (), marks=pytest.mark.long),
    ],
)
def test_planted_origin_comes_first(layout: str, monitoring: str, every: int, options: tuple[str, ...]) -> None:
    found = sweep(layout, monitoring, every, *options)

    assert found["cells"] >= 352 // every
    assert found["wrong"] == []
    assert found["steps_with_anomalies_but_nothing_planted"] == []
    if layout == "pp2tp2":
        # The order of each rank's own calls says nothing across ranks: sorted by it, a victim comes first.
        assert found["call_id_alone_names_another_rank"] > 0
