"""Evidence: the signs, steps and origins of an incident that its diagnosis reads, bounded; part of the snapshot."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sentinel.anomaly import Anomaly, is_nonfinite
from sentinel.incidents.diagnosis.step_facts import (
    Divergence,
    FirstBad,
    Maker,
    OddWeight,
    Outlier,
    ReplicaDeviation,
    StepFacts,
    Upstream,
)
from sentinel.kinds import COPIED_KINDS, Phase, labels
from sentinel.order.origin import Origin
from sentinel.order.phase import phase_of

MAX_SIGNS = 256
"""Most series of an incident that a diagnosis looks at, the earliest: a bound on memory and time."""
MAX_NOTES = 64
"""Most steps of an incident that are kept, the earliest half and the newest: a bound on memory and time."""
MAX_ORIGINS = 32
"""Most places where non-finite values were born that are kept, the earliest: a bound on memory."""
MAX_DIVERGENCES = 32
MAX_OUTLIERS = 16
MAX_SAMPLES = 4096
"""Most ids of samples that an incident lists: a bound on its length, 32 KB of numbers."""

FLOW = frozenset({Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.WGRAD_UNREDUCED, Phase.WGRAD, Phase.NORM})
"""Phases that a batch shows in, and is gone from in the next step; weights and optimizer state remember."""

_COPIED = labels(COPIED_KINDS)
"""All data-parallel ranks hold the same of these: a rank's own says nothing of its data."""


def is_entry(depth: int, border: str, segment: str) -> bool:
    """Tell whether a tensor of the forward is made of the data before the first block."""
    return depth == 0 and (border in ("chunk_input", "block_input") or segment.rpartition(".")[2] == "stem")


class Sign(msgspec.Struct, kw_only=True):
    """One series that was anomalous by one rule."""

    id: str
    """Of its newest onset record."""
    first_step: int
    last_step: int
    num_steps: int = 1
    """Steps in which it was anomalous."""
    streak: int = 1
    """Closed steps in a row, up to `last_step`; a log may have one row in ten steps."""
    last_index: int = 0
    """Which of the case's closed steps `last_step` was."""
    phase: Phase
    rule: str
    detector: str
    kind: str
    name: str
    statistic: str
    rank: int | None
    lanes: tuple[int, ...] = ()
    """Data-parallel replicas whose own part moved at the onset; empty: not known."""
    num_lanes: int = 1
    """Data-parallel replicas of the run."""
    is_bad: bool = False
    """Not finite."""
    is_inf: bool = False
    """Infinities and no NaN."""
    dtype: str = ""
    value: float | None = None
    baseline: float | None = None
    score: float | None = None
    reference_score: float | None = None
    level: int = 0
    """Of its severity."""
    message: str = ""
    depth: int = 0
    site_pos: int = 0
    ep_size: int = 1
    is_entry: bool = False
    """Of the forward, before the first block: what is made of the data before anything else is."""


class StepEvidence(msgspec.Struct, kw_only=True):
    """One step in which something of the incident was anomalous."""

    step: int
    index: int = 0
    """Which of the case's closed steps it is, from 0."""
    flow: list[str] = []
    """Names of tensors and scalars of the dataflow that were anomalous and finite; at most eight."""
    num_flow: int = 0
    num_bad: int = 0
    has_result: bool = False
    """The loss or the gradient norm among them."""
    has_state: bool = False
    """Weights or optimizer state among them."""
    lanes: tuple[int, ...] = ()
    is_skipped: bool = False


class NonFiniteOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """A non-finite value that nothing before it explains."""

    step: int
    phase: Phase
    kind: str
    name: str
    """The module or segment, as closely as is known."""
    place: str
    """Segment of the black box, or the module."""
    rank: int | None
    lane: int | None
    """Data-parallel coordinate; None: merged or reduced."""
    micro_step: int | None
    is_inf: bool
    dtype: str
    border: str = ""
    depth: int = 0
    num_bad: int = 0
    """Elements that are not finite; 0: not known."""
    ep_size: int = 1
    upstream: Upstream | None = None
    maker: Maker | None = None
    """What made it, where its module is known."""
    num_gradients: int = 0
    """Weight gradients of the step before that were measured and finite; 0: none, or some were not."""


class LearningRateJump(msgspec.Struct, frozen=True, kw_only=True):
    """A logged learning rate that rose from one step to the next."""

    step: int
    index: int
    """Which closed step of the attempt that is."""
    name: str
    before: float
    after: float


class Evidence(msgspec.Struct, kw_only=True):
    """The signs, steps and origins of an incident so far, from its anomalies and the closed steps; its diagnosis reads
    them."""

    opened: int
    is_liveness: bool = False
    num_lanes: int = 1
    signs: dict[str, Sign] = {}
    notes: list[StepEvidence] = []
    results: dict[str, list[tuple[int, float]]] = {}
    """Of each loss or gradient norm among the signs: (step, value), from its onset on; at most `MAX_NOTES`."""
    losses: dict[str, tuple[float, float]] = {}
    """Of each loss: its median and spread in the steps before."""
    risen: dict[int, float] = {}
    """Step -> spreads by which a loss stood above its usual value in it; the first `MAX_NOTES` steps that were noted."""
    outliers: dict[str, Outlier] = {}
    """Of the step in which it opened: module -> what its output looked like; at most `MAX_OUTLIERS`."""
    odd_weights: list[OddWeight] = []
    """Those that were not so before; at most `MAX_OUTLIERS`."""
    known_odd: tuple[str, ...] = ()
    """Weights that were so before it opened."""
    apart: dict[int, ReplicaDeviation] = {}
    """Data-parallel replica -> the first of its outputs that was not like the others', at the newest onset in a loss."""
    odd_gradients: list[tuple[int, tuple[int, ...]]] = []
    """Steps in which copies of reduced gradients differed, with the rank of the odd one; without one where nobody can tell.
    At most `MAX_OUTLIERS`."""
    finite_gradients: dict[int, int] = {}
    """Newest step -> weight gradients in it that were measured and finite; 0 where some were not."""
    missing: dict[int, tuple[int, ...]] = {}
    """Step in which something was born non-finite -> ranks whose frames of it had not come; at most `MAX_ORIGINS`."""
    origins: list[NonFiniteOrigin] = []
    num_origins: int = 0
    divergences: list[Divergence] = []
    divergence_step: int = -1
    num_differing: int = 0
    """Tensors whose copies differed in `divergence_step`."""
    num_compared: int = 0
    """Weights whose copies were compared in the newest step that did; 0: none ever."""
    num_weights: int = 0
    num_outputs: int = 0
    """Tensors of the forward that were measured in the newest step that had any."""
    num_alike: int = 0
    """Steps of the attempt, before the divergence, in which all copies were the same."""
    last_alike: int = -1
    is_differing: bool = False
    """Copies differed in the newest step."""
    num_quiet: int = 0
    """Steps in a row, up to now, that came whole and in which nothing of the dataflow was anomalous."""
    num_seen: int = 0
    """Closed steps that were looked at."""
    seen: int = -1
    """Newest step that was looked at."""
    jump: LearningRateJump | None = None
    scale_before: float | None = None
    """Loss scale in the step before the incident opened."""
    scale_now: float | None = None
    has_scaler: bool = False
    has_narrow: bool = False
    trouble_step: int = -1
    """Newest step before it opened in which another incident was graver than info; -1: none."""
    num_before: int = 0
    """Steps of the attempt that were judged before it opened."""
    samples: dict[int, dict[int, tuple[int | str, ...]]] = {}
    """Step -> rank -> ids."""
    num_samples_cut: int = 0
    lane_of: dict[int, int] = {}

    @property
    def is_about_rows(self) -> bool:
        """Whether it is about rows that were lost, and not about ranks."""
        return bool(self.signs) and all(sign.statistic == "rows_lost" for sign in self.signs.values())

    @property
    def is_about_an_end(self) -> bool:
        """Whether it is about how a run, or a rank of it, ended."""
        return any(sign.statistic == "ended" for sign in self.signs.values())

    @property
    def is_about_a_stop(self) -> bool:
        """Whether a rank's process is stopped, as the operating system of its machine says."""
        return any(sign.statistic == "stopped_s" for sign in self.signs.values())

    @property
    def is_about_a_node(self) -> bool:
        """Whether nothing is heard of the node that ships a rank's records, so that nothing is known of the rank."""
        return any(sign.statistic == "unheard_s" for sign in self.signs.values())

    def join(self, group: Iterable[Anomaly], facts: StepFacts | None) -> None:
        """Take anomalies that became members."""
        if facts is not None and facts.num_lanes > 1:
            self.num_lanes = facts.num_lanes
            self.lane_of = facts.lanes
        for anomaly in group:
            self.num_lanes = max(self.num_lanes, anomaly.dp_size)
            self._take(anomaly)
            if facts is None:
                continue
            outlier = facts.outliers.get(anomaly.tag_name) if anomaly.kind == "activation" else None
            if outlier is not None and anomaly.step == self.opened and len(self.outliers) < MAX_OUTLIERS:
                self.outliers.setdefault(anomaly.tag_name, outlier)

    def _take(self, a: Anomaly) -> None:
        key = "\x1f".join(map(str, (a.rule, a.kind, a.tag_name, a.statistic, a.rank, a.micro_step)))
        phase, is_bad = phase_of(a.kind, a.tag_name), is_nonfinite(a)
        lanes = self._lanes_of(a)
        known = self.signs.get(key)
        if known is not None:
            known.id, known.level = a.id, max(known.level, a.severity.level)
            known.lanes = tuple(sorted({*known.lanes, *lanes}))
            if a.step > known.last_step:
                self._go_on(known, a.step)
            sign = known
        else:
            sign = Sign(
                id=a.id, first_step=a.step, last_step=a.step, last_index=self.num_seen, phase=phase, rule=a.rule,
                detector=a.detector, kind=a.kind, name=a.tag_name, statistic=a.statistic, rank=a.rank, lanes=lanes,
                num_lanes=a.dp_size, is_bad=is_bad,
                is_inf=is_bad and (a.value_text in ("inf", "-inf") or a.statistic == "infs"), dtype=a.dtype,
                value=a.value, baseline=a.baseline, score=a.score, reference_score=a.reference_score,
                level=a.severity.level, message=a.message if a.kind == "precision" or is_bad else "",
                depth=a.depth, site_pos=a.site_pos, ep_size=a.ep_size,
                is_entry=phase is Phase.FORWARD and is_entry(a.depth, a.border, a.segment),
            )  # fmt: skip
            if len(self.signs) < MAX_SIGNS:
                self.signs[key] = sign
        self._mark(self._note(a.step), sign)

    def _go_on(self, sign: Sign, step: int) -> None:
        sign.streak = sign.streak + 1 if self.num_seen - sign.last_index <= 1 else 1
        sign.last_step, sign.last_index, sign.num_steps = step, self.num_seen, sign.num_steps + 1

    def _lanes_of(self, a: Anomaly) -> tuple[int, ...]:
        if a.dp_size <= 1 or a.kind in _COPIED:
            return ()
        if a.detector == "RankSkew" and len(set(self.lane_of.values())) == 2 and a.kind == "scalar":
            return ()  # Of two, each is as far from the other.
        if a.moved_ranks and self.lane_of:
            return tuple(sorted({self.lane_of[rank] for rank in a.moved_ranks if rank in self.lane_of}))
        return (a.place["dp"],) if a.rank is not None and "dp" in a.place else ()

    def _note(self, step: int) -> StepEvidence:
        for note in reversed(self.notes):
            if note.step == step:
                return note
        note = StepEvidence(step=step, index=self.num_seen)
        self.notes.append(note)
        self.notes.sort(key=lambda one: one.step)
        if len(self.notes) > MAX_NOTES:
            del self.notes[MAX_NOTES // 2]
        return note

    @staticmethod
    def _mark(note: StepEvidence, sign: Sign) -> None:
        if sign.is_bad:
            note.num_bad += 1
        elif sign.phase in FLOW and sign.statistic != "checksum" and sign.kind != "precision":
            if sign.name not in note.flow:
                note.num_flow += 1
                if len(note.flow) < 8:
                    note.flow.append(sign.name)
            note.has_result |= sign.phase in (Phase.LOSS, Phase.NORM)
        elif sign.phase in (Phase.PARAM, Phase.OPTIMIZER) and sign.statistic != "checksum":
            note.has_state = True
        note.lanes = tuple(sorted({*note.lanes, *sign.lanes}))

    def bear(self, step: int, causes: Iterable[tuple[Anomaly, Origin]], facts: StepFacts | None) -> None:
        """Take the places where non-finite values were born in a step.

        What is no part of the forward was not born there while rows of the same replica's forward are bad: an episode that
        goes on has no record of its own.
        """
        in_forward = {one.lane: one for one in facts.first_bad} if facts is not None else {}
        if facts is not None and facts.missing and len(self.missing) < MAX_ORIGINS:
            self.missing[step] = facts.missing
        for a, born in causes:
            if in_forward and phase_of(a.kind, a.tag_name) not in (Phase.PARAM, Phase.FORWARD):
                lanes = set(in_forward)
                if a.rank is not None and facts is not None:
                    lanes &= {facts.lanes.get(a.rank, 0)}
                for lane in sorted(lanes):
                    if not any(origin.step == step and origin.lane in (None, lane) for origin in self.origins):
                        self._bear_in_forward(step, in_forward[lane], facts, a.ep_size)
                if lanes:
                    continue
            self.num_origins += 1
            if len(self.origins) >= MAX_ORIGINS:
                continue
            is_lane = born.rank is not None and a.dp_size > 1 and a.kind not in _COPIED
            self.origins.append(
                NonFiniteOrigin(
                    step=step, phase=phase_of(a.kind, a.tag_name), kind=a.kind, name=born.name,
                    place=born.segment or born.module or born.name, rank=born.rank,
                    lane=a.place.get("dp") if is_lane else None, micro_step=born.micro_step,
                    is_inf=a.value_text in ("inf", "-inf") or a.statistic == "infs", dtype=a.dtype, border=a.border,
                    depth=a.depth, ep_size=a.ep_size,
                    num_bad=int(a.value) if a.value is not None and a.statistic in ("nans", "infs") else 0,
                    upstream=facts.upstream.get(a.id) if facts is not None else None,
                    maker=_maker_of(a, born, facts), num_gradients=self.finite_gradients.get(step - 1, 0),
                )
            )  # fmt: skip

    def _bear_in_forward(self, step: int, one: FirstBad, facts: StepFacts | None, ep_size: int) -> None:
        self.num_origins += 1
        if len(self.origins) < MAX_ORIGINS:
            self.origins.append(
                NonFiniteOrigin(
                    step=step, phase=Phase.FORWARD, kind=one.kind, name=one.name, place=one.segment or one.name,
                    rank=one.rank, lane=one.lane if self.num_lanes > 1 else None, micro_step=None, is_inf=one.is_inf,
                    dtype=one.dtype, border=one.border, depth=one.depth, num_bad=one.num_bad, ep_size=ep_size,
                    upstream=one.upstream,
                    maker=facts.makers.get(f"{one.rank}/{one.kind}/{one.name}") if facts is not None else None,
                )
            )  # fmt: skip

    def see(self, step: int, facts: StepFacts) -> None:
        """Take in a closed step: which signs went on in it, and whether all else was well."""
        if step <= self.seen:
            return
        self.seen = step
        active = [sign for sign in self.signs.values() if sign.id in facts.ongoing or sign.last_step == step]
        for sign in active:
            if sign.last_step < step:
                self._go_on(sign, step)
                self._mark(self._note(step), sign)
        is_moving = any(sign.is_bad or sign.phase in FLOW for sign in active if sign.statistic != "checksum")
        for sign in self.signs.values():
            if sign.kind == "scalar" and not sign.is_bad and sign.name in facts.results:
                notified = self.results.setdefault(sign.name, [])
                if len(notified) < MAX_NOTES and (not notified or notified[-1][0] < step):
                    notified.append((step, facts.results[sign.name]))
        self._bear_again(step, facts)
        self.finite_gradients = {step: facts.num_gradients}
        if is_moving:
            self.num_quiet = 0
            now = facts.results
            rises = [(now[name] - one) / spread for name, (one, spread) in self.losses.items() if name in now]
            if rises and len(self.risen) < MAX_NOTES:
                self.risen[step] = max(rises)
            note = self._note(step)
            note.is_skipped |= facts.is_skipped
            note.lanes = tuple(sorted({*note.lanes, *facts.odd_lanes}))
            if facts.samples and len(self.samples) < MAX_NOTES:
                self.samples[step] = facts.samples
            self.num_samples_cut += facts.num_samples_cut
        elif facts.is_whole:
            self.num_quiet += 1
        if facts.num_compared:
            self.num_compared, self.num_weights = facts.num_compared, facts.num_weights
            self.is_differing = facts.num_differing > 0
        self._compare(step, facts)
        known = {*self.known_odd, *(one.name for one in self.odd_weights)}
        news = [one for one in facts.odd_weights if one.name not in known]
        self.odd_weights = [*self.odd_weights, *news][:MAX_OUTLIERS] if news else self.odd_weights
        self.apart = facts.apart or self.apart
        self.num_outputs = facts.num_outputs or self.num_outputs
        self.has_narrow |= facts.has_narrow
        if facts.loss_scale is not None:
            self.scale_now, self.has_scaler = facts.loss_scale, True
        self.num_seen += 1

    def _compare(self, step: int, facts: StepFacts) -> None:
        """Take the copies that differ in a step. Gradients may, a step before the weights that they are added to."""
        if not facts.divergences or not any(sign.statistic == "checksum" for sign in self.signs.values()):
            return
        if self.divergence_step < 0 and any(one.kind != "wgrad" for one in facts.divergences):
            self.divergence_step, self.num_differing = step, facts.num_differing
            self.divergences = list(facts.divergences[:MAX_DIVERGENCES])
        of_gradients = [one for one in facts.divergences if one.kind == "wgrad"]
        if of_gradients and len(self.odd_gradients) < MAX_OUTLIERS:
            ranks = {one.accused for one in of_gradients if one.is_sure}
            self.odd_gradients = [*self.odd_gradients, (step, ranks.pop() if len(ranks) == 1 else ())]

    def _bear_again(self, step: int, facts: StepFacts) -> None:
        """Take what is born non-finite anew in series whose episodes are still open: it has no record of its own."""
        last = max((note.step for note in self.notes if note.num_bad and note.step < step), default=-1)
        was_skipped = any(note.step == last and note.is_skipped for note in self.notes)
        if last < 0 or any(origin.step == step for origin in self.origins) or not (was_skipped or step - last > 2):
            return  # Nothing before it; known; or what bad weights bring.
        if not any(note.step == step and note.num_bad for note in self.notes):
            return
        ep_size = max((origin.ep_size for origin in self.origins), default=1)
        for one in facts.first_bad:
            self._bear_in_forward(step, one, facts, ep_size)

    def absorb(self, other: Evidence) -> None:
        """Take over the evidence of an incident that turned out to be the same."""
        for key, sign in other.signs.items():
            if key not in self.signs and len(self.signs) < MAX_SIGNS:
                self.signs[key] = sign
        for theirs in other.notes:
            note = self._note(theirs.step)
            note.num_flow, note.num_bad = max(note.num_flow, theirs.num_flow), note.num_bad + theirs.num_bad
            note.flow = note.flow or theirs.flow
            note.has_result |= theirs.has_result
            note.has_state |= theirs.has_state
            note.is_skipped |= theirs.is_skipped
            note.lanes = tuple(sorted({*note.lanes, *theirs.lanes}))
        self.origins = sorted([*self.origins, *other.origins], key=lambda one: one.step)[:MAX_ORIGINS]
        self.num_origins += other.num_origins
        self.num_quiet = min(self.num_quiet, other.num_quiet)
        if other.opened == self.opened:
            for name, outlier in other.outliers.items():
                if len(self.outliers) < MAX_OUTLIERS:
                    self.outliers.setdefault(name, outlier)
        self.odd_weights = [*self.odd_weights, *other.odd_weights][:MAX_OUTLIERS]
        for step, ids in other.samples.items():
            self.samples.setdefault(step, ids)
        if self.divergence_step < 0 <= other.divergence_step:
            self.divergences, self.divergence_step = other.divergences, other.divergence_step
            self.num_differing = other.num_differing

    def ranks_of(self, lanes: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of data-parallel replicas."""
        wanted = set(lanes)
        return tuple(sorted(rank for rank, lane in self.lane_of.items() if lane in wanted))

    def samples_of(self, steps: Iterable[int], lanes: Iterable[int]) -> tuple[int | str, ...]:
        """Return the ids of the samples of steps, of some replicas or of all (none given), each once."""
        wanted = set(lanes)
        found = dict.fromkeys(
            one
            for step in steps
            for rank, ids in sorted(self.samples.get(step, {}).items())
            if not wanted or self.lane_of.get(rank) in wanted
            for one in ids
        )
        return tuple(found)[:MAX_SAMPLES]


def _maker_of(a: Anomaly, born: Origin, facts: StepFacts | None) -> Maker | None:
    if facts is None or a.rank is None:
        return None
    if phase_of(a.kind, a.tag_name) is Phase.FORWARD:
        return facts.makers.get(f"{a.rank}/{a.kind}/{a.tag_name}")
    return facts.makers.get(f"{a.rank}/activation/{born.module or born.name}")
