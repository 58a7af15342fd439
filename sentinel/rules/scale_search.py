"""A loss scaler that finds its scale: the first steps of a run overflow by design, and are skipped until none does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.rules.facts import GRADIENT_KINDS, is_loss_scaling

if TYPE_CHECKING:
    from sentinel.ingest.merge import StepView

SEARCH_STEPS = 40
"""Skipped steps in a row, from the first of an attempt on, that a search may take (chosen): 2**40 is more than any scale."""
_BROUGHT = GRADIENT_KINDS | {"comm"}
_OF_GRADIENTS = re.compile(r"grad(ient)?s?[._ -]?norm|total_norm|gnorm", re.IGNORECASE)


def written_down_only(view: StepView, found: Sequence[Anomaly]) -> list[Anomaly]:
    """Return a step's anomalies with those as `info` that a search for the loss scale brings: overflows of gradients alone.

    Call it for the skipped steps before the first that was not. What is bad in the weights, the forward or the loss is no
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
