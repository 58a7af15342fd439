"""Reads the anomaly records of the Ascend msProbe monitor as anomalies of ours, and sorts as its own tool does."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.kinds import Phase
from sentinel.msprobe_tag import TAG
from sentinel.order.causal import SortKey, sort_key
from sentinel.order.phase import phase_of
from sentinel.place import depth

_MESSAGE = re.compile(
    r"Rule (?P<rule>\w+) reports anomaly signal in \(.*, '(?P<statistic>\w+)'\) at step -?\d+, "
    r"current value (?P<value>\S+?), history mean (?P<mean>\S+?)\.?"
)
_KINDS = {
    "acc_grad": "wgrad_unreduced",
    "pre_grad": "wgrad_unreduced",
    "unreduced": "wgrad_unreduced",
    "post_grad": "wgrad",
    "reduced": "wgrad",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "efxp_avg_sq": "exp_avg_sq",
    "update": "update",
    "ratio": "update_ratio",
    "param": "param",
    "param_origin": "param",
    "param_updated": "param",
}
_STAGES_A_CHUNK = 1 << 16
"""More than any pipeline has: chunks come before stages, the number of which its records do not say."""

_NO_MICRO_STEP = 1 << 62


class MsprobeRecord(msgspec.Struct, gc=False):
    """One record of `anomaly_detected/rank<R>/anomaly.json`, as it stands there."""

    step: int
    tag_name: str = ""
    rank: int = 0
    micro_step: int = 0
    pp_stage: int = 0
    vpp_stage: int = 0
    call_id: int = 0
    message: str = ""
    group_mates: list[int] | None = None


def _number(text: str) -> tuple[float | None, str]:
    """`1.5` -> (1.5, ""), `nan` -> (None, "nan")"""
    plain = text.lower().lstrip("+")
    if plain in ("nan", "inf", "-inf"):
        return None, plain
    try:
        return float(plain), ""
    except ValueError:
        return None, ""


def from_msprobe(record: MsprobeRecord, run: str = "msprobe") -> Anomaly:
    """Return an msProbe record as an Anomaly; `tag_name` and `message` stay as they were.

    A NaN whose history was finite is `critical`. One whose history was NaN from its first step is a `warning`: msProbe
    writes an output that is None as NaN. Turbulence is a lone finite excursion: `info`.
    """
    tag = TAG.fullmatch(record.tag_name)
    metric = tag["metric"] if tag else ""
    slot = tag["slot"] if tag else None
    if metric == "actv":
        kind = "activation_in" if slot == "input" else "activation"
    elif metric == "actv_grad":
        kind = "dgrad_in" if slot == "input" else "dgrad"
    else:
        kind = _KINDS.get(metric, "activation")
    said = _MESSAGE.fullmatch(record.message)
    rule = said["rule"] if said else ""
    value, value_text = _number(said["value"]) if said else (None, "")
    mean, mean_text = _number(said["mean"]) if said else (None, "")
    severity = Severity.INFO
    if value_text:
        severity = Severity.WARNING if mean_text == "nan" else Severity.CRITICAL
    elif rule == "AnomalyNan":
        severity = Severity.WARNING
    statistic = said["statistic"] if said else ""
    identity = (record.step, record.micro_step, record.rank, f"{record.tag_name}/{statistic}/{record.call_id}", rule)
    return Anomaly(
        id=anomaly_id(run, 0, *identity),
        run=run,
        attempt=0,
        rank=record.rank,
        step=record.step,
        micro_step=record.micro_step,
        pp_stage=record.pp_stage,
        vpp_stage=record.vpp_stage,
        call_id=record.call_id,
        tag_name=record.tag_name,
        kind=kind,
        statistic=statistic,
        rule=rule,
        detector=rule,
        severity=severity,
        value=value,
        value_text=value_text,
        baseline=mean,
        message=record.message,
        group_mates=tuple(record.group_mates or ()),
        depth=depth("", record.pp_stage, record.vpp_stage, _STAGES_A_CHUNK),
    )


def msprobe_sort_key(anomaly: Anomaly) -> SortKey:
    """Return the key of msProbe's own order: (step, micro_step, forward/backward/optimizer, stages, call_id).

    Stages count up in forward and down otherwise. Attempts come first, and ties are broken by the causal order.

    Source: msProbe 26.2, monitor/anomaly_processor.py (its key compares call_ids of different ranks).
    """
    phase = phase_of(anomaly.kind, anomaly.tag_name)
    stage = 0 if Phase.FORWARD <= phase <= Phase.METRIC else 1 if phase <= Phase.WGRAD and phase is not Phase.PARAM else 2
    sign = 1 if stage == 0 else -1
    return (
        anomaly.attempt,
        anomaly.step,
        _NO_MICRO_STEP if anomaly.micro_step is None else anomaly.micro_step,
        stage,
        sign * anomaly.vpp_stage,
        sign * anomaly.pp_stage,
        _NO_MICRO_STEP if anomaly.call_id is None else anomaly.call_id,
        *sort_key(anomaly),
    )


def msprobe_key(record: dict[str, Any]) -> str:
    """Return the key under which msProbe files a record: `<tag>_step_<s>_call_<id>`."""
    call = record.get("call_id")
    return f"{record.get('tag_name', '')}_step_{record.get('step')}_call_{'none' if call is None else call}"
