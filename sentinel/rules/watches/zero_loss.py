"""What looks ill by itself and is well beside what else the step measured: a loss that is exactly zero, or stands still."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly, Severity
from sentinel.rules.watches.healthy_gradients import GRADIENTS

if TYPE_CHECKING:
    from sentinel.step_view import StepView


_LOSS = re.compile(r"(?:^|[/. _-])(?:loss|nll)(?![/. _-]?scale)|cross_entropy", re.IGNORECASE)


def well_beside_the_step(view: StepView, found: Sequence[Anomaly]) -> list[Anomaly]:
    """Return a step's anomalies with those as `info` that the step's other measurements explain.

    A loss of 0.0, or one that repeats, hides no NaN where weight gradients were measured and all were finite. Gradients of a
    loss that is exactly 0.0 (a hinge that no sample violates) are zero by right.
    """
    return [_as_note(one, why) if (why := _explained(view, one)) else one for one in found]


def _explained(view: StepView, one: Anomaly) -> str:
    if one.event != "onset" or one.severity is Severity.INFO:
        return ""
    if one.detector == "HiddenNan" and _has_finite_gradients(view):
        return "; all gradients measured in this step were finite"
    if one.detector == "DeadTensor" and one.kind in GRADIENTS and _is_loss_zero(view):
        return "; the loss of this step is exactly 0"
    return ""


def _has_finite_gradients(view: StepView) -> bool:
    is_gradient = np.array([tensor.kind == "wgrad" for tensor in view.tensors], np.bool_)
    return bool((is_gradient & view.present).any()) and not (is_gradient & view.is_bad).any()


def _is_loss_zero(view: StepView) -> bool:
    losses = [scalar.mean for name, scalar in view.scalars.items() if _LOSS.search(name)]
    return bool(losses) and not np.any(losses)


def _as_note(one: Anomaly, why: str) -> Anomaly:
    return msgspec.structs.replace(one, severity=Severity.INFO, message=one.message + why)
