"""Where an anomaly stands in its step: its phase, its lane, its depth and site. All that the causal order looks at.

The forward and backward phases run in lanes, one for each data-parallel replica and micro-step. A row that was folded
over micro-steps, or merged over replicas, stands in all lanes of that axis.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from sentinel.anomaly import Anomaly
from sentinel.kinds import ROW_OF, Phase, measured_kind
from sentinel.order.phase import phase_of, tensor_name

_NAMED_BY_TENSOR = frozenset({Phase.WGRAD_UNREDUCED, Phase.WGRAD, Phase.OPTIMIZER})
"""Phases in which anomalies are related by the parameter that they are about."""

ALL_LANES = -1
"""Every lane of an axis: the row was merged over it."""


class SiteOrder(enum.IntEnum):
    """How anomalies of one lane and one depth are distinguished.

    A lane of one rank has its program order, call_id: exact also where a module runs twice, or where a tensor was first
    seen late. A lane of several ranks (tensor, context or expert parallel) has the order of sites, which they share.
    The two may disagree, so that between them only depth decides.
    """

    LOCAL = 0
    """The only rank of its lane at this depth: its call_ids order it."""
    RANKED = 1
    """One of several ranks: by site_pos; at one site by call_id, on that rank."""
    COUPLED = 2
    """The same, of a module that exchanges data in its group: its inputs on all ranks precede its outputs on all."""
    MERGED = 3
    """A statistic of several ranks: by site_pos, and at one site by slot."""


class Position(NamedTuple):
    """Where an anomaly stands in its step: all that happens-before looks at."""

    run: str
    epoch: tuple[int, int]
    """(attempt, step)"""
    phase: Phase
    at: tuple[int, int]
    """(depth, site_pos), negated where the backward runs down, so that smaller is always earlier."""
    replica: int
    """Lane of the data-parallel axis, or ALL_LANES."""
    micro: int
    """Lane of the micro-steps, or ALL_LANES."""
    site: SiteOrder
    slot: int
    rank: int | None
    call: int | None
    tag: str
    tp: int | None
    chunk: int = 0
    """vpp_stage. Two chunks of one depth are of different models: in a pipeline no two have the same."""


def _replica(anomaly: Anomaly) -> int:
    if anomaly.dp_size <= 1:
        return 0
    dp = anomaly.place.get("dp")
    if dp is None:
        return ALL_LANES if anomaly.rank is None else -3 - anomaly.rank
    # Experts are exchanged among neighbours of the data-parallel axis: those ranks poison each other in forward.
    ep_size = anomaly.ep_size
    if ep_size > 1 and anomaly.place.get("ep") == dp % ep_size:
        return dp - dp % ep_size
    return dp


def position(anomaly: Anomaly) -> Position:
    """Return where an anomaly stands in its step."""
    phase = phase_of(anomaly.kind, anomaly.tag_name)
    if phase is Phase.WGRAD and anomaly.num_members:
        phase = Phase.NORM  # of a group of gradients: each of them may be its cause
    runs_down = Phase.BACKWARD <= phase <= Phase.WGRAD
    at = (-anomaly.depth, -anomaly.site_pos) if runs_down else (anomaly.depth, anomaly.site_pos)
    micro = ALL_LANES if anomaly.micro_step is None else anomaly.micro_step
    if phase is Phase.COMM:
        at, micro, site = (0, 0), ALL_LANES, SiteOrder.LOCAL
    elif anomaly.rank is None or anomaly.call_id is None:
        site = SiteOrder.COUPLED if anomaly.communicates else SiteOrder.MERGED
    elif anomaly.tp_size <= 1 and anomaly.ep_size <= 1 and "cp" not in anomaly.place:
        site = SiteOrder.LOCAL
    else:
        site = SiteOrder.COUPLED if anomaly.communicates else SiteOrder.RANKED
    row = ROW_OF.get(measured_kind(anomaly.kind, anomaly.tag_name))
    return Position(
        anomaly.run,
        (anomaly.attempt, anomaly.step),
        phase,
        at,
        _replica(anomaly),
        micro,
        site,
        row.slot if row is not None else 0,
        anomaly.rank,
        anomaly.call_id,
        tensor_name(anomaly.tag_name) if phase in _NAMED_BY_TENSOR else anomaly.tag_name,
        anomaly.place.get("tp"),
        anomaly.vpp_stage,
    )


ObservationKey = tuple[object, ...]


def observation_key(anomaly: Anomaly) -> ObservationKey:
    """Return the key of the observation that an anomaly is about: a tensor or logged value, when, and on which rank.

    Anomalies of one key are one place, whatever rule or statistic reported it. Ranks of one tensor- or context-parallel
    group that log the same finite number log one number.
    """
    whose: object = anomaly.rank
    if anomaly.kind == "scalar" and anomaly.rank is not None and anomaly.value is not None and anomaly.place:
        replica = tuple(sorted((axis, at) for axis, at in anomaly.place.items() if axis not in ("tp", "cp")))
        whose = (replica, anomaly.value)
    call = anomaly.call_id if anomaly.kind == "comm" else None
    when = (anomaly.run, anomaly.attempt, anomaly.step, anomaly.micro_step, call)
    return (*when, anomaly.kind, anomaly.tag_name, anomaly.pp_stage, anomaly.vpp_stage, whose)
