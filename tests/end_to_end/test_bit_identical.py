"""Training with Sentinel is training without it, to the last bit, and what it says of the gradients is true."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from sentinel.monitor_config import MEASURED_LABELS

from ..support.spools import SaidSoFar
from .ranks import train_example

NUM_STEPS, SKIPPED, CLIP = 5, 2, 0.05
FAULTS = [{"module": "blocks.1.mlp.fc1", "dp_rank": 1, "micro_step": 2, "steps": [SKIPPED]}]

EVERYTHING = {
    "kinds": list(MEASURED_LABELS), "per_micro_step": True,
    "probes": {kind: {"histogram": True} for kind in ("activation", "wgrad", "update")},
}  # fmt: skip
"""Every probe there is, with histograms."""


def truth(folder: Path, num_ranks: int) -> list[dict[str, list[str]]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("num_ranks", "pp"),
    # Pipelines are bit-identical in tests/layouts too, though not with every probe.
    [pytest.param(2, 1, id="data parallel"), pytest.param(4, 2, id="pipeline x data parallel", marks=pytest.mark.long)],
)
def test_bit_identical_training(num_ranks: int, pp: int, tmp_path: Path) -> None:
    arguments = ("--steps", str(NUM_STEPS), "--pp", str(pp), "--clip", str(CLIP), "--lr-schedule", "cosine")
    train = functools.partial(train_example, num_ranks=num_ranks, faults=FAULTS, is_judged=False)
    bare = tmp_path / "bare"
    train(bare, *arguments, "--truth", str(bare), "--no-sentinel")
    expected = truth(bare, num_ranks)
    norms = [float.fromhex(norm) for norm in expected[0]["norms"]]
    assert [step for step, norm in enumerate(norms) if not math.isfinite(norm)] == [SKIPPED]
    assert min(norm for norm in norms if math.isfinite(norm)) > 2 * CLIP

    seen = tmp_path / "seen"
    run = train(seen, *arguments, "--truth", str(seen), config=EVERYTHING)
    off = tmp_path / "off"
    train(off, *arguments, "--truth", str(off), environment={"SENTINEL_DISABLE": "1"})

    assert truth(seen, num_ranks) == expected
    assert truth(off, num_ranks) == expected
    assert not (off / "run").exists()
    for rank in range(num_ranks):
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
