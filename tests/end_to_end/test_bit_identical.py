"""Training with Sentinel is training without it, to the last bit, and what it says of the gradients is true."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from sentinel.monitor_config import MEASURED_LABELS

from ..support.spools import SaidSoFar
from .ranks import train_example

NUM_STEPS, SKIPPED, CLIP = 7, 4, 0.05
FAULTS = [{"module": "blocks.1.mlp.fc1", "dp_rank": 1, "micro_step": 2, "steps": [SKIPPED]}]
ARGUMENTS = ("--steps", str(NUM_STEPS), "--clip", str(CLIP), "--lr-schedule", "cosine")

EVERYTHING = {
    "kinds": list(MEASURED_LABELS), "per_micro_step": True,
    "probes": {kind: {"histogram": True} for kind in ("activation", "wgrad", "update")},
}  # fmt: skip
"""Every probe there is, with histograms."""


def truth(folder: Path) -> dict[int, dict[str, list[str]]]:
    return {rank: json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)}


@pytest.mark.timeout(400)
def test_bit_identical_training(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    train_example(bare, *ARGUMENTS, "--truth", str(bare), "--no-sentinel", faults=FAULTS, is_judged=False)
    expected = truth(bare)
    norms = [float.fromhex(norm) for norm in expected[0]["norms"]]
    assert [step for step, norm in enumerate(norms) if not math.isfinite(norm)] == [SKIPPED]
    assert min(norm for norm in norms if math.isfinite(norm)) > 2 * CLIP

    seen = tmp_path / "seen"
    run = train_example(
        seen, *ARGUMENTS, "--truth", str(seen),
        faults=FAULTS, config=EVERYTHING, is_judged=False,
    )  # fmt: skip
    off = tmp_path / "off"
    train_example(
        off, *ARGUMENTS, "--truth", str(off), faults=FAULTS, is_judged=False, environment={"SENTINEL_DISABLE": "1"}
    )

    assert truth(seen) == expected
    assert truth(off) == expected
    assert not (off / "run").exists()
    for rank in range(4):
        assert_wgrads_are_the_unclipped_truth(SaidSoFar(run.run_dir, rank), seen / f"rank{rank}", expected[rank]["names"])


def assert_wgrads_are_the_unclipped_truth(spoken: SaidSoFar, path: Path, names: list[str]) -> None:
    gradients = np.load(path.with_suffix(".npz"))["gradients"]
    assert sorted(spoken.ends) == list(range(NUM_STEPS))
    for step in range(NUM_STEPS):
        rows = spoken.of(step, "wgrad")
        assert set(rows) == set(names)
        assert spoken.ends[step].is_skipped == (step == SKIPPED)
        for name, (norm, total) in zip(names, gradients[step], strict=True):
            row = rows[name]
            if math.isfinite(norm):
                count, mean = int(row["count"]), float(row["mean"])
                assert math.sqrt(row["m2"] + count * mean**2) == pytest.approx(norm, rel=1e-5)
                assert count * mean == pytest.approx(total, rel=1e-5, abs=1e-5 * norm * math.sqrt(count))
            else:
                assert row["num_nan"] > 0
