"""An open incident: its newest revision, and what is needed to know what it explains and what it makes one suspect."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from sentinel.anomaly import Anomaly, Severity, is_nonfinite
from sentinel.incident import CLOSED_STATES, Incident
from sentinel.incidents.diagnosis.advice import advice
from sentinel.incidents.diagnosis.claim import by_jump
from sentinel.incidents.diagnosis.diagnose import diagnose
from sentinel.incidents.diagnosis.evidence import Evidence
from sentinel.incidents.diagnosis.held import HeldDiagnosis
from sentinel.incidents.diagnosis.step_facts import StepFacts
from sentinel.incidents.scope import deviating_rank, is_several_times, lineage_of, series_of, size_of
from sentinel.incidents.titles import origin_words, root_words, seen_words, title_words
from sentinel.kinds import Phase
from sentinel.order.causes import leading_causes, reached_by
from sentinel.order.origin import Origin, origin
from sentinel.order.phase import phase_of

MAX_SERIES = 4096
"""Most series that an incident remembers, to know its own again: a bound on memory; of later ones none is remembered."""

MAX_FIRST_CAUSES = 64
"""Most first causes that an incident lists, a bound on its length: a NaN on each of a thousand replicas needs no thousand
names."""

GROWING_STEPS = 3
"""Measured steps for which a member that is worse may grow before it is reported. Fewer: an explosion is a message at each
step; more: the message comes later."""


class OpenIncident(msgspec.Struct, kw_only=True):
    """An open incident: its newest revision, and the series, steps and evidence by which it takes further anomalies in."""

    incident: Incident
    nature: str
    """`nonfinite`, `finite`, or `liveness`."""
    root: Anomaly
    origin: Origin
    causes: list[Anomaly]
    """Its first causes."""
    last_bad_step: int
    """Newest step with a non-finite member; -1: none."""
    was_skipped: bool = False
    """The optimizer skipped `last_bad_step`: its NaN did not reach the weights."""
    leads: list[Anomaly] = []
    """What came first when it recurred, the newest; at most `MAX_FIRST_CAUSES`."""
    episodes: dict[str, int] = {}
    """Ids of onsets without an end, to the step of each."""
    series: dict[str, int] = {}
    """Keys of the series that belong here, to the step they last joined."""
    lineages: dict[str, int] = {}
    """The same of the modules whose tensors belong here (`scope.lineage_of`)."""
    subject: tuple[str, ...] = ()
    """Of liveness: what it is about (`scope.subject_of`)."""
    deviating: tuple[int, ...] = ()
    """Ranks that members say deviate from their peers."""
    carried_step: int = -1
    """Newest step with a member above `info` whose update the optimizer took: the weights carry it on; -1: none."""
    notified_size: float = 0.0
    """Size of the anomaly that the title names (`scope.size_of`)."""
    notified_step: int = -1
    """Step of the anomaly that the title names."""
    worse: Anomaly | None = None
    """The worst member since that is several times as bad; reported `GROWING_STEPS` after the title's anomaly."""
    reopened_step: int = -1
    """Newest step when a person opened it again; -1: nobody did."""
    has_settled: bool = False
    num_unnamed: int = 0
    """First causes that the cap left out."""
    evidence: Evidence = msgspec.field(default_factory=lambda: Evidence(opened=-1))
    """What it has shown, for the diagnosis."""
    diagnosis: HeldDiagnosis = msgspec.field(default_factory=HeldDiagnosis)
    """The diagnosis that revisions carry, which changes once another has held."""
    facts: tuple[str, ...] = ()
    """Evidence that stays whatever is suspected."""
    unpublished: list[str] = []
    """Ids of members that joined since its last revision."""
    num_changes: int = 0
    """Times that a step or a moment changed it."""
    num_withheld: int = 0
    """Those of them since its last revision."""
    borders: list[Anomaly] = []
    """Those of its first step that lie at the borders of modules, where values are measured whatever is switched off inside;
    at most `MAX_FIRST_CAUSES`."""

    @property
    def is_by_jump(self) -> bool:
        """Whether the title's anomaly is a learning rate that jumped."""
        jump, notified = self.evidence.jump, self.diagnosis.notified
        return jump is not None and notified.suspected == "model" and notified.reasons[:1] == by_jump(self.evidence).reasons

    def revise(self, *, state: str | None = None, evidence: str | None = None) -> None:
        """Make the next revision, with another state or one more line of evidence."""
        if state is not None:
            self.incident = msgspec.structs.replace(self.incident, state=state)
            if state in CLOSED_STATES and self.evidence.opened >= 0:
                self.update_diagnosis(is_over=True)
        if evidence is not None:
            self.facts = (*self.facts, evidence)
            self.incident = msgspec.structs.replace(self.incident, evidence=(*self.diagnosis.lines, *self.facts))
        active = max((sign.last_step for sign in self.evidence.signs.values()), default=-1)
        self.incident = msgspec.structs.replace(self.incident, active_step=max(active, self.incident.active_step))

    def join(self, group: list[Anomaly], facts: StepFacts | None, *, is_skipped: bool) -> None:
        """Take in anomalies that it explains. Title and root follow the worst of them."""
        was_level = self.incident.severity.level
        for anomaly in group:
            self._remember(anomaly)
            if anomaly.severity.level > 0 and not is_skipped:
                self.carried_step = max(self.carried_step, anomaly.step)
        self._follow_early(group)
        self.evidence.join(group, facts)
        now = self.incident
        ranks = {rank for a in group for rank in (a.ranks if a.rank is None else (a.rank,))}
        severity = max((now.severity, *(a.severity for a in group)), key=lambda s: s.level)
        self.incident = msgspec.structs.replace(
            now,
            last_step=max(now.last_step, *(a.step for a in group)),
            severity=severity,
            first_causes=tuple(a.id for a in self.causes),
            num_members=now.num_members + len(group),
            detectors=tuple(sorted({*now.detectors, *(a.detector for a in group)})),
            ranks=tuple(sorted({*now.ranks, *ranks})),
            paged=now.paged or severity is Severity.CRITICAL,
        )
        later = [a for a in group if a.step > now.opened_step]
        is_graver = severity.level > was_level if self.nature == "liveness" else severity.level > was_level == 0
        if is_graver and later:
            # A note gets title and root from what made it graver; a slow rank that died, from its death.
            self._lead(later, "graver than what it began with")
        else:
            self._keep_worst(group)

    def _remember(self, anomaly: Anomaly) -> None:
        for known, key in ((self.series, series_of(anomaly)), (self.lineages, lineage_of(anomaly))):
            if key in known or len(known) < MAX_SERIES:
                known[key] = max(anomaly.step, known.get(key, -1))
        rank = deviating_rank(anomaly)
        if rank is not None:
            self.deviating = tuple(sorted({*self.deviating, rank}))

    def _follow_early(self, group: list[Anomaly]) -> None:
        """Let what came in the opening step, or late before it, take its place among the first causes."""
        now = self.incident
        early = [a for a in group if (a.attempt, a.step) <= (now.attempt, now.opened_step)]
        if not early:
            return
        known = {a.id: a for a in (*self.causes, *early)}
        pool = list(known.values())
        causes = [pool[i] for i in leading_causes(pool)]
        is_late = bool(self.causes)
        self.causes = causes[:MAX_FIRST_CAUSES]
        self.num_unnamed += len(causes) - len(self.causes)
        if self.nature == "nonfinite":
            self.borders = [*self.borders, *(a for a in early if a.border)][:MAX_FIRST_CAUSES]
        if is_late and causes[0].id != now.root and causes[0].id in {a.id for a in early}:
            self.change_root(causes[0], origin(causes[0], pool), "an earlier or graver sign of its first step came late")

    def goes_on_before(self, causes: Sequence[Anomaly], step: int, ongoing: Collection[str]) -> bool:
        """Tell whether what came first in it is bad in a step too, as its rows say, and comes before all of `causes`.

        Where the modules inside are measured no more, the borders that its values passed say so. ongoing: ids of the onsets
        whose series are anomalous in the step; an episode that goes on has no other record.
        """
        first = (*self.causes, *self.leads, *self.borders)
        sources = [msgspec.structs.replace(one, step=step) for one in first if one.id in ongoing]
        return bool(sources) and all(reached_by(sources, causes))

    def _lead(self, group: list[Anomaly], why: str) -> None:
        first = group[leading_causes(group)[0]]
        if first.id != self.root.id:
            self.change_root(first, origin(first, group), why)

    def _keep_worst(self, group: list[Anomaly]) -> None:
        """Keep the worst member of the title's subject, where it is several times as bad as the title's anomaly."""
        mine = series_of(self.root)
        for anomaly in group:
            is_same = anomaly.statistic == self.root.statistic and series_of(anomaly) == mine
            size = size_of(anomaly)
            is_worst = self.worse is None or size > size_of(self.worse)
            if is_same and is_worst and is_several_times(size, self.notified_size):
                self.worse = anomaly

    def revise_by_worst(self, step: int, stride: int) -> None:
        """Revise title and severity by the worst member, `GROWING_STEPS` after the title's anomaly."""
        worse = self.worse
        if worse is None or step - self.notified_step < GROWING_STEPS * stride:
            return
        self.incident = msgspec.structs.replace(self.incident, num_worse=self.incident.num_worse + 1)
        self.change_root(worse, origin(worse, [worse]), "several times worse than what was told")

    def absorb(self, other: OpenIncident) -> None:
        """Take over the members and evidence of an incident that turned out to be the same."""
        a, b = self.incident, other.incident
        self.episodes |= other.episodes
        for mine, theirs in ((self.series, other.series), (self.lineages, other.lineages)):
            for key, step in theirs.items():
                if key in mine or len(mine) < MAX_SERIES:
                    mine[key] = max(step, mine.get(key, -1))
        self.last_bad_step = max(self.last_bad_step, other.last_bad_step)
        self.carried_step = max(self.carried_step, other.carried_step)
        self.deviating = tuple(sorted({*self.deviating, *other.deviating}))
        severity = max(a.severity, b.severity, key=lambda s: s.level)
        self.incident = msgspec.structs.replace(
            a,
            last_step=max(a.last_step, b.last_step),
            severity=severity,
            num_members=a.num_members + b.num_members,
            detectors=tuple(sorted({*a.detectors, *b.detectors})),
            ranks=tuple(sorted({*a.ranks, *b.ranks})),
            paged=a.paged or b.paged,
        )
        self.evidence.absorb(other.evidence)
        self.revise(evidence=f"incident {b.id} turned out to be the same")
        other.episodes = {}
        other.incident = msgspec.structs.replace(b, state="merged", merged_into=a.id)

    def overflow(self, step: int, cause: Anomaly, born: Origin) -> None:
        """Go on as a non-finite incident: what exploded has overflowed."""
        self.nature = "nonfinite"
        words = origin_words(cause, born)
        self.incident = msgspec.structs.replace(
            self.incident, title=f"{self.incident.title}; then {words}", segment=born.segment, module=born.module,
            nature=self.nature,
        )  # fmt: skip
        self.revise(evidence=f"turned non-finite at step {step}: {words}")

    def change_root(self, root: Anomaly, born: Origin, why: str) -> None:
        """Give it the title, severity and root of another anomaly; the title before stays among the facts."""
        before = self.incident.title
        self.root, self.origin = root, born
        self.notified_size, self.notified_step, self.worse = size_of(root), root.step, None
        self.incident = msgspec.structs.replace(
            self.incident,
            root=root.id,
            root_name=root_words(root, born),
            title=title_words(root, born),
            segment=born.segment,
            module=born.module if self.nature == "nonfinite" else "",
        )
        self.revise(evidence=f"{why}; told before: {before}")

    def update_diagnosis(self, *, is_over: bool = False) -> None:
        """Revise its diagnosis, once another has held (`diagnosis/held.py`). is_over: the incident ends here."""
        evidence, held = self.evidence, self.diagnosis
        found = diagnose(evidence)
        step = max(evidence.seen, self.incident.last_step)
        held.see(found, advice(evidence, found), index=evidence.num_seen, step=step, is_over=is_over)
        notified = held.notified
        self.incident = msgspec.structs.replace(
            self.incident, suspected=notified.suspected, evidence=(*held.lines, *self.facts), skip_steps=notified.skip_steps,
            skip_ranks=evidence.ranks_of(notified.skip_lanes),
            skip_samples=evidence.samples_of(notified.skip_steps, notified.skip_lanes) if notified.skip_steps else (),
        )  # fmt: skip


def age(one: OpenIncident) -> tuple[int, int, str]:
    return one.incident.attempt, one.incident.opened_step, one.incident.id


def is_settled_end(end: Anomaly) -> bool:
    return "settled" in end.message or "level shift" in end.message


def has_bad_episode(one: OpenIncident) -> bool:
    """Tell whether the root's own non-finite episode still goes on."""
    return is_nonfinite(one.root) and one.root.id in one.episodes


def as_seen(incident: Incident, root: Anomaly, missing: Collection[int]) -> Incident:
    """Return an incident as reported where rows of some ranks were missing in its step: another anomaly may have been
    first."""
    if not missing or root.rank in missing:
        return incident
    who = ", ".join(map(str, sorted(missing)[:8]))
    title = f"{seen_words(incident.title)}; rank {who} not heard of that step"
    return msgspec.structs.replace(incident, title=title, root_name="", module="", segment="")


def is_same_place(one: OpenIncident, causes: list[Anomaly], born: Origin) -> bool:
    if one.origin.phase != born.phase:
        return False
    first = one.causes[0] if one.causes else one.root
    if one.origin.segment and one.origin.segment == born.segment:
        return True
    if born.module and born.module == one.origin.module:
        return True
    return any(series_of(cause) == series_of(first) for cause in causes)


def refine(one: OpenIncident, cause: Anomaly, born: Origin) -> None:
    """Name the module where the root was only a segment, now that a recurrence was seen from inside."""
    if one.incident.module or not born.module or one.origin.segment != born.segment:
        return
    one.origin = msgspec.structs.replace(one.origin, name=born.name, module=born.module)
    if born.rank in one.origin.ranks and not born.ranks:
        one.origin = msgspec.structs.replace(one.origin, rank=born.rank, ranks=())
    one.incident = msgspec.structs.replace(
        one.incident,
        module=born.module,
        root_name=f"{root_words(one.root, one.origin)}, refined at step {cause.step}",
        title=title_words(one.root, one.origin),
    )
    one.revise(evidence=f"refined at step {cause.step} by module monitoring: {origin_words(cause, born)}")


def opening_facts(nature: str, root: Anomaly, causes: list[Anomaly], group: list[Anomaly]) -> tuple[str, ...]:
    """Return the lines of evidence of an incident that opens: facts alone."""
    if nature != "nonfinite":
        return ()
    border = f" (border {root.border})" if root.border else ""
    facts = [f"first bad: {root.kind} of {root.tag_name}{border}"]
    phase = phase_of(root.kind, root.tag_name)
    if phase in (Phase.FORWARD, Phase.BACKWARD):
        said = "before it in forward" if phase is Phase.FORWARD else "in forward, nor before it in backward"
        span = "step" if root.micro_step is None else "micro_step"
        facts.append(f"nothing non-finite was measured {said}, in that {span} of its replica")
    others = sorted({a.rank for a in causes if a.rank is not None and a.rank != root.rank})
    if others:
        shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        facts.append(f"first bad independently on {len(others) + 1} ranks: {root.rank}, {shown}")
    elif root.rank is not None and root.dp_size > 1:
        lanes = {a.place.get("dp") for a in group if a.rank is not None}
        if len(lanes) == 1:
            facts.append(f"one of {root.dp_size} data-parallel replicas")
    return tuple(facts)
