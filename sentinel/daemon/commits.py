"""StepCommits: judged steps and moments on their way into the journal, several in one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from sentinel.anomaly import Anomaly
from sentinel.control.proposal import Proposal
from sentinel.daemon.incident_alerts import IncidentAlerts
from sentinel.daemon.run_files import RunFiles
from sentinel.daemon.run_history import RunHistory
from sentinel.daemon.snapshots import Acknowledgement, Snapshots, snapshot_of
from sentinel.daemon.stages import RunStages
from sentinel.decision import Decision, Tick, encode_decision
from sentinel.judge.judge import Judgement
from sentinel.report.alert import Alert
from sentinel.report.files import anomaly_line, json_line
from sentinel.store.found import FoundAnomaly, FoundIncident
from sentinel.store.journal import Commit, Journal
from sentinel.store.outbox_table import Outgoing

STEPS_PER_COMMIT = 64
"""Most steps judged between two commits: while catching up, the first alert must not wait for the last step."""


class StepCommits:
    """Writes a decision down before it is judged, and what judging it brought behind it, all of it or nothing."""

    def __init__(
        self,
        journal: Journal,
        files: RunFiles,
        alerts: IncidentAlerts,
        snapshots: Snapshots,
        acknowledgement: Acknowledgement,
        takes: Callable[[Proposal], bool],
        history: RunHistory,
    ) -> None:
        """takes: whether anybody follows a proposal; what nobody follows is not kept."""
        self.judged = journal.judged
        """The last decision that was judged for the first time; what comes again up to it brings nothing new."""
        self.seq = self.judged
        """The decision whose state the stages are in."""
        self.num_onsets = journal.found.num_onsets()
        """Anomalies since the run began, of which the journal has all: who sees this number change may ask for them."""
        self.num_revisions = 0
        """Revisions of incidents since this was made, of which the journal has all: it only grows."""
        self._journal, self._files, self._alerts = journal, files, alerts
        self._snapshots, self._acknowledgement = snapshots, acknowledgement
        self._takes, self._history = takes, history
        self._commit: Commit | None = None
        self._num_decisions = 0
        self._has_alerts = False

    def take_alerts(self) -> bool:
        """Return whether alerts were committed since this was last asked."""
        found, self._has_alerts = self._has_alerts, False
        return found

    def tell_repaired(self, now: float) -> None:
        """Put what is to be sent of the revisions that a repair made into the outbox. now: seconds since the epoch."""
        made = self._alerts.untold(now)
        if made:
            outbox = [
                Outgoing(key=alert.key, topic=alert.topic, body=alert.body, tries=int(is_maybe_told))
                for alert, is_maybe_told in made
            ]
            self._journal.commit(Commit(judged=self._journal.judged, outbox=outbox))
            self._alerts.have_told()
            self._has_alerts = True

    def tell_newcomers(self, now: float) -> None:
        """Put what is open into the outbox for sinks that the run did not have before. now: seconds since the epoch."""
        if self._commit is None:
            alerts = self._alerts.newcomers(now)
            if alerts:
                self._journal.commit(Commit(judged=self._journal.judged, outbox=_outgoing(alerts)))
                self._has_alerts = True
            self._alerts.have_met()

    def escalate(self, now: float) -> None:
        """Put what is to be sent of pages that nobody has acknowledged into the outbox. now: seconds since the epoch."""
        alerts = self._alerts.escalations(now)
        if alerts and self._commit is None:
            self._journal.commit(Commit(judged=self._journal.judged, outbox=_outgoing(alerts)))
            self._alerts.have_escalated(alerts)
            self._has_alerts = True

    def begin(self, decision: Decision | Tick) -> bool:
        """Write a new decision down, before it is judged; False: it was judged before, and is only judged again."""
        if decision.seq > self._journal.last_seq:
            self._journal.record([encode_decision(decision)])
        self.seq = decision.seq
        return decision.seq > self.judged

    def add(self, judgement: Judgement, stages: RunStages) -> None:
        """Take in what the decision that was begun last brought; commits when many have come together."""
        if self._commit is None:
            self._commit, self._num_decisions = Commit(judged=self.seq, num_onsets=self.num_onsets), 0
        self.judged = self._commit.judged = self.seq
        self._num_decisions += 1
        self._commit.anomalies += [(self.seq, _found(one)) for one in judgement.anomalies]
        self._commit.num_onsets += sum(one.event == "onset" for one in judgement.anomalies)
        now = time.time()
        for incident in judgement.incidents:
            line = json_line(incident)
            self._commit.incidents.append((self.seq, FoundIncident(id=incident.id, revision=incident.revision, body=line)))
            self._commit.outbox += _outgoing(self._alerts.take(incident, now))
        if judgement.proposal is not None and self._takes(judgement.proposal):
            self._commit.outbox += _outgoing([judgement.proposal])
        if self._num_decisions >= STEPS_PER_COMMIT:
            self.flush(stages)
            self.keep_due(stages)

    def flush(self, stages: RunStages) -> None:
        """Commit what was added: it is told from now on."""
        if self._commit is not None:
            self._write(self._commit, stages, with_snapshot=False)

    def keep_due(self, stages: RunStages) -> None:
        """Have a snapshot where one is due, behind what is told: of many ranks it takes long."""
        if self._snapshots.is_due(time.monotonic()) and self._history.has(self._snapshots.seq):
            self.keep(stages)

    def keep(self, stages: RunStages) -> None:
        """Have a snapshot of the newest state, whatever is due; none of one that is older than what was judged before."""
        if self.seq > self._snapshots.seq and self.seq >= self.judged:
            self._write(Commit(judged=self.seq), stages, with_snapshot=True)

    def _write(self, commit: Commit, stages: RunStages, *, with_snapshot: bool) -> None:
        begun = time.monotonic()
        if with_snapshot:
            commit.snapshot = snapshot_of(stages, self._files.positions).body
        self._journal.commit(commit)
        self._commit = None
        self.num_onsets = max(self.num_onsets, commit.num_onsets)
        self.num_revisions += len(commit.incidents)
        if with_snapshot:
            self._snapshots.kept(commit.judged, begun)
        self._files.append(commit)
        self._has_alerts = self._has_alerts or any(one.topic != "escalation" for one in commit.outbox)
        if with_snapshot:
            self._acknowledgement.advance(stages.assembler.positions())
            self._history.flush()


def _found(anomaly: Anomaly) -> FoundAnomaly:
    return FoundAnomaly(
        id=anomaly.id,
        attempt=anomaly.attempt,
        step=anomaly.step,
        severity=anomaly.severity.value,
        body=anomaly_line(anomaly),
    )


def _outgoing(items: Iterable[Alert | Proposal]) -> list[Outgoing]:
    return [Outgoing(key=one.key, topic=one.topic, body=one.body) for one in items]
