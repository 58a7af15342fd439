"""What of many anomalies came first: the first causes, the one to call the root, and how far they reach.

Minimal elements of the causal order, found without comparing every pair: a step's anomalies are gathered by lane.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from sentinel.anomaly import Anomaly, Severity, is_nonfinite
from sentinel.kinds import Phase
from sentinel.order.causal import sort_key
from sentinel.order.phase import AFTER_LOSS, AFTER_PARAM, DATAFLOW
from sentinel.order.position import ALL_LANES, Position, SiteOrder, position

_ANY = -2
"""Key under which all lanes of an axis are gathered."""


def first_causes(anomalies: Sequence[Anomaly]) -> list[int]:
    """Return the indices of the minimal elements of `happens_before`, in the total order; near-linear time."""
    return _minimal(anomalies, possibly=False)


def leading_causes(anomalies: Sequence[Anomaly]) -> list[int]:
    """Return the indices of what most deserves to be called the root, in the total order; its first is the root.

    Among the worst (most severe, non-finite before finite) those that none of the others can possibly have caused.
    A chance excursion of one tensor precedes many a fault without having made it, and a NaN is not made by one.

    Finite ones that are corroborated, or meant to page, are equals: that the loss jumped is graver than that a tensor did,
    and comes of it.
    """
    if not anomalies:
        return []
    badness = [(a.severity.level, is_nonfinite(a)) for a in anomalies]
    worst = max(badness)
    least = min(worst, (Severity.WARNING.level, False)) if not worst[1] else worst
    pool = [i for i, bad in enumerate(badness) if bad[1] == worst[1] and bad >= least]
    of_pool = [anomalies[i] for i in pool]
    return [pool[i] for i in _without_what_came_by_wire(of_pool, _minimal(of_pool, possibly=True))]


def _without_what_came_by_wire(anomalies: Sequence[Anomaly], causes: list[int]) -> list[int]:
    """Return of the causes those that no collective of their own rank brought, all that are left being collectives else.

    A collective whose result is bad, and what this rank gave it was not, brought what is bad on its rank after it: from
    another rank, on which a cause is left, or from the wire itself.
    """
    calls = [i for i in causes if anomalies[i].kind == "comm"]
    others = [i for i in causes if anomalies[i].kind != "comm"]
    if not calls or not others:
        return causes
    brought: dict[int, int] = {}
    born = []
    for i in calls:
        # Had it been given what is bad, that row would come before this one, and this one would be no cause.
        one = anomalies[i]
        if one.rank is not None and one.call_id is not None and one.tag_name.rpartition(":")[2].startswith("out"):
            brought[one.rank] = min(one.call_id, brought.get(one.rank, one.call_id))
            born.append(i)

    def is_brought(one: Anomaly) -> bool:
        return one.rank in brought and one.call_id is not None and brought[one.rank] < one.call_id

    left = [i for i in others if not is_brought(anomalies[i])]
    return left or sorted(born, key=lambda i: sort_key(anomalies[i]))


def _minimal(anomalies: Sequence[Anomaly], *, possibly: bool) -> list[int]:
    positions = [position(a) for a in anomalies]
    earliest: dict[str, tuple[int, int]] = {}
    for p in positions:
        if p.run not in earliest or p.epoch < earliest[p.run]:
            earliest[p.run] = p.epoch
    by_run: dict[str, list[int]] = {}
    for i, p in enumerate(positions):
        if p.epoch == earliest[p.run]:
            by_run.setdefault(p.run, []).append(i)
    minimal = []
    for indices in by_run.values():
        step = _StepTable(positions[i] for i in indices)
        minimal += [i for i in indices if not step.has_predecessor(positions[i], possibly)]
    return sorted(minimal, key=lambda i: sort_key(anomalies[i]))


class _StepTable:
    """The least of everything in one step, gathered by lane, so that one look-up decides whether anything is before."""

    def __init__(self, positions: Iterable[Position]) -> None:
        self.num_phase: Counter[Phase] = Counter()
        self.param_depth: dict[int, int] = {}
        self.depth: dict[tuple[Phase, int, int], int] = {}
        self.floor: dict[tuple[object, ...], tuple[int, int]] = {}
        """Least (depth, site_pos) of a lane and chunk, of those that sites order."""
        self.any_floor: dict[tuple[object, ...], tuple[int, int]] = {}
        """The same, of all."""
        self.least: dict[tuple[object, ...], int] = {}
        self.unreduced: defaultdict[tuple[str, tuple[int, int]], set[int | None]] = defaultdict(set)
        for p in positions:
            self.num_phase[p.phase] += 1
            if p.phase is Phase.PARAM:
                for replica in (p.replica, _ANY):
                    self.param_depth[replica] = min(p.at[0], self.param_depth.get(replica, p.at[0]))
            elif p.phase is Phase.WGRAD_UNREDUCED:
                self.unreduced[p.tag, p.at].add(p.tp)
            elif p.phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
                for replica in (p.replica, _ANY):
                    for micro in (p.micro, _ANY):
                        self._gather((p.phase, replica, micro), p)
            elif p.phase is Phase.OPTIMIZER:
                for rank in (p.rank, _ANY):
                    self._lower((Phase.OPTIMIZER, p.tag, rank), p.slot)
            if p.rank is not None and p.call is not None and p.phase is not Phase.FREE:
                self._lower((Phase.COMM, _ANY, p.rank), p.call)
                if p.phase is Phase.COMM:
                    self._lower((Phase.COMM, p.rank), p.call)

    def _lower(self, key: tuple[object, ...], value: int) -> None:
        known = self.least.get(key)
        if known is None or value < known:
            self.least[key] = value

    def _gather(self, lane: tuple[Phase, int, int], p: Position) -> None:
        self.depth[lane] = min(p.at[0], self.depth.get(lane, p.at[0]))
        chunk = (lane, p.chunk)
        self.any_floor[chunk] = min(p.at, self.any_floor.get(chunk, p.at))
        if p.site is SiteOrder.LOCAL:
            assert p.call is not None
            self._lower((lane, p.at[0], p.rank), p.call)
            return
        self.floor[chunk] = min(p.at, self.floor.get(chunk, p.at))
        if p.site is not SiteOrder.RANKED:
            self._lower((chunk, p.at, p.site), p.slot)
        if p.site is not SiteOrder.MERGED and p.rank is not None and p.call is not None:
            slot = p.slot if p.site is SiteOrder.COUPLED else 0
            self._lower((chunk, p.at, p.site, slot, p.rank), p.call)

    def _param_depths(self, replica: int) -> list[int]:
        keys = (_ANY,) if replica == ALL_LANES else (replica, ALL_LANES)
        return [self.param_depth[key] for key in keys if key in self.param_depth]

    def _has_earlier_state(self, p: Position, possibly: bool) -> bool:
        """Tell whether something of the optimizer is before `p`, of the same parameter."""
        ranks = (_ANY,) if p.rank is None else (p.rank, None) if possibly else (p.rank,)
        return any(self.least.get((Phase.OPTIMIZER, p.tag, rank), p.slot) < p.slot for rank in ranks)

    def has_predecessor(self, p: Position, possibly: bool, *, loosely: bool = False) -> bool:
        """Tell whether anything gathered here is before `p`.

        loosely: site_pos counts also between an observation that program order orders and one that sites do.
        """
        count = self.num_phase
        if p.phase is Phase.COMM:
            key = (Phase.COMM, _ANY, p.rank) if possibly else (Phase.COMM, p.rank)
            return p.rank is not None and p.call is not None and self.least.get(key, p.call) < p.call
        if p.phase is Phase.OPTIMIZER:
            is_behind = any(count[phase] for phase in (*DATAFLOW, Phase.NORM, Phase.SCHEDULE))
            return is_behind or self._has_earlier_state(p, possibly)
        if p.phase is Phase.NORM:
            return any(count[phase] for phase in DATAFLOW)
        if p.phase is Phase.WGRAD:
            if count[Phase.PARAM] or count[Phase.FORWARD] or count[Phase.LOSS]:
                return True
            if self.depth.get((Phase.BACKWARD, _ANY, _ANY), 1 << 62) <= p.at[0]:
                return True
            groups = self.unreduced.get((p.tag, p.at), ())
            return bool(groups) and (p.tp is None or None in groups or p.tp in groups)
        if p.phase not in AFTER_PARAM and p.phase is not Phase.FORWARD:
            return False
        depths = self._param_depths(p.replica)
        if depths and (p.phase is not Phase.FORWARD or min(depths) <= p.at[0]):
            return True
        for replica in _keys(p.replica, possibly):
            for micro in _keys(p.micro, possibly):
                if p.phase is not Phase.FORWARD and (Phase.FORWARD, replica, micro) in self.depth:
                    return True
                if p.phase in AFTER_LOSS and (Phase.LOSS, replica, micro) in self.depth:
                    return True
                own = Phase.BACKWARD if p.phase is Phase.WGRAD_UNREDUCED else p.phase
                if own in (Phase.FORWARD, Phase.BACKWARD) and self._has_earlier_site((own, replica, micro), p, loosely):
                    return True
        return False

    def _has_earlier_site(self, lane: tuple[Phase, int, int], p: Position, loosely: bool) -> bool:
        if lane not in self.depth:
            return False
        chunk = (lane, p.chunk)
        if self.depth[lane] < p.at[0] or (loosely and self.any_floor.get(chunk, p.at) < p.at):
            return True
        if p.site is SiteOrder.LOCAL:
            assert p.call is not None
            return self.least.get((lane, p.at[0], p.rank), p.call) < p.call
        floor = self.floor.get(chunk)
        if floor is None or floor > p.at:
            return False
        if floor < p.at or p.phase is Phase.WGRAD_UNREDUCED:
            return True
        if p.site is not SiteOrder.RANKED and self.least.get((chunk, p.at, p.site), p.slot) < p.slot:
            return True
        if p.site is SiteOrder.MERGED or p.rank is None or p.call is None:
            return False
        slot = p.slot if p.site is SiteOrder.COUPLED else 0
        return self.least.get((chunk, p.at, p.site, slot, p.rank), p.call) < p.call


def _keys(lane: int, possibly: bool) -> tuple[int, ...]:
    if lane == ALL_LANES:
        return (_ANY,)
    return (lane, ALL_LANES) if possibly else (lane,)


def reached_by(causes: Iterable[Anomaly], anomalies: Iterable[Anomaly]) -> list[bool]:
    """Return of each anomaly whether it comes after any of some causes, as far as that is known; near-linear time."""
    sources: dict[tuple[str, tuple[int, int]], list[Position]] = {}
    for cause in causes:
        p = position(cause)
        sources.setdefault((p.run, p.epoch), []).append(p)
    tables = {key: _StepTable(positions) for key, positions in sources.items()}
    found = []
    for anomaly in anomalies:
        p = position(anomaly)
        found.append(
            any(run == p.run and epoch < p.epoch for run, epoch in tables)
            or ((p.run, p.epoch) in tables and tables[p.run, p.epoch].has_predecessor(p, possibly=True, loosely=True))
        )
    return found


class BlastRadius(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from some causes, as counts of anomalies."""

    num_anomalies: int
    by_kind: dict[str, int]
    by_stage: dict[int, int]
    """pp_stage to count."""
    by_rank: dict[int, int]
    """A merged anomaly counts once for each of its ranks."""
    by_step: dict[int, int]
    first_step: int
    last_step: int


def blast_radius(anomalies: Sequence[Anomaly], causes: Sequence[Anomaly] | None = None) -> BlastRadius:
    """Count what some causes can have made: all other anomalies that come after one of them, as far as that is known.

    causes: by default the leading causes of these very anomalies.
    """
    if causes is None:
        causes = [anomalies[i] for i in leading_causes(anomalies)]
    ids = {cause.id for cause in causes}
    others = [anomaly for anomaly in anomalies if anomaly.id not in ids]
    reached = [one for one, is_reached in zip(others, reached_by(causes, others), strict=True) if is_reached]
    ranks = Counter(r for a in reached for r in (a.ranks if a.rank is None else (a.rank,)))
    steps = Counter(a.step for a in reached)
    return BlastRadius(
        num_anomalies=len(reached),
        by_kind=dict(sorted(Counter(a.kind for a in reached).items())),
        by_stage=dict(sorted(Counter(a.pp_stage for a in reached).items())),
        by_rank=dict(sorted(ranks.items())),
        by_step=dict(sorted(steps.items())),
        first_step=min(steps, default=-1),
        last_step=max(steps, default=-1),
    )
