"""IncidentTracker: groups anomalies that follow from the same first causes into incidents, which open, are revised and end.

Which incident explains an anomaly is decided in `joining.py`. The diagnosis of an open incident (`diagnosis/`) is made anew
after every step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.errors import ConfigError
from sentinel.incident import Incident, IncidentAct
from sentinel.incidents.diagnosis.claim import JUMP_STEPS
from sentinel.incidents.diagnosis.held import HeldDiagnosis
from sentinel.incidents.diagnosis.step_facts import StepFacts
from sentinel.incidents.joining import Joining
from sentinel.incidents.open_incident import OpenIncident, age, is_settled_end
from sentinel.incidents.peers import IncidentConfig
from sentinel.incidents.publishing import published
from sentinel.incidents.reconciling import reconcile
from sentinel.incidents.tracker_state import MAX_CLOSED, TrackerState
from sentinel.order.causal import sort_key
from sentinel.run_end import RunEnd


class IncidentTracker:
    """Turns the anomalies of closed steps into incidents. Deterministic: same calls, same revisions, byte for byte."""

    def __init__(self, config: IncidentConfig | None = None) -> None:
        self.config = config or IncidentConfig()
        self._state = TrackerState()

    @property
    def open_incidents(self) -> list[Incident]:
        """The newest revision of every open incident, in order of opening."""
        return [one.incident for one in self._state.open]

    def snapshot(self) -> bytes:
        """Return the whole state; `restore` takes it back exactly."""
        return msgspec.msgpack.encode(self._state)

    def restore(self, snapshot: bytes) -> None:
        """Go on where `snapshot` was taken, by an older version too: its incidents keep the diagnosis that they have."""
        self._state = msgspec.msgpack.decode(snapshot, type=TrackerState)
        for one in self._state.open:
            if one.evidence.opened < 0:
                one.facts = one.facts or one.incident.evidence
            if one.diagnosis.notified.suspected != one.incident.suspected:
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
        facts: what diagnoses ask of the step beside its anomalies; None: nothing is known of it, as on a tick.
        stride: steps from one measured step to the next; quiet and nearness are counted in it.
        ended: the attempt is over: what is open ends with it, these anomalies among it.
        """
        before = self._revisions()
        closed = self._state.begin_attempt(attempt) if attempt > self._state.attempt else []
        if attempt == self._state.attempt:
            self._state.step = max(self._state.step, step)
        else:
            facts = None  # Late words about an attempt that is over say nothing of the one at hand.
        if facts is not None:
            self._state.background.see_rates(step, facts)
        time = max((time, *(a.time for a in anomalies)), default=time)

        joining = Joining(self._state, self.config, step, attempt=attempt, stride=stride, is_skipped=is_skipped, facts=facts)
        joining.take(sorted((a for a in anomalies if a.event == "onset"), key=sort_key))
        closed += joining.merged
        for end in sorted((a for a in anomalies if a.event == "end"), key=sort_key):
            self._state.end_episode(end.onset_id or "", end.onset_id in settled or is_settled_end(end))
        for onset_id in sorted(settled):
            self._state.end_episode(onset_id, True)
        for note in (a for a in anomalies if a.event == "truncated"):
            self._note_truncated(note)
        for one in self._state.open:
            if one.incident.attempt == attempt:
                self._look(one, step, stride, facts)
        if facts is not None:
            self._state.background.see(step, anomalies, facts)
        still_open = []
        for one in self._state.open:
            state, why = self._end_of(one, attempt, stride, ended)
            if state:
                one.revise(state=state, evidence=why or None)
                closed.append(one)
            else:
                still_open.append(one)
        self._state.open = still_open
        return self._publish_all(closed, before, time, joining.joined)

    def why_not(self, act: IncidentAct) -> str:
        """Return why what a person did cannot be taken now, in words; empty: it can."""
        one = self._state.known(act.incident)
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
        before = self._revisions()
        one = self._state.known(act.incident)
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
        return self._publish_all(closed, before, act.time, {})

    def reconcile(self, written: Mapping[str, Incident], roots: Mapping[str, Anomaly], step: int) -> list[Incident]:
        """Go on from incidents as they were written; see `reconciling.py`."""
        revisions = reconcile(self._state, written, roots, step)
        self._state.open.sort(key=age)
        return revisions

    def _revisions(self) -> dict[str, Incident]:
        return {one.incident.id: one.incident for one in self._state.open}

    def _end_of(self, one: OpenIncident, attempt: int, stride: int, ended: RunEnd | None) -> tuple[str, str]:
        """Return the state in which an open incident is over now, and a fact to add; empty: it is not."""
        if ended is not None and one.incident.attempt <= attempt:
            return "ended", _end_words(ended)
        # Late words about an attempt that is over open and close an incident at once.
        if one.incident.attempt < self._state.attempt:
            return "ended", f"attempt {self._state.attempt} had begun"
        seen = max(one.incident.last_step, one.reopened_step)
        if one.episodes or self._state.step - seen < self._quiet_of(one, stride):
            return "", ""
        return "settled" if one.has_settled else "resolved", ""

    def _publish_all(
        self, closed: list[OpenIncident], before: dict[str, Incident], time: float, joined: Mapping[str, list[str]]
    ) -> list[Incident]:
        """joined: id of an incident -> the anomalies that joined it."""
        for one in closed:
            self._state.forget(one)
        revisions = [
            published(one, joined.get(one.incident.id, ()), before.get(one.incident.id), time)
            for one in (*closed, *self._state.open)
        ]
        kept = [one for one in closed if one.incident.state != "merged"]
        self._state.closed = [*self._state.closed, *kept][-MAX_CLOSED:]
        changed = [incident for incident in revisions if incident is not None]
        return sorted(changed, key=lambda i: (i.attempt, i.opened_step, i.id))

    def _look(self, one: OpenIncident, step: int, stride: int, facts: StepFacts | None) -> None:
        """Hold an open incident against a closed step, and say what it makes one suspect now."""
        if facts is not None:
            one.evidence.see(step, facts)
            jump = self._state.background.jump
            if jump is not None and one.evidence.jump is None and jump.index >= one.evidence.num_before - JUMP_STEPS:
                one.evidence.jump = jump
        one.revise_by_worst(step, stride)
        if one.evidence.opened >= 0:
            one.update_diagnosis()

    def _quiet_of(self, one: OpenIncident, stride: int) -> int:
        """An incident all of whose series came to rest at a new level is over at once."""
        return 0 if one.has_settled else self.config.quiet_steps * stride

    def _note_truncated(self, note: Anomaly) -> None:
        of_step = [one for one in self._state.open if one.incident.last_step == note.step]
        if of_step:
            one = min(of_step, key=age)
            one.revise(evidence=f"step {note.step}: {note.count} more anomalies were not written")
            one.incident = msgspec.structs.replace(one.incident, num_members=one.incident.num_members + note.count)


def _end_words(ended: RunEnd) -> str:
    who = "" if ended.rank is None else f", rank {ended.rank} first"
    return f"the run ended ({ended.how.replace('_', ' ')}{who})" + (f": {ended.detail}" if ended.detail else "")
