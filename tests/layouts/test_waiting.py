"""Who arrives last at the collectives: every step is equally long, and only the slow rank does not wait."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ..support.closed_steps import closed_steps
from .builds import ddp, fsdp2, pipeline, tp
from .layout import Trainer, train_ranks

SLOW, SLEEP_S = 1, 0.25


def with_straggler(build: Any) -> Trainer:
    trainer: Trainer = build()
    if dist.get_rank() == SLOW:
        inner = trainer.train_step

        def train_step(step: int) -> Any:
            hooks = [
                next(iter(model.modules())).register_forward_pre_hook(lambda module, args: time.sleep(SLEEP_S))
                for model in trainer.models
            ]
            result = inner(step)
            for hook in hooks:
                hook.remove()
            return result

        trainer.train_step = train_step
    return trainer


GPIPE = partial(pipeline, "ScheduleGPipe", micro=2)


@pytest.mark.parametrize(("build", "world"), [(ddp, 3), (fsdp2, 3), (GPIPE, 2), (tp, 2)])
def test_only_the_slow_rank_does_not_wait(build: Any, world: int, tmp_path: Path) -> None:
    train_ranks(tmp_path, partial(with_straggler, build), world, config={"kinds": ["param"]}, num_steps=5)

    views = closed_steps(tmp_path / "run")

    assert len(views) == 5
    for view in views[2:4]:  # DDP orders its buckets anew, and waits, between the first two; the last step has no next one
        ends = {part.rank: part.end_step for part in view.parts}
        busy = {rank: end.step_time_s - end.wait_s for rank, end in ends.items()}
        assert max(busy, key=lambda rank: busy[rank]) == SLOW
        assert busy[SLOW] > 0.9 * SLEEP_S
        for rank, end in ends.items():
            if rank != SLOW:
                assert end.wait_s > 0.5 * SLEEP_S, (view.step, rank, end)
