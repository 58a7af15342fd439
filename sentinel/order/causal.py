"""Happens-before between anomalies of one run, the first causes that it leaves, and where those were born.

The order (DESIGN.md, section 7). Between steps (attempt, step) decides. Inside a step every anomaly has a phase. The
forward and backward phases run in *lanes*, one for each data-parallel replica and micro-step: lanes are concurrent.

    param -> forward -> loss -> backward -> wgrad_unreduced -> wgrad -> norm -> optimizer
             up the depth       down        leaf of its dgrad  all lanes  everybody

A row that was folded over micro-steps, or merged over replicas, stands for a set of events. A precedes B when each part
of A has a part of B behind it: the one reading that stays transitive and never hides a fault of one lane behind a
statistic of all lanes. `is_possible_cause` is the wider, intransitive reading: some part of A is before some part of B.
"""

from __future__ import annotations

import enum
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from sentinel.anomaly import Anomaly


class Phase(enum.IntEnum):
    """When in a step an anomaly was made; the number is its place in the total order."""

    PARAM = 0
    """Weights as the step reads them."""
    FORWARD = 1
    LOSS = 2
    METRIC = 3
    """A scalar of unknown making: after the forward, before nothing."""
    BACKWARD = 4
    WGRAD_UNREDUCED = 5
    WGRAD = 6
    SCHEDULE = 7
    """Learning rate and its like: only the optimizer reads them."""
    NORM = 8
    """Gradient norm, found_inf: after every rank's weight gradients."""
    OPTIMIZER = 9
    COMM = 10
    """A collective: program order on its own rank only."""
    FREE = 11
    """Health and wall-clock figures: related to nothing inside the step."""


_PHASE_OF_KIND = {
    "param": Phase.PARAM,
    "weight_spectrum": Phase.PARAM,
    "activation_in": Phase.FORWARD,
    "activation": Phase.FORWARD,
    "residual": Phase.FORWARD,
    "attention": Phase.FORWARD,
    "router": Phase.FORWARD,
    "dgrad": Phase.BACKWARD,
    "dgrad_in": Phase.BACKWARD,
    "wgrad_unreduced": Phase.WGRAD_UNREDUCED,
    "wgrad": Phase.WGRAD,
    "exp_avg": Phase.OPTIMIZER,
    "exp_avg_sq": Phase.OPTIMIZER,
    "update": Phase.OPTIMIZER,
    "update_ratio": Phase.OPTIMIZER,
    "grad_momentum_alignment": Phase.OPTIMIZER,
    "comm": Phase.COMM,
    "health": Phase.FREE,
}

_SLOT = {"activation_in": 0, "attention": 1, "router": 1, "activation": 2, "residual": 2, "dgrad": 0, "dgrad_in": 2}
"""Order of the slots of one module: in forward the input is there before the output, in backward the other way."""

_LOSS = re.compile(r"(^|[._/ -])loss(es)?$", re.IGNORECASE)
_NORM = re.compile(
    r"grad(ient)?s?[._ -]?norm|total_norm|found_inf|overflow|loss[._ -]?scale|num_zeros|clip", re.IGNORECASE
)
_SCHEDULE = re.compile(r"(^|[._/-])(lr|learning_rate|weight_decay|momentum|beta[12]?)([._/-]|$)", re.IGNORECASE)
_FREE = re.compile(r"time|token|sample|second|throughput|memory|mfu|tflop|epoch|progress", re.IGNORECASE)

_ALL = -1
"""Every lane of an axis: the row was merged over it."""
_ANY = -2
"""Key under which all lanes of an axis are gathered."""
_NO_MICRO_STEP = 1 << 62

_DATAFLOW = frozenset(
    {Phase.PARAM, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.WGRAD_UNREDUCED, Phase.WGRAD}
)


class _Site(enum.IntEnum):
    """How anomalies of one lane and one depth are told apart.

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
    """Lane of the data-parallel axis, or _ALL."""
    micro: int
    """Lane of the micro-steps, or _ALL."""
    site: _Site
    slot: int
    rank: int | None
    call: int | None
    tag: str
    tp: int | None
    stage: int


@functools.lru_cache(maxsize=4096)
def scalar_phase(name: str) -> Phase:
    """Return where in a step the logged scalar of this name belongs, by the names that trainers use."""
    if _NORM.search(name):
        return Phase.NORM
    if _LOSS.search(name):
        return Phase.LOSS
    if _SCHEDULE.search(name):
        return Phase.SCHEDULE
    if _FREE.search(name):
        return Phase.FREE
    return Phase.METRIC


def phase_of(kind: str, name: str) -> Phase:
    """Return the phase of a step in which a tensor of this kind, or a scalar of this name, was made."""
    if kind == "scalar":
        return scalar_phase(name)
    return _PHASE_OF_KIND.get(kind, Phase.FREE)


def _replica(anomaly: Anomaly) -> int:
    if anomaly.dp_size <= 1:
        return 0
    dp = anomaly.place.get("dp")
    if dp is None:
        return _ALL if anomaly.rank is None else -3 - anomaly.rank
    # Experts are exchanged among neighbours of the data-parallel axis: those ranks poison each other in forward.
    ep_size = anomaly.ep_size
    if ep_size > 1 and anomaly.place.get("ep") == dp % ep_size:
        return dp - dp % ep_size
    return dp


def position(anomaly: Anomaly) -> Position:
    """Return where an anomaly stands in its step."""
    phase = phase_of(anomaly.kind, anomaly.tag_name)
    runs_down = Phase.BACKWARD <= phase <= Phase.WGRAD
    at = (-anomaly.depth, -anomaly.site_pos) if runs_down else (anomaly.depth, anomaly.site_pos)
    micro = _ALL if anomaly.micro_step is None else anomaly.micro_step
    if phase is Phase.COMM:
        at, micro, site = (0, 0), _ALL, _Site.LOCAL
    elif anomaly.rank is None or anomaly.call_id is None:
        site = _Site.COUPLED if anomaly.communicates else _Site.MERGED
    elif anomaly.tp_size <= 1 and anomaly.ep_size <= 1 and "cp" not in anomaly.place:
        site = _Site.LOCAL
    else:
        site = _Site.COUPLED if anomaly.communicates else _Site.RANKED
    return Position(
        anomaly.run,
        (anomaly.attempt, anomaly.step),
        phase,
        at,
        _replica(anomaly),
        micro,
        site,
        _SLOT.get(anomaly.kind, 0),
        anomaly.rank,
        anomaly.call_id,
        anomaly.tag_name,
        anomaly.place.get("tp"),
        anomaly.pp_stage,
    )


def _meets(a: int, b: int) -> bool:
    return a == b or _ALL in (a, b)


def _within(a: int, b: int) -> bool:
    return a == b or b == _ALL


def _is_earlier_call(a: Position, b: Position) -> bool:
    return a.rank is not None and a.rank == b.rank and a.call is not None and b.call is not None and a.call < b.call


def _is_earlier_site(a: Position, b: Position) -> bool:
    if a.at[0] != b.at[0]:
        return a.at[0] < b.at[0]
    if a.site is _Site.LOCAL or b.site is _Site.LOCAL:
        return a.site is b.site and _is_earlier_call(a, b)
    if a.at != b.at:
        return a.at < b.at
    if a.site is not b.site:
        return False
    if a.site is not _Site.RANKED and a.slot != b.slot:
        return a.slot < b.slot
    return a.site is not _Site.MERGED and _is_earlier_call(a, b)


def _hangs_off(a: Position, b: Position) -> bool:
    """Tell whether an unreduced weight gradient comes behind a backward of its own lane. It is a leaf."""
    if a.at[0] != b.at[0]:
        return a.at[0] < b.at[0]
    if a.site is _Site.LOCAL or b.site is _Site.LOCAL:
        return a.site is b.site and _is_earlier_call(a, b)
    return a.at <= b.at


def _is_before(a: Position, b: Position, *, possibly: bool) -> bool:
    if a.run != b.run:
        return False
    if a.epoch != b.epoch:
        return a.epoch < b.epoch
    if b.phase is Phase.COMM and a.phase is Phase.COMM:
        return _is_earlier_call(a, b)
    if b.phase is Phase.OPTIMIZER:
        return a.phase in _DATAFLOW or a.phase is Phase.NORM or a.phase is Phase.SCHEDULE
    if a.phase not in _DATAFLOW:
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
            # The first chunk of a rank lies at depth pp_stage, under every schedule.
            return _meets(a.replica, b.replica) and a.stage <= b.at[0]
        return b.phase in _AFTER_PARAM and _meets(a.replica, b.replica)
    related = _meets if possibly else _within
    if not (related(a.replica, b.replica) and related(a.micro, b.micro)):
        return False
    if a.phase is Phase.FORWARD:
        return _is_earlier_site(a, b) if b.phase is Phase.FORWARD else b.phase in _AFTER_FORWARD
    if a.phase is Phase.LOSS:
        return b.phase in _AFTER_LOSS
    if a.phase is Phase.BACKWARD:
        if b.phase is Phase.BACKWARD:
            return _is_earlier_site(a, b)
        return b.phase is Phase.WGRAD_UNREDUCED and _hangs_off(a, b)
    return False


_AFTER_LOSS = frozenset({Phase.BACKWARD, Phase.WGRAD_UNREDUCED})
_AFTER_FORWARD = _AFTER_LOSS | {Phase.LOSS, Phase.METRIC}
_AFTER_PARAM = _AFTER_FORWARD


def happens_before(a: Anomaly, b: Anomaly) -> bool:
    """Tell whether `a` is before `b`: an irreflexive, transitive relation. False both ways: concurrent."""
    return _is_before(position(a), position(b), possibly=False)


def is_possible_cause(a: Anomaly, b: Anomaly) -> bool:
    """Tell whether some part of `a` is before some part of `b`: wider than `happens_before`, acyclic, intransitive."""
    return _is_before(position(a), position(b), possibly=True)


def is_nonfinite(anomaly: Anomaly) -> bool:
    """Tell whether the anomaly is about NaN or infinite values."""
    return bool(anomaly.value_text) or anomaly.statistic in ("nans", "infs")


SortKey = tuple[object, ...]


def sort_key(anomaly: Anomaly) -> SortKey:
    """Return the key of the total order: deterministic, and a linear extension of `happens_before`.

    Concurrent anomalies are told apart by call_id, micro_step, badness, rank and name; never by file order.
    """
    p = position(anomaly)
    micro = _NO_MICRO_STEP if p.micro == _ALL else p.micro
    call = _NO_MICRO_STEP if p.call is None else p.call
    # Program order where there is one; sites, in the order of first appearance, elsewhere.
    is_local = p.site is _Site.LOCAL
    return (
        *p.epoch,
        int(p.phase),
        p.at[0],
        not is_local,
        0 if is_local else p.at[1],
        int(p.site),
        p.slot if p.site in (_Site.COUPLED, _Site.MERGED) else 0,
        call,
        micro,
        not is_nonfinite(anomaly),
        -anomaly.severity.level,
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


def first_causes(anomalies: Sequence[Anomaly]) -> list[int]:
    """Return the indices of the minimal elements of `happens_before`, in the total order; near-linear time."""
    return _minimal(anomalies, possibly=False)


def leading_causes(anomalies: Sequence[Anomaly]) -> list[int]:
    """Return the indices of what most deserves to be called the root, in the total order; its first is the root.

    Among the worst (most severe, non-finite before finite) those that none of the others can possibly have caused.
    A chance excursion of one tensor precedes many a fault without having made it, and a NaN is not made by one.
    """
    if not anomalies:
        return []
    worst = max((a.severity.level, is_nonfinite(a)) for a in anomalies)
    pool = [i for i, a in enumerate(anomalies) if (a.severity.level, is_nonfinite(a)) == worst]
    return [pool[i] for i in _minimal([anomalies[i] for i in pool], possibly=True)]


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
    """The least of everything in one step, gathered by lane, so that one look-up tells whether anything is before."""

    def __init__(self, positions: Iterable[Position]) -> None:
        self.num_phase: Counter[Phase] = Counter()
        self.param_stage: dict[int, int] = {}
        self.depth: dict[tuple[Phase, int, int], int] = {}
        self.floor: dict[tuple[Phase, int, int], tuple[int, int]] = {}
        """Least (depth, site_pos) of a lane, of those that sites order."""
        self.any_floor: dict[tuple[Phase, int, int], tuple[int, int]] = {}
        """The same, of all."""
        self.least: dict[tuple[object, ...], int] = {}
        self.unreduced: defaultdict[tuple[str, tuple[int, int]], set[int | None]] = defaultdict(set)
        for p in positions:
            self.num_phase[p.phase] += 1
            if p.phase is Phase.PARAM:
                for replica in (p.replica, _ANY):
                    self.param_stage[replica] = min(p.stage, self.param_stage.get(replica, p.stage))
            elif p.phase is Phase.WGRAD_UNREDUCED:
                self.unreduced[p.tag, p.at].add(p.tp)
            elif p.phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
                for replica in (p.replica, _ANY):
                    for micro in (p.micro, _ANY):
                        self._gather((p.phase, replica, micro), p)
            elif p.phase is Phase.COMM and p.call is not None:
                self._lower((Phase.COMM, p.rank), p.call)

    def _lower(self, key: tuple[object, ...], value: int) -> None:
        known = self.least.get(key)
        if known is None or value < known:
            self.least[key] = value

    def _gather(self, lane: tuple[Phase, int, int], p: Position) -> None:
        self.depth[lane] = min(p.at[0], self.depth.get(lane, p.at[0]))
        self.any_floor[lane] = min(p.at, self.any_floor.get(lane, p.at))
        if p.site is _Site.LOCAL:
            assert p.call is not None
            self._lower((lane, p.at[0], p.rank), p.call)
            return
        self.floor[lane] = min(p.at, self.floor.get(lane, p.at))
        if p.site is not _Site.RANKED:
            self._lower((lane, p.at, p.site), p.slot)
        if p.site is not _Site.MERGED and p.rank is not None and p.call is not None:
            slot = p.slot if p.site is _Site.COUPLED else 0
            self._lower((lane, p.at, p.site, slot, p.rank), p.call)

    def _param_stages(self, replica: int) -> list[int]:
        keys = (_ANY,) if replica == _ALL else (replica, _ALL)
        return [self.param_stage[key] for key in keys if key in self.param_stage]

    def has_predecessor(self, p: Position, possibly: bool, *, loosely: bool = False) -> bool:
        """Tell whether anything gathered here is before `p`.

        loosely: site_pos counts also between an observation that program order orders and one that sites do.
        """
        count = self.num_phase
        if p.phase is Phase.COMM:
            return p.rank is not None and p.call is not None and self.least.get((Phase.COMM, p.rank), p.call) < p.call
        if p.phase is Phase.OPTIMIZER:
            return any(count[phase] for phase in (*_DATAFLOW, Phase.NORM, Phase.SCHEDULE))
        if p.phase is Phase.NORM:
            return any(count[phase] for phase in _DATAFLOW)
        if p.phase is Phase.WGRAD:
            if count[Phase.PARAM] or count[Phase.FORWARD] or count[Phase.LOSS]:
                return True
            if self.depth.get((Phase.BACKWARD, _ANY, _ANY), 1 << 62) <= p.at[0]:
                return True
            groups = self.unreduced.get((p.tag, p.at), ())
            return bool(groups) and (p.tp is None or None in groups or p.tp in groups)
        if p.phase not in _AFTER_PARAM and p.phase is not Phase.FORWARD:
            return False
        stages = self._param_stages(p.replica)
        if stages and (p.phase is not Phase.FORWARD or min(stages) <= p.at[0]):
            return True
        for replica in _keys(p.replica, possibly):
            for micro in _keys(p.micro, possibly):
                if p.phase is not Phase.FORWARD and (Phase.FORWARD, replica, micro) in self.depth:
                    return True
                if p.phase in _AFTER_LOSS and (Phase.LOSS, replica, micro) in self.depth:
                    return True
                own = Phase.BACKWARD if p.phase is Phase.WGRAD_UNREDUCED else p.phase
                if own in (Phase.FORWARD, Phase.BACKWARD) and self._has_earlier_site((own, replica, micro), p, loosely):
                    return True
        return False

    def _has_earlier_site(self, lane: tuple[Phase, int, int], p: Position, loosely: bool) -> bool:
        if lane not in self.depth:
            return False
        if self.depth[lane] < p.at[0] or (loosely and self.any_floor[lane] < p.at):
            return True
        if p.site is _Site.LOCAL:
            assert p.call is not None
            return self.least.get((lane, p.at[0], p.rank), p.call) < p.call
        floor = self.floor.get(lane)
        if floor is None or floor > p.at:
            return False
        if floor < p.at or p.phase is Phase.WGRAD_UNREDUCED:
            return True
        if p.site is not _Site.RANKED and self.least.get((lane, p.at, p.site), p.slot) < p.slot:
            return True
        if p.site is _Site.MERGED or p.rank is None or p.call is None:
            return False
        slot = p.slot if p.site is _Site.COUPLED else 0
        return self.least.get((lane, p.at, p.site, slot, p.rank), p.call) < p.call


def _keys(lane: int, possibly: bool) -> tuple[int, ...]:
    if lane == _ALL:
        return (_ANY,)
    return (lane, _ALL) if possibly else (lane,)


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
    """Count what some causes can have made: all other anomalies that come after one of them, as far as can be told.

    causes: by default the leading causes of these very anomalies.
    """
    if causes is None:
        causes = [anomalies[i] for i in leading_causes(anomalies)]
    ids = {cause.id for cause in causes}
    sources: dict[tuple[str, tuple[int, int]], list[Position]] = {}
    for cause in causes:
        p = position(cause)
        sources.setdefault((p.run, p.epoch), []).append(p)
    tables = {key: _StepTable(positions) for key, positions in sources.items()}
    reached = []
    for anomaly in anomalies:
        if anomaly.id in ids:
            continue
        p = position(anomaly)
        if any(run == p.run and epoch < p.epoch for run, epoch in tables) or (
            (p.run, p.epoch) in tables and tables[p.run, p.epoch].has_predecessor(p, possibly=True, loosely=True)
        ):
            reached.append(anomaly)
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


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a fault was born, as closely as what was measured can tell."""

    name: str
    """Module, segment, parameter or scalar."""
    kind: str
    phase: str
    """`forward`, `backward` or `optimizer`."""
    rank: int | None
    """None where the ranks were already merged or reduced."""
    micro_step: int | None
    segment: str = ""
    module: str = ""
    """The module itself; empty where only the segment, or no module at all, is known."""
    candidates: tuple[str, ...] = ()
    """Modules that cannot be told apart: they all read the tensor whose gradient went bad."""
    ranks: tuple[int, ...] = ()
    """Ranks of one tensor- or context-parallel group that show the same at the same place: one of them, `rank` being the
    lowest; an exchange between them lies between the fault and what was measured. Empty: `rank` alone."""


_PHASE_WORDS = {
    Phase.PARAM: "optimizer",
    Phase.FORWARD: "forward",
    Phase.LOSS: "forward",
    Phase.METRIC: "forward",
    Phase.BACKWARD: "backward",
    Phase.WGRAD_UNREDUCED: "backward",
    Phase.WGRAD: "backward",
    Phase.SCHEDULE: "optimizer",
    Phase.NORM: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.COMM: "communication",
    Phase.FREE: "",
}


def origin(anomaly: Anomaly, anomalies: Iterable[Anomaly] = ()) -> Origin:
    """Return where a first cause was born.

    Forward: the module whose output is first bad while its inputs are clean. Backward: the module whose `dgrad` was
    clean and whose `dgrad_in` is bad, so a consumer of the tensor, the innermost. Of a border alone: its segment.

    A border's block is named as the module when other modules of its rank were seen: then those inside it were clean.

    anomalies: those of the same step; a consumer whose own gradient was bad already did not make this one.
    """
    anomalies = list(anomalies)
    phase = phase_of(anomaly.kind, anomaly.tag_name)
    module, candidates = "", ()  # type: tuple[str, tuple[str, ...]]
    name = anomaly.tag_name
    rank = anomaly.rank
    if phase is Phase.FORWARD:
        if anomaly.kind == "activation_in" and anomaly.border:
            name = anomaly.segment or f"input of {anomaly.tag_name}"
        elif anomaly.kind == "activation_in":
            # No module put this out: it was made between modules, by the code of the one around them.
            module = anomaly.tag_name.rpartition(".")[0]
            name = module or anomaly.segment or f"input of {anomaly.tag_name}"
        elif (
            not anomaly.border
            or _is_inside(anomaly.tag_name, anomaly.segment)
            or (anomaly.tag_name == anomaly.segment and _sees_modules(anomaly, anomalies))
        ):
            module = anomaly.tag_name
        else:
            name = anomaly.segment or anomaly.tag_name
    elif phase is Phase.BACKWARD:
        candidates = _suspects(anomaly, anomalies)
        if anomaly.border and not any(_is_inside(c, anomaly.segment) for c in candidates):
            if anomaly.segment in candidates and _sees_modules(anomaly, anomalies):
                module = anomaly.segment
            name, candidates = anomaly.segment or name, ()
        elif len(candidates) == 1:
            module, candidates = candidates[0], ()
            name = module
        elif candidates:
            name = " or ".join(candidates)
        elif anomaly.kind == "dgrad_in":
            module = anomaly.tag_name
        else:
            name = anomaly.segment or f"gradient of the output of {anomaly.tag_name}"
    elif phase in (Phase.WGRAD, Phase.WGRAD_UNREDUCED, Phase.PARAM, Phase.OPTIMIZER):
        module = anomaly.tag_name.rpartition(".")[0]
        if phase is not Phase.WGRAD_UNREDUCED and anomaly.dp_size > 1:
            rank = None
    return Origin(
        name=name,
        kind=anomaly.kind,
        phase=_PHASE_WORDS[phase],
        rank=rank,
        micro_step=anomaly.micro_step,
        segment=anomaly.segment,
        module=module,
        candidates=candidates,
        ranks=_group_alike(anomaly, anomalies) if rank is not None else (),
    )


def _group_alike(anomaly: Anomaly, anomalies: Iterable[Anomaly]) -> tuple[int, ...]:
    if anomaly.tp_size <= 1 and "cp" not in anomaly.place:
        return ()

    def identity(a: Anomaly) -> tuple[object, ...]:
        place = {axis: at for axis, at in a.place.items() if axis not in ("tp", "cp")}
        return a.step, a.kind, a.tag_name, a.micro_step, a.depth, a.statistic, place

    mine = identity(anomaly)
    ranks = {a.rank for a in anomalies if a.rank is not None and identity(a) == mine}
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()


_CHUNK = re.compile(r"model|stage\d+")


def _is_inside(module: str, segment: str) -> bool:
    """Tell whether naming a module says more than naming its segment: only module monitoring sees such modules.

    A block's segment bears the block's name; stem and head hold modules of any name, but not the whole chunk.
    """
    if segment.rpartition(".")[2] in ("stem", "head"):
        return _CHUNK.fullmatch(module) is None
    return bool(segment) and module.startswith(segment + ".")


def _sees_modules(anomaly: Anomaly, anomalies: Iterable[Anomaly]) -> bool:
    """Tell whether the rank of a border had module monitoring on, as far as its anomalies of the step show it."""
    return any(
        not a.border and a.rank == anomaly.rank and a.kind in ("activation", "activation_in", "dgrad", "dgrad_in")
        for a in anomalies
    )


def _suspects(anomaly: Anomaly, anomalies: Iterable[Anomaly]) -> tuple[str, ...]:
    consumers = anomaly.consumers
    if not consumers and anomaly.kind == "dgrad_in":
        consumers = (anomaly.tag_name,)
    innermost = [c for c in consumers if not any(other.startswith(c + ".") for other in consumers)]
    if len(innermost) > 1:
        dirty = {
            name
            for a in anomalies
            if a.kind == "dgrad" and a.rank == anomaly.rank and _meets_micro(a, anomaly) and a.id != anomaly.id
            for name in (a.tag_name, *a.also)
        }
        innermost = [c for c in innermost if c not in dirty] or innermost
    return tuple(sorted(innermost))


def _meets_micro(a: Anomaly, b: Anomaly) -> bool:
    return a.micro_step is None or b.micro_step is None or a.micro_step == b.micro_step
