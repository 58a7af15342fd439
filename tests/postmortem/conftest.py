"""A run that went bad in one step, judged, in which ranks logged samples, a checkpoint and a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.messages import EndStep
from sentinel.testing import Nan, SyntheticRun

from ..support.serving import judge_run, small_run

BAD, CHECKPOINT = 30, 20
"""Steps in which a NaN is born, and at which a checkpoint is written."""
MODULE, RANK = "layers.1", 1


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A judged run that is over: a NaN born at step 30 in layers.1 on rank 1, a checkpoint at step 20."""
    run_dir = tmp_path_factory.mktemp("postmortem") / "good"
    observe = SyntheticRun.observe

    def with_samples(self: SyntheticRun, rank: int, step: int) -> tuple[Any, EndStep]:
        rows, end = observe(self, rank, step)
        samples = tuple(f"doc-{rank}-{step}-{at}" for at in range(3))
        activities = ("checkpoint",) if step == CHECKPOINT else ()
        return rows, msgspec.structs.replace(end, samples=samples, activities=activities)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyntheticRun, "observe", with_samples)
        run = small_run(run_dir).plant(Nan(step=BAD, module=MODULE, rank=RANK))
        run.write(60)
        run.end()
    judge_run(run_dir, is_over=True)
    return run_dir
