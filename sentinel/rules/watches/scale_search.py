"""A loss scaler that finds its scale: the first steps overflow by design and are skipped, and some after each raise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.rules.watches.anomaly_records import is_loss_scaling, loss_scale_of
from sentinel.rules.watches.healthy_gradients import GRADIENTS

if TYPE_CHECKING:
    from sentinel.step_view import StepView

SEARCH_STEPS = 40
"""Skipped steps in a row, from the first of an attempt on, that a search may take: 2**40 is more than any loss scale."""
RAISED_STEPS = 200
"""Steps after the scale was raised in which an overflow is put down to the raise: a tenth of GradScaler's interval of 2,000.
More: a fault's overflow passes for the search; fewer: an overflow that a raise brings late is reported."""
MAX_SKIPS = 2
"""Skipped steps in a row that a raise may cost: it doubles the scale, and a skip halves it. Fewer: a raise to twice too much
is reported; more: a fault's overflows pass for the search."""
_BROUGHT = GRADIENTS | {"comm"}
_OF_GRADIENTS = re.compile(r"grad(ient)?s?[._ -]?norm|total_norm|gnorm", re.IGNORECASE)


class ScaleSearch(msgspec.Struct):
    """Knows while a loss scaler tries a scale that may be too high. Kept in the engine's snapshot."""

    attempt: int = -1
    num_first: int = 0
    """Skipped steps since the attempt began; below 0: one was taken."""
    num_skipped: int = 0
    """Skipped steps in a row just now."""
    scale: float = 0.0
    """The newest that was logged; 0: none."""
    num_since_raise: int = RAISED_STEPS
    """Steps since it rose."""

    def see(self, view: StepView) -> bool:
        """Take a step in, and return whether it was skipped by design."""
        if view.attempt != self.attempt:
            self.attempt, self.num_first, self.num_skipped = view.attempt, 0, 0
            self.scale, self.num_since_raise = 0.0, RAISED_STEPS
        self.num_first = self.num_first + 1 if view.is_skipped and self.num_first >= 0 else -1
        self.num_skipped = self.num_skipped + 1 if view.is_skipped else 0
        scale = loss_scale_of(view)
        if scale is not None:
            self.num_since_raise = 0 if 0.0 < self.scale < scale else min(self.num_since_raise + 1, RAISED_STEPS)
            self.scale = scale
        was_raised = self.num_since_raise < RAISED_STEPS and 0 < self.num_skipped <= MAX_SKIPS
        return 0 < self.num_first <= SEARCH_STEPS or was_raised


def written_down_only(view: StepView, found: Sequence[Anomaly]) -> list[Anomaly]:
    """Return a step's anomalies with those as `info` that a search for the loss scale brings: overflows of gradients alone.

    Call it for steps that were skipped by design (`ScaleSearch`). What is bad in the weights, the forward or the loss is no
    matter of the scale, and everything stays as grave as it was.
    """
    bad = [one for one in found if one.event == "onset" and _is_nonfinite(one) and one.severity is not Severity.INFO]
    if not is_loss_scaling(view) or not all(_is_of_gradients(one) for one in bad):
        return list(found)
    ids = {one.id for one in bad}
    note = "; the loss scale is still being found"
    return [
        msgspec.structs.replace(one, severity=Severity.INFO, message=one.message + note) if one.id in ids else one
        for one in found
    ]


def _is_nonfinite(one: Anomaly) -> bool:
    return bool(one.value_text) or one.statistic in ("nans", "infs")


def _is_of_gradients(one: Anomaly) -> bool:
    return one.kind in _BROUGHT or (one.kind == "scalar" and bool(_OF_GRADIENTS.search(one.tag_name)))
