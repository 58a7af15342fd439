"""Anomalies as records: what the engine knows of a point, put into the public fields."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.kinds import BACKWARD_KINDS, SHARED_KINDS, labels
from sentinel.moments import Moments
from sentinel.native import merge_rows
from sentinel.place import Place
from sentinel.rules.language.schema import Rule

if TYPE_CHECKING:
    from sentinel.step_view import LogicalTensor, StepView

_BACKWARD = labels(BACKWARD_KINDS)
_SHARED = labels(SHARED_KINDS)
"""All data-parallel ranks hold the same of these: no rank's own part moves alone."""
MOVED = 0.5
"""Share of the whole's excursion, in logarithms, from which a rank's own part moved too. Smaller: ranks that moved by chance
are named; larger: a rank that moved less than the others is left out."""
APART = 6.0
"""Median deviations beyond the other ranks from which a part stands apart where most did not move. Smaller: scatter names a
rank; larger: a rank among restless ones is not named."""
MIN_APART = 4
"""Fewest ranks from which their spread is estimated."""
_LOSS_SCALE = re.compile(r"(loss|grad|amp)[._ -]?scale", re.IGNORECASE)


def value_text(value: float) -> str:
    """Return `nan`, `inf` or `-inf` for what JSON cannot hold, else nothing."""
    return "" if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def any_place(view: StepView) -> Place:
    """Return the place of any rank: for the sizes of the axes, which are the run's."""
    for place in view.places.values():
        return place
    return Place()


def _consumers(view: StepView, tensor: LogicalTensor, rank: int | None) -> tuple[str, ...]:
    """Return the modules that read this tensor, without those that on this very rank and step read another one.

    The table of tensors says who reads what as a rule. A module that at times works on a copy of its input is not the one
    whose backward made this gradient when the gradient of its copy is clean.
    """
    if rank is None or tensor.kind not in _BACKWARD or not tensor.consumers:
        return tensor.consumers
    left = tuple(name for name in tensor.consumers if not view.has_clean_input(rank, name))
    # Of an input gradient its own module is left to be suspected; of an output's nobody would be.
    return left if left or tensor.kind == "dgrad_in" else tensor.consumers


def onset(
    view: StepView,
    rule: Rule,
    series: str,
    value: float,
    baseline: float,
    score: float,
    *,
    rank: int | None = None,
    micro_step: int | None = None,
    **said: Any,
) -> Anomaly:
    """Return an onset record: what all say of their step, rule and numbers, and what is `said` of the series.

    series: names it within the run, for the id.
    """
    sizes = any_place(view)
    return Anomaly(
        id=anomaly_id(view.run, view.attempt, view.step, micro_step, rank, series, rule.name),
        run=view.run,
        attempt=view.attempt,
        rank=rank,
        step=view.step,
        micro_step=micro_step,
        rule=rule.name,
        detector=rule.detector,
        value=finite(value),
        value_text=value_text(value),
        baseline=finite(baseline),
        score=finite(score),
        time=view.time,
        dp_size=sizes.dp_size,
        tp_size=sizes.tp_size,
        pp_size=sizes.pp_size,
        ep_size=sizes.ep_size,
        **said,
    )


def tensor_anomaly(
    view: StepView,
    rule: Rule,
    tensor: LogicalTensor,
    statistic: str,
    severity: Severity,
    rank: int | None,
    micro_step: int | None,
    call_id: int | None,
    value: float,
    baseline: float,
    score: float,
    message: str,
    series: str,
) -> Anomaly:
    """Return the onset record of a tensor."""
    place = view.places.get(rank) if rank is not None else None
    return onset(
        view,
        rule,
        f"{series}/{statistic}",
        value,
        baseline,
        score,
        rank=rank,
        micro_step=micro_step,
        ranks=tensor.ranks if rank is None else (rank,),
        pp_stage=tensor.pp_stage,
        vpp_stage=tensor.vpp_stage,
        call_id=call_id,
        tag_name=tensor.name,
        kind=tensor.kind,
        statistic=statistic,
        severity=severity,
        message=message,
        group_mates=tensor.ranks,
        depth=tensor.depth,
        site_pos=int(view.site_pos[tensor.index]),
        place=place.coordinates() if place is not None else dict(tensor.place),
        consumers=_consumers(view, tensor, rank),
        also=tensor.also,
        segment=tensor.segment,
        border=tensor.border,
        communicates=tensor.communicates,
        dtype=tensor.dtype,
    )


def finite(value: float) -> float | None:
    """Return the value, None for what JSON cannot hold."""
    return value if math.isfinite(value) else None


def skip_note(view: StepView) -> str:
    """Return words for a step that the optimizer skipped, else nothing."""
    return "; the optimizer skipped this step" if view.is_skipped else ""


def loss_scale_of(view: StepView) -> float | None:
    """Return the loss scale that was logged for a step, the least of several; None: none was."""
    logged = [value for name, by in view.scalars.items() if _LOSS_SCALE.search(name) for value in by.by_rank.values()]
    return min((value for value in logged if value > 0.0), default=None)


def is_loss_scaling(view: StepView) -> bool:
    """Whether the step was skipped by a loss scaler finding its scale, which overflows on purpose."""
    return view.is_skipped and any(_LOSS_SCALE.search(name) for name in view.scalars)


def moved_ranks(
    own: Mapping[int, float], value: float, baseline: float, usual: Mapping[int, float] | None = None
) -> tuple[int, ...]:
    """Return the ranks whose own part of a value that left its baseline moved with it, rising; empty where nobody knows.

    own: rank -> the statistic of its part alone. usual: rank -> what its part would be at the baseline; None: the baseline.
    A part moved when it went at least half as far as the whole did. Where most parts stayed, those that moved must stand
    apart from the spread of the others: each part is noisier than the whole.
    """
    ranks = sorted(rank for rank, one in own.items() if math.isfinite(one))
    if len(ranks) < 2 or len({own[rank] for rank in ranks}) == 1 or not (math.isfinite(value) and math.isfinite(baseline)):
        return ()  # What is equal to the last bit was reduced: it is no rank's own.
    part = np.array([own[rank] for rank in ranks])
    rest = np.array([baseline if usual is None else usual[rank] for rank in ranks])
    if value > 0 and baseline > 0 and (part > 0).all() and (rest > 0).all():
        whole, went = math.log(value / baseline), np.log(part / rest)
    else:
        whole, went = value - baseline, part - rest
    if whole == 0.0:
        return ()
    far = went / whole
    moved = far >= MOVED
    middle = float(np.median(far))
    if middle < MOVED and len(ranks) >= MIN_APART:
        spread = 1.4826 * float(np.median(np.abs(far - middle)))
        moved &= far > middle + APART * spread
    return tuple(rank for rank, is_it in zip(ranks, moved.tolist(), strict=True) if is_it)


def moved_holders(
    view: StepView, rows: np.ndarray, tensor: LogicalTensor, statistic: str, value: float, baseline: float
) -> tuple[int, ...]:
    """Return the ranks whose own rows of a merged tensor moved with it; empty for what all of them share.

    rows: [n] places of the tensor's rows in the step.
    """
    if tensor.kind in _SHARED or tensor.place or len(rows) < 2 or any_place(view).dp_size <= 1:
        return ()
    ranks, number = np.unique(view.row_rank[rows], return_inverse=True)
    if len(ranks) < 2:
        return ()
    moments = Moments(merge_rows(view.rows[rows], number, len(ranks)))
    own = moments.statistic(statistic)
    share: np.ndarray | float = 1.0
    if statistic == "norm":
        # Of the square of the whole, a part has as much as it has of the elements.
        count, whole = moments.stats["count"].astype(np.float64), float(view.stats["count"][tensor.index])
        share = np.sqrt(count / max(whole, 1.0))
    usual = np.broadcast_to(baseline * share, own.shape)
    named = [int(rank) for rank in ranks]
    parts = dict(zip(named, own.tolist(), strict=True))
    return moved_ranks(parts, value, baseline, dict(zip(named, usual.tolist(), strict=True)))
