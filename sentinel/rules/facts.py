"""Anomalies as records: what the engine knows of a point, put into the public fields."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.place import Place
from sentinel.rules.schema import Rule

if TYPE_CHECKING:
    from sentinel.ingest.merge import LogicalTensor, StepView

FORWARD_KINDS = frozenset({"activation_in", "activation", "residual", "attention"})
GRADIENT_KINDS = frozenset({"wgrad", "wgrad_unreduced", "dgrad", "dgrad_in"})
_LOSS_SCALE = re.compile(r"(loss|grad|amp)[._ -]?scale", re.IGNORECASE)


def value_text(value: float) -> str:
    """Return `nan`, `inf` or `-inf` for what JSON cannot hold, else nothing."""
    return "" if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def any_place(view: StepView) -> Place:
    """Return the place of any rank: for the sizes of the axes, which are the run's."""
    return next(iter(view.places.values()), Place())


def _consumers(view: StepView, tensor: LogicalTensor, rank: int | None) -> tuple[str, ...]:
    """Return the modules that read this tensor, without those that on this very rank and step read another one.

    The table of tensors tells who reads what as a rule. A module that at times works on a copy of its input is not the one
    whose backward made this gradient when the gradient of its copy is clean.
    """
    if rank is None or tensor.kind not in ("dgrad", "dgrad_in") or not tensor.consumers:
        return tensor.consumers
    left = tuple(name for name in tensor.consumers if (rank, name) not in view.clean_inputs)
    # Of an input gradient its own module is left to be suspected; of an output's nobody would be.
    return left if left or tensor.kind == "dgrad_in" else tensor.consumers


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
    sizes = any_place(view)
    return Anomaly(
        id=anomaly_id(view.run, view.attempt, view.step, micro_step, rank, f"{series}/{statistic}", rule.name),
        run=view.run,
        attempt=view.attempt,
        rank=rank,
        ranks=tensor.ranks if rank is None else (rank,),
        step=view.step,
        micro_step=micro_step,
        pp_stage=tensor.pp_stage,
        vpp_stage=tensor.vpp_stage,
        call_id=call_id,
        tag_name=tensor.name,
        kind=tensor.kind,
        statistic=statistic,
        rule=rule.name,
        detector=rule.detector,
        severity=severity,
        value=finite(value),
        value_text=value_text(value),
        baseline=finite(baseline),
        score=finite(score),
        message=message,
        group_mates=tensor.ranks,
        time=view.time,
        depth=tensor.depth,
        site_pos=int(view.site_pos[tensor.index]),
        place=place.coordinates() if place is not None else dict(tensor.place),
        consumers=_consumers(view, tensor, rank),
        also=tensor.also,
        segment=tensor.segment,
        border=tensor.border,
        communicates=tensor.communicates,
        dp_size=sizes.dp_size,
        tp_size=sizes.tp_size,
        pp_size=sizes.pp_size,
        ep_size=sizes.ep_size,
        dtype=tensor.dtype,
    )


def finite(value: float) -> float | None:
    """Return the value, None for what JSON cannot hold."""
    return value if math.isfinite(value) else None


def skip_note(view: StepView) -> str:
    """Return words for a step that the optimizer skipped, else nothing."""
    return "; the optimizer skipped this step" if view.is_skipped else ""


def is_loss_scaling(view: StepView) -> bool:
    """Whether the step was skipped by a loss scaler finding its scale, which overflows on purpose."""
    return view.is_skipped and any(_LOSS_SCALE.search(name) for name in view.scalars)
