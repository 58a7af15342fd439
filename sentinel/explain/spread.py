"""How an incident spread, anomaly by anomaly along the causal order, and at which pass of which rank each was made."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from sentinel.anomaly import Anomaly, is_nonfinite
from sentinel.anomaly_words import place_words
from sentinel.explain.cascade import PHASE_WORDS
from sentinel.explain.pass_order import BACKWARD, FORWARD
from sentinel.kinds import Phase
from sentinel.order.causal import sort_key
from sentinel.order.phase import phase_of

_WAYS = {Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD, Phase.WGRAD_UNREDUCED: BACKWARD}


class SpreadEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One anomaly on the way that a fault took."""

    id: str
    step: int
    mark: str
    """`cause` (a first cause), `nonfinite` or `finite`."""
    phase: str
    """In words: `forward`, `gradients`, `optimizer`, ..."""
    way: str
    """Which passes it was made in, `F` or `B`; empty: it belongs to the step and to no pass."""
    ranks: tuple[int, ...]
    """The rank whose own row shows it, or those whose rows were merged."""
    pp_stage: int
    vpp_stage: int
    micro_step: int | None
    """None: it belongs to none, or is of a row that was folded over several."""
    name: str
    kind: str
    severity: str
    what: str
    """The anomaly in words."""


def spread_of(members: Sequence[Anomaly], causes: Collection[str]) -> list[SpreadEvent]:
    """Return the onsets among an incident's anomalies in the causal order. causes: ids of its first causes."""
    return [_event(one, causes) for one in sorted(members, key=sort_key) if one.event == "onset"]


def _event(one: Anomaly, causes: Collection[str]) -> SpreadEvent:
    phase = phase_of(one.kind, one.tag_name)
    ranks = (one.rank,) if one.rank is not None else one.ranks or one.group_mates
    return SpreadEvent(
        id=one.id,
        step=one.step,
        mark="cause" if one.id in causes else "nonfinite" if is_nonfinite(one) else "finite",
        phase=PHASE_WORDS[phase],
        way="" if one.num_members else _WAYS.get(phase, ""),
        ranks=tuple(ranks),
        pp_stage=one.pp_stage,
        vpp_stage=one.vpp_stage,
        micro_step=one.micro_step,
        name=one.tag_name,
        kind=one.kind,
        severity=one.severity.value,
        what=place_words(one),
    )
