"""Incidents: anomalies that follow from the same first causes, as one thing that opens, grows, is refined and ends.

What explains what (all choices are deterministic and kept in the snapshot). Ill timing and ill
numbers never share an incident.

- Ranks: each slow, silent or dead rank is a subject of its own. Blindness is one of each of its rules.
- Non-finite values of a step are one component. It joins an open non-finite incident that recurs (same segment, module or
  tensor as its root), or that was still going on a step or two ago without the optimizer having skipped: then the NaN is in
  the weights; or whose own rows are bad in this very step, before them. It joins a finite incident only if that was critical
  a step or two ago: an explosion that went on to overflow.
- A finite anomaly joins the open incident that had its series, or another tensor of its module, within the quiet window;
  else the incident of its own step's other anomalies, where that is young or a path of the order leads between them; else
  an incident whose last step's update the weights carried on, a step or two ago; else a young one whose first cause still
  shows, before it; else it opens one of its own. A note that turns grave joins the incident that came of it meanwhile.
- What is graver than an incident is explained by it only a step or two after its series was last seen there.
- A member that is several times worse than what the title tells is told: title, root and severity follow it.

What an incident makes one suspect (`diagnosis/`) is said anew after every step while it is open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.errors import ConfigError
from sentinel.incident import Incident, IncidentAct, incident_id
from sentinel.incidents.diagnosis.background import MIN_LOSSES, Background
from sentinel.incidents.diagnosis.claim import JUMP_STEPS, usual
from sentinel.incidents.diagnosis.evidence import Evidence
from sentinel.incidents.diagnosis.held import HeldDiagnosis
from sentinel.incidents.diagnosis.step_facts import StepFacts
from sentinel.incidents.open_incident import (
    MAX_FIRST_CAUSES,
    OpenIncident,
    age,
    as_seen,
    opening_facts,
    refine,
    says_settled,
)
from sentinel.incidents.peers import IncidentConfig, Peers
from sentinel.incidents.scope import nature_of, size_of, subject_of
from sentinel.incidents.wording import root_words, title_words
from sentinel.order.causal import sort_key
from sentinel.order.causes import leading_causes
from sentinel.order.origin import origin
from sentinel.run_end import RunEnd

MAX_CLOSED = 64
"""Closed incidents that are remembered, for a person to reopen (chosen)."""


class _TrackerState(msgspec.Struct, kw_only=True):
    """All that a tracker remembers."""

    open: list[OpenIncident] = []
    owner: dict[str, str] = {}
    """Onset id to the incident that holds its episode."""
    attempt: int = -1
    step: int = -1
    num_incidents: int = 0
    background: Background = msgspec.field(default_factory=Background)
    closed: list[OpenIncident] = []
    """The newest that are over, oldest first."""


class IncidentTracker:
    """Turns the anomalies of closed steps into incidents. Deterministic: same calls, same revisions, byte for byte."""

    def __init__(self, config: IncidentConfig | None = None) -> None:
        self.config = config or IncidentConfig()
        self._state = _TrackerState()
        self._touched: dict[str, list[str]] = {}
        self._attempt = 0
        self._stride = 1
        self._is_skipped = False
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
        self._state = msgspec.msgpack.decode(snapshot, type=_TrackerState)
        for one in self._state.open:
            if one.case.opened < 0:
                one.facts = one.facts or one.incident.evidence
            if one.diagnosis.told.verdict != one.incident.verdict:
                one.diagnosis = HeldDiagnosis.of(one.incident)

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
        ended: RunEnd | None = None,
    ) -> list[Incident]:
        """Take in a closed step and return the revisions it made, oldest incident first; one for each that changed.

        Call it for every closed step, with no anomalies too: that is how quiet is known. Order of `anomalies` is of no
        account. `end` records close episodes; `truncated` records are counted with the incident of their step.

        time: the step's own clock, by default the newest of its anomalies.
        is_skipped: the optimizer skipped this step, so a NaN in it is in no weight.
        settled: ids of onsets whose series went on at a new level, which closes their incident as `settled`.
        facts: what verdicts ask of the step beside its anomalies; None: nothing is known of it, as on a tick.
        stride: steps from one that is told of to the next; quiet and nearness are counted in it.
        ended: the attempt is over: what is open ends with it, these anomalies among it.
        """
        before = self._begin()
        closed: list[OpenIncident] = []
        if attempt > self._state.attempt:
            if self._state.attempt >= 0:
                for one in self._state.open:
                    one.revise(state="ended", evidence=f"attempt {attempt} began")
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
            state, why = self._end_of(one, attempt, ended)
            if state:
                one.revise(state=state, evidence=why or None)
                closed.append(one)
            else:
                still_open.append(one)
        self._state.open = still_open
        return self._publish_all(closed, before, time)

    def why_not(self, act: IncidentAct) -> str:
        """Return why what a person did cannot be taken now, in words; empty: it can."""
        one = self._known(act.incident)
        if one is None:
            return f'"{act.incident}": expected an open incident, or one of the last {MAX_CLOSED} that ended'
        if act.id and any(known.id == act.id for known in one.incident.acts):
            return f'"{act.incident}": taken already'
        state = one.incident.state
        if act.act == "reopen":
            return "" if state != "open" else f'"{act.incident}": expected an incident that is over, this one is open'
        if act.act not in ("ack", "resolve"):
            return f'expected an act of ack, resolve or reopen, got "{act.act}"'
        return "" if state == "open" else f'"{act.incident}": expected an open incident, this one is {state} already'

    def act(self, act: IncidentAct) -> list[Incident]:
        """Take in what a person did about an incident, and return the revision that it made; ConfigError: `why_not`."""
        why = self.why_not(act)
        if why:
            raise ConfigError(why)
        before = self._begin()
        one = self._known(act.incident)
        assert one is not None
        closed: list[OpenIncident] = []
        if act.act == "reopen":
            self._state.closed = [other for other in self._state.closed if other is not one]
            self._state.open = sorted([*self._state.open, one], key=age)
            one.reopened_step = max(self._state.step, one.incident.last_step)
        elif act.act == "resolve":
            self._state.open = [other for other in self._state.open if other is not one]
            closed.append(one)
        states = {"reopen": "open", "resolve": "closed", "ack": "open"}
        one.revise(state=states[act.act], evidence=act.in_words)
        one.incident = msgspec.structs.replace(one.incident, acts=(*one.incident.acts, act))
        return self._publish_all(closed, before, act.time)

    def _known(self, incident: str) -> OpenIncident | None:
        return next((one for one in (*self._state.open, *self._state.closed) if one.incident.id == incident), None)

    def _begin(self) -> dict[str, Incident]:
        self._touched = {}
        return {one.incident.id: one.incident for one in self._state.open}

    def _end_of(self, one: OpenIncident, attempt: int, ended: RunEnd | None) -> tuple[str, str]:
        """Return the state in which an open incident is over now, and a fact to add; empty: it is not."""
        if ended is not None and one.incident.attempt <= attempt:
            return "ended", _end_words(ended)
        # Late words about an attempt that is over open and close an incident at once.
        if one.incident.attempt < self._state.attempt:
            return "ended", f"attempt {self._state.attempt} had begun"
        seen = max(one.incident.last_step, one.reopened_step)
        if one.episodes or self._state.step - seen < self._quiet_of(one):
            return "", ""
        return "settled" if one.has_settled else "resolved", ""

    def _publish_all(self, closed: list[OpenIncident], before: dict[str, Incident], time: float) -> list[Incident]:
        for one in closed:
            self._forget(one)
        revisions = [self._publish(one, before, time) for one in (*closed, *self._state.open)]
        kept = [one for one in closed if one.incident.state != "merged"]
        self._state.closed = [*self._state.closed, *kept][-MAX_CLOSED:]
        changed = [incident for incident in revisions if incident is not None]
        return sorted(changed, key=lambda i: (i.attempt, i.opened_step, i.id))

    def _look(self, one: OpenIncident, step: int) -> None:
        """Hold an open incident against a closed step, and say what it makes one suspect now."""
        if self._facts is not None:
            one.case.see(step, self._facts)
            jump = self._state.background.jump
            if jump is not None and one.case.jump is None and jump.index >= one.case.num_before - JUMP_STEPS:
                one.case.jump = jump
        one.tell_worse(step, self._stride)
        if one.case.opened >= 0:
            one.suspect()

    def _quiet_of(self, one: OpenIncident) -> int:
        """An incident all of whose series came to rest at a new level is over at once."""
        return 0 if one.has_settled else self.config.quiet_steps * self._stride

    def _take_components(self, onsets: list[Anomaly], step: int, is_skipped: bool, closed: list[OpenIncident]) -> None:
        of_nature: dict[str, list[Anomaly]] = {"liveness": [], "nonfinite": [], "finite": []}
        for anomaly in onsets:
            of_nature[nature_of(anomaly)].append(anomaly)
        self._is_skipped = is_skipped
        bad = of_nature["nonfinite"]
        of_step: OpenIncident | None = None
        if bad:
            of_step = self._take_nonfinite(bad, step, closed)
            of_step.last_bad_step = max(of_step.last_bad_step, step)
            of_step.was_skipped = is_skipped
        self._take_finite(of_nature["finite"], bad, of_step, step, closed)
        for anomaly in of_nature["liveness"]:
            self._take_liveness(anomaly)

    def _take_finite(
        self, finite: list[Anomaly], bad: list[Anomaly], of_bad: OpenIncident | None, step: int, closed: list[OpenIncident]
    ) -> None:
        peers = self._peers
        known: dict[str, tuple[OpenIncident, list[Anomaly]]] = {}
        rest = []
        for anomaly in finite:
            owner = peers.owner(anomaly)
            if owner is None:
                rest.append(anomaly)
            else:
                known.setdefault(owner.incident.id, (owner, []))[1].append(anomaly)
        if rest:
            explained = [(of_bad, bad)] if of_bad is not None else []
            explained += [(owner, theirs) for owner, theirs in sorted(known.values(), key=lambda one: age(one[0]))]
            one = next((owner for owner, theirs in explained if peers.explains(owner, theirs, rest, step)), None)
            one = one or peers.carrying(rest, step)
            one = one or peers.lasting(rest, step, self._facts.ongoing if self._facts is not None else ())
            if one is None:
                self._mint("finite", rest)
            else:
                self._join(self._with_its_consequence(one, rest, closed), rest)
        for owner, theirs in known.values():
            self._join(self._with_its_consequence(self._survivor(owner), theirs, closed), theirs)

    def _with_its_consequence(self, one: OpenIncident, group: list[Anomaly], closed: list[OpenIncident]) -> OpenIncident:
        """Return the incident that takes in what a known one shows now.

        A note that turns out to be grave (optimizer state that was lost) is told with the incident that came of it
        meanwhile, of which people have heard; it opens none of its own beside it.
        """
        is_note = one.nature == "finite" and one.incident.severity is Severity.INFO
        into = self._peers.beside(one) if is_note and any(a.severity is not Severity.INFO for a in group) else None
        if into is None:
            return one
        self._merge(one, into)
        closed.append(one)
        return into

    def _take_liveness(self, anomaly: Anomaly) -> None:
        one = self._peers.of_subject(anomaly)
        if one is None:
            self._mint("liveness", [anomaly]).subject = subject_of(anomaly)
        else:
            one.subject = tuple(sorted({*one.subject, *subject_of(anomaly)}))
            self._join(one, [anomaly])

    @property
    def _peers(self) -> Peers:
        return Peers(self._state.open, self._attempt, self.config, self._stride, self._state.background.rates)

    def _take_nonfinite(self, bad: list[Anomaly], step: int, closed: list[OpenIncident]) -> OpenIncident:
        peers = self._peers
        causes = [bad[i] for i in leading_causes(bad)]
        born = origin(causes[0], bad)
        recurring = peers.recurring(causes, born)
        # An episode that goes on has no record in this step: its rows are the cause, and what follows of them is no other.
        going_on = peers.going_on(causes, step, self._facts.ongoing if self._facts is not None else ())
        explaining = sorted(
            {one.incident.id: one for one in (*recurring, *peers.spreading(step), *going_on)}.values(), key=age
        )
        is_new = not peers.is_in_the_weights(step) and (bool(recurring) or not going_on)
        bearing = [(cause, origin(cause, bad)) for cause in causes[:MAX_FIRST_CAUSES]] if is_new else []
        exploding = None if explaining else peers.exploding(step)
        if exploding is not None:
            one = exploding
            self._join(one, bad)
            one.overflow(step, causes[0], born)
        elif not explaining:
            one = self._mint("nonfinite", bad)
        else:
            one, *others = explaining
            for other in others:
                self._merge(other, one)
                closed.append(other)
            self._join(one, bad)
        one.case.bear(step, bearing, self._facts)
        if one in recurring:
            one.leads = [*one.leads, *causes][-MAX_FIRST_CAUSES:]
            refine(one, causes[0], born)
        return one

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
            nature=nature,
        )
        if self._facts is not None and nature == "nonfinite":
            incident = as_seen(incident, root, self._facts.missing)
        one = OpenIncident(
            incident=incident, nature=nature, root=root, origin=born, causes=[], last_bad_step=-1, episodes={}, series={},
            case=self._case(nature, root), facts=opening_facts(nature, root, causes, group), told_size=size_of(root),
            told_step=root.step,
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
            finite_gradients=dict(before.finite_gradients),
            losses={name: usual(values) for name, values in sorted(before.losses.items()) if len(values) >= MIN_LOSSES},
        )

    def _join(self, one: OpenIncident, group: Iterable[Anomaly]) -> None:
        group = list(group)
        for anomaly in group:
            if self.config.episode_quiet_steps > 0 and anomaly.rule not in self.config.rules_without_ends:
                one.episodes[anomaly.id] = anomaly.step
                self._state.owner[anomaly.id] = one.incident.id
        one.join(group, self._facts, is_skipped=self._is_skipped)
        self._touched.setdefault(one.incident.id, []).extend(a.id for a in group)

    def _merge(self, other: OpenIncident, into: OpenIncident) -> None:
        for onset_id in other.episodes:
            self._state.owner[onset_id] = into.incident.id
        into.absorb(other)
        self._touched.setdefault(into.incident.id, [])
        self._state.open = [one for one in self._state.open if one is not other]

    def _survivor(self, one: OpenIncident) -> OpenIncident:
        """Return the incident that an open one was merged into meanwhile, else itself."""
        into = one.incident.merged_into or one.incident.id
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
        # What is over waits for nothing; of what it had, enough is kept to be opened again by a person.
        one.episodes = {}
        one.series, one.lineages = _first(one.series), _first(one.lineages)

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


def _first(known: dict[str, int]) -> dict[str, int]:
    return dict(list(known.items())[:MAX_CLOSED])


def _end_words(ended: RunEnd) -> str:
    who = "" if ended.rank is None else f", rank {ended.rank} first"
    return f"the run ended ({ended.how.replace('_', ' ')}{who})" + (f": {ended.detail}" if ended.detail else "")
