"""Joining: the anomalies of one step, each into the incident that it follows from, or into one of its own.

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
- A member that is several times worse than the title's anomaly is reported: title, root and severity follow it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sentinel.anomaly import Anomaly, Severity
from sentinel.incident import Incident, incident_id
from sentinel.incidents.diagnosis.background import MIN_LOSSES
from sentinel.incidents.diagnosis.claim import usual
from sentinel.incidents.diagnosis.evidence import Evidence
from sentinel.incidents.diagnosis.step_facts import StepFacts
from sentinel.incidents.open_incident import MAX_FIRST_CAUSES, OpenIncident, age, as_seen, opening_facts, refine
from sentinel.incidents.peers import IncidentConfig, Peers
from sentinel.incidents.scope import nature_of, size_of, subject_of
from sentinel.incidents.titles import root_words, title_words
from sentinel.incidents.tracker_state import TrackerState
from sentinel.order.causes import leading_causes
from sentinel.order.origin import origin


class Joining:
    """Takes one step's anomalies in; made for that step, it writes into the tracker's state."""

    def __init__(
        self,
        state: TrackerState,
        config: IncidentConfig,
        step: int,
        *,
        attempt: int,
        stride: int,
        is_skipped: bool,
        facts: StepFacts | None,
    ) -> None:
        """stride, is_skipped, facts: as of `IncidentTracker.update`."""
        self._state, self._config = state, config
        self._step, self._attempt, self._stride = step, attempt, stride
        self._is_skipped = is_skipped
        self._facts = facts
        self._ongoing: Collection[str] = facts.ongoing if facts is not None else ()
        self.joined: dict[str, list[str]] = {}
        """Id of an incident -> the anomalies that joined it in this step."""
        self.merged: list[OpenIncident] = []
        """Incidents that are over, for they turned out to be part of others."""

    def take(self, onsets: Iterable[Anomaly]) -> None:
        """Take in the onsets of the step, in total order."""
        of_nature: dict[str, list[Anomaly]] = {"liveness": [], "nonfinite": [], "finite": []}
        for anomaly in onsets:
            of_nature[nature_of(anomaly)].append(anomaly)
        bad = of_nature["nonfinite"]
        of_step: OpenIncident | None = None
        if bad:
            of_step = self._take_nonfinite(bad)
            of_step.last_bad_step = max(of_step.last_bad_step, self._step)
            of_step.was_skipped = self._is_skipped
        self._take_finite(of_nature["finite"], bad, of_step)
        for anomaly in of_nature["liveness"]:
            self._take_liveness(anomaly)

    def _take_finite(self, finite: list[Anomaly], bad: list[Anomaly], of_bad: OpenIncident | None) -> None:
        peers, step = self._peers, self._step
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
            one = one or peers.lasting(rest, step, self._ongoing)
            if one is None:
                self._mint("finite", rest)
            else:
                self._join(self._with_its_consequence(one, rest), rest)
        for owner, theirs in known.values():
            self._join(self._with_its_consequence(self._survivor(owner), theirs), theirs)

    def _with_its_consequence(self, one: OpenIncident, group: list[Anomaly]) -> OpenIncident:
        """Return the incident that takes in what a known one shows now.

        A note that turns out to be grave (optimizer state that was lost) is reported with the incident that came of it
        meanwhile, whose message was sent; it opens none of its own.
        """
        is_note = one.nature == "finite" and one.incident.severity is Severity.INFO
        into = self._peers.beside(one) if is_note and any(a.severity is not Severity.INFO for a in group) else None
        if into is None:
            return one
        self._merge(one, into)
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
        return Peers(self._state.open, self._attempt, self._config, self._stride, self._state.background.rates)

    def _take_nonfinite(self, bad: list[Anomaly]) -> OpenIncident:
        peers, step = self._peers, self._step
        causes = [bad[i] for i in leading_causes(bad)]
        born = origin(causes[0], bad)
        recurring = peers.recurring(causes, born)
        # An episode that goes on has no record in this step: its rows are the cause, and what follows of them is no other.
        going_on = peers.going_on(causes, step, self._ongoing)
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
            self._join(one, bad)
        one.evidence.bear(step, bearing, self._facts)
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
            incident=incident,
            nature=nature,
            root=root,
            origin=born,
            causes=[],
            last_bad_step=-1,
            episodes={},
            series={},
            evidence=self._evidence(nature, root),
            facts=opening_facts(nature, root, causes, group),
            notified_size=size_of(root),
            notified_step=root.step,
        )
        self._state.open.append(one)
        self._state.num_incidents += 1
        self._join(one, group)
        return one

    def _evidence(self, nature: str, root: Anomaly) -> Evidence:
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
            if self._config.episode_quiet_steps > 0 and anomaly.rule not in self._config.rules_without_ends:
                one.episodes[anomaly.id] = anomaly.step
                self._state.owner[anomaly.id] = one.incident.id
        one.join(group, self._facts, is_skipped=self._is_skipped)
        self.joined.setdefault(one.incident.id, []).extend(a.id for a in group)

    def _merge(self, other: OpenIncident, into: OpenIncident) -> None:
        for onset_id in other.episodes:
            self._state.owner[onset_id] = into.incident.id
        into.absorb(other)
        self.merged.append(other)
        self.joined.setdefault(into.incident.id, [])
        self._state.open = [one for one in self._state.open if one is not other]

    def _survivor(self, one: OpenIncident) -> OpenIncident:
        """Return the incident that an open one was merged into meanwhile, else itself."""
        into = one.incident.merged_into or one.incident.id
        return next(o for o in self._state.open if o.incident.id == into)
