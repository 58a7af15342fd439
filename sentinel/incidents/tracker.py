"""Incidents: anomalies that follow from the same first causes, as one thing that opens, grows, is refined and closes.

What explains what (all choices are deterministic and kept in the snapshot):

- Inside a step everything meets at the optimizer's barrier, so what a step brings is one component. Liveness (stale or
  slow ranks, blindness) is no part of the arithmetic: one incident for each of its rules.
- A non-finite component joins an open non-finite incident that recurs (same segment, module or tensor as its root),
  or that was still going on a step or two ago without the optimizer having skipped: then the NaN is in the weights.
  It joins a finite incident only if that was critical a step or two ago: an explosion that went on to overflow.
- A finite anomaly joins the open incident that has it already, else the component of its step, else an incident of at
  least its severity that grew a step or two ago. What is more severe is never explained by what was less so.

What an incident makes one suspect (`diagnosis/diagnose.py`) is said anew after every step while it is open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from sentinel.anomaly import Anomaly, Incident, Severity, incident_id
from sentinel.errors import ConfigError
from sentinel.incidents.diagnosis.background import MIN_LOSSES, Background
from sentinel.incidents.diagnosis.claim import JUMP_STEPS, usual
from sentinel.incidents.diagnosis.evidence import Evidence
from sentinel.incidents.diagnosis.step_facts import StepFacts
from sentinel.incidents.open_incident import (
    OpenIncident,
    age,
    has_bad_episode,
    is_same_place,
    opening_facts,
    refine,
    says_settled,
    series_of,
)
from sentinel.order.causal import is_nonfinite, sort_key
from sentinel.order.causes import leading_causes
from sentinel.order.origin import origin
from sentinel.order.wording import born_words, is_liveness, place_words, root_words, title_words

MAX_SERIES = 4096
"""Most series that an incident remembers, to know its own again (chosen); past it the newest are not remembered."""

MAX_FIRST_CAUSES = 64
"""Most first causes that an incident lists (chosen); a NaN on each of a thousand replicas needs no thousand names."""


class IncidentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When incidents close, and how far apart two steps may be and still belong together."""

    quiet_steps: int = 20
    """Steps without a new anomaly, and with no episode of one still going on, after which an incident is resolved."""

    near_steps: int = 2
    """Steps back within which growth counts as going on."""

    episode_quiet_steps: int = 20
    """The engine's setting: 0 says that episodes have no end records, so that none are waited for."""

    rules_without_ends: tuple[str, ...] = ()
    """Names of rules whose own setting is 0: no ends are waited for after their onsets."""

    def __post_init__(self) -> None:
        for name, least in (("quiet_steps", 1), ("near_steps", 1), ("episode_quiet_steps", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"incidents.{name} must be at least {least}, got {getattr(self, name)}")


class _State(msgspec.Struct, kw_only=True):
    """All that a tracker remembers."""

    open: list[OpenIncident] = []
    owner: dict[str, str] = {}
    """Onset id to the incident that holds its episode."""
    attempt: int = -1
    step: int = -1
    num_incidents: int = 0
    background: Background = msgspec.field(default_factory=Background)


class IncidentTracker:
    """Turns the anomalies of closed steps into incidents. Deterministic: same calls, same revisions, byte for byte."""

    def __init__(self, config: IncidentConfig | None = None) -> None:
        self.config = config or IncidentConfig()
        self._state = _State()
        self._touched: dict[str, list[str]] = {}
        self._attempt = 0
        self._stride = 1
        self._facts: StepFacts | None = None

    @property
    def open_incidents(self) -> list[Incident]:
        """The newest revision of every open incident, in order of opening."""
        return [one.incident for one in self._state.open]

    def snapshot(self) -> bytes:
        """Return the whole state; `restore` takes it back exactly."""
        return msgspec.msgpack.encode(self._state)

    def restore(self, snapshot: bytes) -> None:
        """Go on where `snapshot` was taken, by an older version too: its incidents keep the verdict that they have."""
        self._state = msgspec.msgpack.decode(snapshot, type=_State)
        for one in self._state.open:
            if one.case.opened < 0:
                one.facts = one.facts or one.incident.evidence

    def update(
        self,
        step: int,
        anomalies: Sequence[Anomaly],
        *,
        attempt: int = 0,
        time: float = 0.0,
        is_skipped: bool = False,
        settled: Collection[str] = (),
        facts: StepFacts | None = None,
        stride: int = 1,
    ) -> list[Incident]:
        """Take in a closed step and return the revisions it made, oldest incident first; one for each that changed.

        Call it for every closed step, with no anomalies too: that is how quiet is known. Order of `anomalies` is of no
        account. `end` records close episodes; `truncated` records are counted with the incident of their step.

        time: the step's own clock, by default the newest of its anomalies.
        is_skipped: the optimizer skipped this step, so a NaN in it is in no weight.
        settled: ids of onsets whose series went on at a new level, which closes their incident as `settled`.
        facts: what verdicts ask of the step beside its anomalies; None: nothing is known of it, as on a tick.
        stride: steps from one that is told of to the next; quiet and nearness are counted in it.
        """
        self._touched = {}
        before = {one.incident.id: one.incident for one in self._state.open}
        closed: list[OpenIncident] = []
        if attempt > self._state.attempt:
            if self._state.attempt >= 0:
                for one in self._state.open:
                    one.revise(state="resolved", evidence=f"attempt {attempt} began")
                    closed.append(one)
                self._state.open, self._state.owner = [], {}
            self._state.attempt, self._state.step = attempt, -1
            self._state.background = Background()
        if attempt == self._state.attempt:
            self._state.step = max(self._state.step, step)
        self._attempt, self._stride = attempt, stride
        # Late words about an attempt that is over say nothing of the one at hand.
        self._facts = facts if attempt == self._state.attempt else None
        if self._facts is not None:
            self._state.background.see_rates(step, self._facts)
        time = max((time, *(a.time for a in anomalies)), default=time)

        onsets = sorted((a for a in anomalies if a.event == "onset"), key=sort_key)
        self._take_components(onsets, step, is_skipped, closed)
        for end in sorted((a for a in anomalies if a.event == "end"), key=sort_key):
            self._end_episode(end.onset_id or "", end.step, end.onset_id in settled or says_settled(end))
        for onset_id in sorted(settled):
            self._end_episode(onset_id, step, True)
        for note in (a for a in anomalies if a.event == "truncated"):
            self._note_truncated(note)
        for one in self._state.open:
            if one.incident.attempt == attempt:
                self._look(one, step)
        if self._facts is not None:
            self._state.background.see(step, anomalies, self._facts)
        still_open = []
        for one in self._state.open:
            is_quiet = not one.episodes and self._state.step - one.incident.last_step >= self._quiet_of(one)
            # Late words about an attempt that is over open and close an incident at once.
            if is_quiet or one.incident.attempt < self._state.attempt:
                one.revise(state="settled" if one.has_settled else "resolved")
                closed.append(one)
            else:
                still_open.append(one)
        self._state.open = still_open
        for one in closed:
            self._forget(one)
        revisions = [self._publish(one, before, time) for one in (*closed, *still_open)]
        changed = [incident for incident in revisions if incident is not None]
        return sorted(changed, key=lambda i: (i.attempt, i.opened_step, i.id))

    def _look(self, one: OpenIncident, step: int) -> None:
        """Hold an open incident against a closed step, and say what it makes one suspect now."""
        if self._facts is not None:
            one.case.see(step, self._facts)
            jump = self._state.background.jump
            if jump is not None and one.case.jump is None and jump.index >= one.case.num_before - JUMP_STEPS:
                one.case.jump = jump
        if one.case.opened >= 0:
            one.suspect()

    def _quiet_of(self, one: OpenIncident) -> int:
        """An incident all of whose series came to rest at a new level is over at once."""
        return 0 if one.has_settled else self.config.quiet_steps * self._stride

    def _take_components(self, onsets: list[Anomaly], step: int, is_skipped: bool, closed: list[OpenIncident]) -> None:
        liveness: dict[str, list[Anomaly]] = {}
        bad, finite = [], []
        for anomaly in onsets:
            if is_liveness(anomaly):
                liveness.setdefault(anomaly.rule, []).append(anomaly)
            elif is_nonfinite(anomaly):
                bad.append(anomaly)
            else:
                finite.append(anomaly)
        of_step: OpenIncident | None = None
        if bad:
            of_step = self._take_nonfinite(bad, step, closed)
            of_step.last_bad_step = max(of_step.last_bad_step, step)
            of_step.was_skipped = is_skipped
        known: list[tuple[OpenIncident, Anomaly]] = []
        rest = []
        for anomaly in finite:
            owner = self._owner_of_series(anomaly)
            if owner is None:
                rest.append(anomaly)
            else:
                known.append((owner, anomaly))
        if rest:
            of_step = of_step or self._near(rest, step)
            if of_step is None:
                # Of the incidents that the step's other anomalies belong to, one that is as grave explains the rest.
                worst = max(a.severity.level for a in rest)
                owners = [owner for owner, _ in known if owner.incident.severity.level >= worst]
                of_step = min(owners, key=age, default=None)
            if of_step is None:
                of_step = self._mint("finite", rest)
            else:
                self._join(of_step, rest)
        for owner, anomaly in known:
            if any(owner is one for one in self._state.open):
                self._join(owner, [anomaly])
            else:
                self._join(self._survivor(owner), [anomaly])
        for rule in sorted(liveness):
            group = liveness[rule]
            open_one = next((one for one in self._peers("liveness") if one.root.rule == rule), None)
            if open_one is None:
                self._mint("liveness", group)
            else:
                self._join(open_one, group)

    def _peers(self, *natures: str) -> list[OpenIncident]:
        """Open incidents of the attempt at hand, of these natures."""
        return [one for one in self._state.open if one.incident.attempt == self._attempt and one.nature in natures]

    def _is_near(self, one: OpenIncident, step: int, last_step: int) -> bool:
        """Tell whether a step lies in the time of an incident, or a little before or behind it."""
        near = self.config.near_steps * self._stride
        return one.incident.opened_step - near <= step <= last_step + near

    def _take_nonfinite(self, bad: list[Anomaly], step: int, closed: list[OpenIncident]) -> OpenIncident:
        causes = [bad[i] for i in leading_causes(bad)]
        born = origin(causes[0], bad)
        open_bad = self._peers("nonfinite")
        recurring = [one for one in open_bad if is_same_place(one, causes, born)]
        spreading = [
            one
            for one in open_bad
            if not one.was_skipped and (self._is_near(one, step, one.last_bad_step) or has_bad_episode(one))
        ]
        exploding = [
            one
            for one in self._peers("finite")
            if one.incident.severity is Severity.CRITICAL and self._is_near(one, step, one.incident.last_step)
        ]
        is_going_on = any(not one.was_skipped and self._is_near(one, step, one.last_bad_step) for one in open_bad)
        # What bad weights bring is not born anew.
        bearing = [] if is_going_on else [(cause, origin(cause, bad)) for cause in causes[:MAX_FIRST_CAUSES]]
        explaining = sorted({one.incident.id: one for one in (*recurring, *spreading)}.values(), key=age)
        if not explaining and exploding:
            one = min(exploding, key=age)
            self._join(one, bad)
            one.case.bear(step, bearing, self._facts)
            one.nature = "nonfinite"
            words = born_words(causes[0], born)
            one.incident = msgspec.structs.replace(
                one.incident, title=f"{one.incident.title}; then {words}", segment=born.segment, module=born.module
            )
            one.revise(evidence=f"turned non-finite at step {step}: {words}")
            return one
        if not explaining:
            one = self._mint("nonfinite", bad)
            one.case.bear(step, bearing, self._facts)
            return one
        first, *others = explaining
        for other in others:
            self._merge(other, first)
            closed.append(other)
        self._join(first, bad)
        first.case.bear(step, bearing, self._facts)
        if first in recurring:
            refine(first, causes[0], born)
        return first

    def _owner_of_series(self, anomaly: Anomaly) -> OpenIncident | None:
        key = series_of(anomaly)
        # A series may make its own incident graver while it lasts; later it is news.
        owners = [
            one
            for one in self._peers("nonfinite", "finite")
            if key in one.series
            and (
                one.incident.severity.level >= anomaly.severity.level
                or abs(anomaly.step - one.series[key]) <= self.config.near_steps * self._stride
            )
        ]
        return min(owners, key=age, default=None)

    def _near(self, group: list[Anomaly], step: int) -> OpenIncident | None:
        worst = max(a.severity.level for a in group)
        near = [
            one
            for one in self._peers("nonfinite", "finite")
            if one.incident.severity.level >= max(worst, Severity.WARNING.level)
            and self._is_near(one, step, one.incident.last_step)
        ]
        return min(near, key=age, default=None)

    def _mint(self, nature: str, group: list[Anomaly]) -> OpenIncident:
        causes = [group[i] for i in leading_causes(group)]
        root = causes[0]
        born = origin(root, group)
        incident = Incident(
            id=incident_id(root.run, root.attempt, root.step, root.detector, root.id),
            revision=0,
            run=root.run,
            attempt=root.attempt,
            state="open",
            opened_step=root.step,
            last_step=root.step,
            severity=root.severity,
            title=title_words(root, born),
            root=root.id,
            root_name=root_words(root, born),
            segment=born.segment,
            module=born.module if nature == "nonfinite" else "",
        )
        one = OpenIncident(
            incident=incident, nature=nature, root=root, origin=born, causes=[], last_bad_step=-1, episodes={}, series={},
            case=self._case(nature, root), facts=opening_facts(nature, root, causes, group),
        )  # fmt: skip
        self._state.open.append(one)
        self._state.num_incidents += 1
        self._join(one, group)
        return one

    def _case(self, nature: str, root: Anomaly) -> Evidence:
        before = self._state.background
        return Evidence(
            opened=root.step,
            is_liveness=nature == "liveness",
            num_alike=before.num_alike,
            last_alike=before.last_alike,
            scale_before=before.loss_scale,
            trouble_step=before.trouble_step,
            num_before=before.num_steps,
            known_odd=before.odd_weights,
            losses={name: usual(values) for name, values in sorted(before.losses.items()) if len(values) >= MIN_LOSSES},
        )

    def _join(self, one: OpenIncident, group: Iterable[Anomaly]) -> None:
        group = list(group)
        now = one.incident
        for anomaly in group:
            key = series_of(anomaly)
            if key in one.series or len(one.series) < MAX_SERIES:
                one.series[key] = max(anomaly.step, one.series.get(key, -1))
            if self.config.episode_quiet_steps > 0 and anomaly.rule not in self.config.rules_without_ends:
                one.episodes[anomaly.id] = anomaly.step
                self._state.owner[anomaly.id] = now.id
        # Only what came in the opening step, or late before it, can still be among the first causes.
        early = [a for a in group if (a.attempt, a.step) <= (now.attempt, now.opened_step)]
        if early:
            known = {a.id: a for a in (*one.causes, *early)}
            pool = list(known.values())
            causes = [pool[i] for i in leading_causes(pool)]
            one.causes = causes[:MAX_FIRST_CAUSES]
            one.num_unnamed += len(causes) - len(one.causes)
            if one.causes[0].id != now.root and one.causes[0].id in {a.id for a in early}:
                one.revise(evidence=f"an earlier sign came late: {place_words(one.causes[0])}")
        one.case.join(group, self._facts)
        self._touched.setdefault(now.id, []).extend(a.id for a in group)
        ranks = {rank for a in group for rank in (a.ranks if a.rank is None else (a.rank,))}
        severity = max((now.severity, *(a.severity for a in group)), key=lambda s: s.level)
        one.incident = msgspec.structs.replace(
            one.incident,
            last_step=max(now.last_step, *(a.step for a in group)),
            severity=severity,
            first_causes=tuple(a.id for a in one.causes),
            num_members=now.num_members + len(group),
            detectors=tuple(sorted({*now.detectors, *(a.detector for a in group)})),
            ranks=tuple(sorted({*now.ranks, *ranks})),
            paged=now.paged or severity is Severity.CRITICAL,
        )

    def _merge(self, other: OpenIncident, into: OpenIncident) -> None:
        a, b = into.incident, other.incident
        into.episodes |= other.episodes
        for onset_id in other.episodes:
            self._state.owner[onset_id] = a.id
        other.episodes = {}
        for key, step in other.series.items():
            if key in into.series or len(into.series) < MAX_SERIES:
                into.series[key] = max(step, into.series.get(key, -1))
        into.last_bad_step = max(into.last_bad_step, other.last_bad_step)
        severity = max(a.severity, b.severity, key=lambda s: s.level)
        into.incident = msgspec.structs.replace(
            a,
            last_step=max(a.last_step, b.last_step),
            severity=severity,
            num_members=a.num_members + b.num_members,
            detectors=tuple(sorted({*a.detectors, *b.detectors})),
            ranks=tuple(sorted({*a.ranks, *b.ranks})),
            paged=a.paged or b.paged,
        )
        into.case.absorb(other.case)
        into.revise(evidence=f"incident {b.id} turned out to be the same")
        self._touched.setdefault(a.id, [])
        other.incident = msgspec.structs.replace(b, state="merged", merged_into=a.id)
        self._state.open = [one for one in self._state.open if one is not other]

    def _survivor(self, one: OpenIncident) -> OpenIncident:
        into = one.incident.merged_into
        return next(o for o in self._state.open if o.incident.id == into)

    def _end_episode(self, onset_id: str, step: int, has_settled: bool) -> None:
        owner = self._state.owner.pop(onset_id, None)
        one = next((o for o in self._state.open if o.incident.id == owner), None)
        if one is not None:
            one.episodes.pop(onset_id, None)
            one.has_settled = one.has_settled or has_settled

    def _note_truncated(self, note: Anomaly) -> None:
        of_step = [one for one in self._state.open if one.incident.last_step == note.step]
        if of_step:
            one = min(of_step, key=age)
            one.revise(evidence=f"step {note.step}: {note.count} more anomalies were not written")
            one.incident = msgspec.structs.replace(one.incident, num_members=one.incident.num_members + note.count)

    def _forget(self, one: OpenIncident) -> None:
        for onset_id in one.episodes:
            if self._state.owner.get(onset_id) == one.incident.id:
                del self._state.owner[onset_id]

    def _publish(self, one: OpenIncident, before: dict[str, Incident], time: float) -> Incident | None:
        members = tuple(self._touched.get(one.incident.id, ()))
        if not members and before.get(one.incident.id) == one.incident:
            return None
        one.incident = msgspec.structs.replace(
            one.incident, revision=one.incident.revision + 1, members=members, time=max(time, one.incident.time)
        )
        published = one.incident
        # The next revision says what joined with it alone: to compare with, the members of this one are laid off.
        one.incident = msgspec.structs.replace(one.incident, members=())
        return published
