"""What each rank measured itself: taken in one pass of C, or in numpy, with the same bits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from sentinel import native
from sentinel.ingest import own_rows
from sentinel.ingest.merge import ClosedStep
from sentinel.testing import SyntheticRun

from ..support.closed_steps import FollowedRun

KINDS = ("activation", "activation_in", "wgrad_unreduced")


def disturbed(view: ClosedStep, rng: np.random.Generator) -> ClosedStep:
    """The step with rows that are empty, not finite, all not finite, enormous and tiny; and others that are not there."""
    parts = []
    for part in view.parts:
        rows = part.rows.copy()
        kind = rng.integers(0, 12, len(rows))
        for name in ("count", "num_nan", "num_pos_inf", "num_neg_inf"):
            rows[name][kind == 0] = 0
        rows["num_nan"][kind == 1] = 3
        rows["num_neg_inf"][kind == 2], rows["count"][kind == 2] = 5, 0
        rows["mean"][kind == 3], rows["m2"][kind == 4] = 1e300, 1e-310
        rows["m2"][kind == 5] = np.inf
        parts.append(msgspec.structs.replace(part, rows=rows[kind != 6]))
    return ClosedStep(run=view.run, attempt=0, step=view.step, layout=view.layout, parts=parts)


@pytest.mark.skipif(native.take_rms is None, reason="the C library was not built")
@pytest.mark.parametrize("per_micro_step", [False, True], ids=["one row each", "several rows each"])
def test_values_are_those_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_micro_step: bool) -> None:
    run = SyntheticRun(tmp_path / "run", pp=2, dp=2, tp=2, per_micro_step=per_micro_step)
    run.write(1)
    run.end()
    (view,) = FollowedRun(run.directory).finish()
    rng, taken = np.random.default_rng(1), list[bool]()
    take_rms = native.take_rms
    assert take_rms is not None

    def noted(parts: bytes, num_parts: int, place: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        found = take_rms(parts, num_parts, place)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(native, "take_rms", noted)
    for _ in range(20):
        step = disturbed(view, rng)
        watched = np.array([one.kind in KINDS for one in step.tensors]) & (rng.random(len(step.tensors)) < 0.7)
        is_in_all = np.array([one.kind == KINDS[2] for one in step.tensors])
        index = own_rows.OwnRowIndex(step.layout, watched, is_in_all & (rng.random() < 0.5))
        found = index.values(step, "rms")
        with monkeypatch.context() as patch:
            patch.setattr(native, "take_rms", None)
            expected = index.values(step, "rms")
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]
        assert np.isnan(found[0]).any() and np.isfinite(found[0]).any() and (per_micro_step or (found[1] == 0).any())
    assert len(taken) == 20 and (not any(taken) if per_micro_step else sum(taken) > 5), "several rows are merged in numpy"
