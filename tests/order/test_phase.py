"""Phases of a step: scalars are placed by the names that trainers use."""

from __future__ import annotations

import pytest

from sentinel.order.phase import scalar_phase


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("loss", "LOSS"), ("lm_loss", "LOSS"), ("train/loss", "LOSS"), ("loss_scale", "NORM"), ("grad_norm", "NORM"),
        ("found_inf", "NORM"), ("lr", "SCHEDULE"), ("lr/group0", "SCHEDULE"), ("step_time_s", "FREE"),
        ("tokens", "FREE"), ("accuracy", "METRIC"), ("lm loss", "LOSS"), ("loss/train", "LOSS"), ("clip_loss", "LOSS"),
        ("loss_metrics/global_avg_loss", "LOSS"), ("train/PPL", "LOSS"), ("optim/LR (group 0)", "SCHEDULE"),
        ("learning rate", "SCHEDULE"), ("optim/total grad norm", "NORM"), ("num zeros", "NORM"), ("loss scale", "NORM"),
        ("params norm", "OPTIMIZER"), ("eval_loss", "FREE"), ("val/loss", "FREE"), ("iteration time (ms)", "FREE"),
        ("clip_frac", "METRIC"), ("contest", "METRIC"),
    ],
)  # fmt: skip
def test_scalars_are_placed_by_name(name, phase):
    assert scalar_phase(name).name == phase
