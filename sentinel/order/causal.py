"""Happens-before between anomalies of one run, and the total order that extends it.

The order. Between steps (attempt, step) decides. Inside a step every anomaly has a phase. The
forward and backward phases run in *lanes*, one for each data-parallel replica and micro-step: lanes are concurrent.

    param -> forward -> loss -> backward -> wgrad_unreduced -> wgrad -> norm -> optimizer
             up the depth       down        leaf of its dgrad  all lanes  everybody

The optimizer's state of a parameter precedes what is added to it. Collectives have the program order of their own rank.

A row that was folded over micro-steps, or merged over replicas, stands for a set of events. A precedes B when each part
of A has a part of B behind it: the one reading that stays transitive and never hides a fault of one lane behind a
statistic of all lanes. `is_possible_cause` is the wider, intransitive reading: some part of A is before some part of B.
"""

from __future__ import annotations

from sentinel.anomaly import Anomaly, is_nonfinite
from sentinel.kinds import Phase
from sentinel.order.phase import AFTER_FORWARD, AFTER_LOSS, AFTER_PARAM, CONCURRENT, DATAFLOW
from sentinel.order.position import ALL_LANES, Position, SiteOrder, position

_NO_MICRO_STEP = 1 << 62


def _meets(a: int, b: int) -> bool:
    return a == b or ALL_LANES in (a, b)


def _within(a: int, b: int) -> bool:
    return a == b or b == ALL_LANES


def _is_on_rank(a: Position, b: Position, possibly: bool) -> bool:
    return a.rank == b.rank or b.rank is None or (possibly and a.rank is None)


def _is_earlier_call(a: Position, b: Position) -> bool:
    return a.rank is not None and a.rank == b.rank and a.call is not None and b.call is not None and a.call < b.call


def _is_earlier_site(a: Position, b: Position) -> bool:
    if a.at[0] != b.at[0]:
        return a.at[0] < b.at[0]
    if a.site is SiteOrder.LOCAL or b.site is SiteOrder.LOCAL:
        return a.site is b.site and _is_earlier_call(a, b)
    if a.chunk != b.chunk:
        return False  # Different models: sites of one say nothing of the other's. Calls of one rank do, above.
    if a.at != b.at:
        return a.at < b.at
    if a.site is not b.site:
        return False
    if a.site is not SiteOrder.RANKED and a.slot != b.slot:
        return a.slot < b.slot
    return a.site is not SiteOrder.MERGED and _is_earlier_call(a, b)


def _hangs_off(a: Position, b: Position) -> bool:
    """Tell whether an unreduced weight gradient comes behind a backward of its own lane. It is a leaf."""
    if a.at[0] != b.at[0]:
        return a.at[0] < b.at[0]
    if a.site is SiteOrder.LOCAL or b.site is SiteOrder.LOCAL:
        return a.site is b.site and _is_earlier_call(a, b)
    return a.chunk == b.chunk and a.at <= b.at


def _is_before(a: Position, b: Position, *, possibly: bool) -> bool:
    if a.run != b.run:
        return False
    if a.epoch != b.epoch:
        return a.epoch < b.epoch
    if b.phase is Phase.COMM:
        # The line of code that calls it has no depth: what other ranks did before is not known, so that only the wider
        # reading may relate it to anything but its own kind.
        return (a.phase is Phase.COMM or (possibly and a.phase is not Phase.FREE)) and _is_earlier_call(a, b)
    if b.phase is Phase.OPTIMIZER:
        if a.phase is Phase.OPTIMIZER:
            return a.slot < b.slot and a.tag == b.tag and _is_on_rank(a, b, possibly)
        return a.phase in DATAFLOW or a.phase is Phase.NORM or a.phase is Phase.SCHEDULE
    if a.phase not in DATAFLOW:
        return False
    if b.phase is Phase.NORM:
        return True
    if b.phase is Phase.WGRAD:
        if a.phase is Phase.BACKWARD:
            # Reduced gradients are read when the backward of their chunk is over; they cause nothing in it.
            return a.at[0] <= b.at[0]
        if a.phase is Phase.WGRAD_UNREDUCED:
            return a.tag == b.tag and a.at == b.at and (a.tp is None or b.tp is None or a.tp == b.tp)
        return a.phase is not Phase.WGRAD
    if a.phase is Phase.PARAM:
        if b.phase is Phase.FORWARD:
            return _meets(a.replica, b.replica) and a.at[0] <= b.at[0]
        return b.phase in AFTER_PARAM and _meets(a.replica, b.replica)
    related = _meets if possibly else _within
    if not (related(a.replica, b.replica) and related(a.micro, b.micro)):
        return False
    if a.phase is Phase.FORWARD:
        return _is_earlier_site(a, b) if b.phase is Phase.FORWARD else b.phase in AFTER_FORWARD
    if a.phase is Phase.LOSS:
        return b.phase in AFTER_LOSS
    if a.phase is Phase.BACKWARD:
        if b.phase is Phase.BACKWARD:
            return _is_earlier_site(a, b)
        return b.phase is Phase.WGRAD_UNREDUCED and _hangs_off(a, b)
    return False


def happens_before(a: Anomaly, b: Anomaly) -> bool:
    """Tell whether `a` is before `b`: an irreflexive, transitive relation. False both ways: concurrent."""
    return _is_before(position(a), position(b), possibly=False)


def is_possible_cause(a: Anomaly, b: Anomaly) -> bool:
    """Tell whether some part of `a` is before some part of `b`: wider than `happens_before`, acyclic, intransitive."""
    return _is_before(position(a), position(b), possibly=True)


SortKey = tuple[object, ...]


def sort_key(anomaly: Anomaly) -> SortKey:
    """Return the key of the total order: deterministic, and a linear extension of `happens_before`.

    Concurrent anomalies are ordered by call_id, micro_step, badness, rank and name; never by file order.
    """
    p = position(anomaly)
    micro = _NO_MICRO_STEP if p.micro == ALL_LANES else p.micro
    call = _NO_MICRO_STEP if p.call is None else p.call
    # Program order where there is one; sites, in the order of first appearance, elsewhere.
    is_local = p.site is SiteOrder.LOCAL
    badness = (not is_nonfinite(anomaly), -anomaly.severity.level)
    return (
        *p.epoch,
        int(p.phase),
        p.slot if p.phase is Phase.OPTIMIZER else 0,
        # Where nothing in a phase precedes anything else in it, a chance excursion does not hide what is worse.
        *(badness if p.phase in CONCURRENT else (False, 0)),
        p.at[0],
        not is_local,
        0 if is_local else p.at[1],
        int(p.site),
        p.slot if p.site in (SiteOrder.COUPLED, SiteOrder.MERGED) else 0,
        call,
        micro,
        *badness,
        p.slot,
        _NO_MICRO_STEP if p.rank is None else p.rank,
        p.tag,
        anomaly.kind,
        anomaly.statistic,
        anomaly.rule,
        anomaly.run,
        anomaly.event,
        anomaly.id,
    )
