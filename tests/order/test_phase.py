"""Phases of a step: scalars are placed by the names that trainers use."""

from __future__ import annotations

import pytest

from sentinel.order.phase import scalar_phase


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("loss", "LOSS"), ("lm_loss", "LOSS"), ("train/loss", "LOSS"), ("loss_scale", "NORM"), ("grad_norm", "NORM"),
        ("found_inf", "NORM"), ("lr", "SCHEDULE"), ("lr/group0", "SCHEDULE"), ("step_time_s", "FREE"),
        ("tokens", "FREE"), ("accuracy", "METRIC"),
    ],
)  # fmt: skip
def test_scalars_are_placed_by_name(name, phase):
    assert scalar_phase(name).name == phase
