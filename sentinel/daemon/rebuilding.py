"""Rebuilds the journal of a run from its spool and its files, where it is damaged, missing, or of another version.

What the files say was found stays as it is; what the spool holds is judged anew, and adds what the files do not have. The
new journal begins behind that: with a snapshot of where judging has come to. Nothing is deleted: the former journal gets
another name, and the next daemon goes on in the same files.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.incident_alerts import MAX_INCIDENTS, UNTOLD_FACT, Untold
from sentinel.daemon.kept_packs import KeptPacks
from sentinel.daemon.snapshots import snapshot_of
from sentinel.daemon.stages import RunStages
from sentinel.daemon.written_files import WrittenFiles
from sentinel.decision import Decision, Tick, decode_decision, encode_decision
from sentinel.errors import MALFORMED, StoreError
from sentinel.incident import Incident
from sentinel.judge.packs import RulePacks
from sentinel.judge.snapshot import Snapshot
from sentinel.report.files import anomaly_line, json_line
from sentinel.store.found import TAKEN_OVER, FoundAnomaly, FoundIncident
from sentinel.store.journal import Commit, Journal
from sentinel.store.lock import RunLock
from sentinel.store.run_paths import RunPaths
from sentinel.store.salvage import Salvage, salvaged, set_aside, what_is_wrong

LINES_PER_COMMIT = 10_000
_UNREADABLE: tuple[type[Exception], ...] = (StoreError, ValueError, *MALFORMED)


class Repaired(msgspec.Struct, kw_only=True):
    """What was wrong, what was done, and what is lost."""

    reason: str = ""
    """What is wrong with the journal; empty: nothing, and nothing was done."""
    set_aside: list[str] = []
    """Where the former journal is now."""
    num_steps: int = 0
    """Steps that the spool holds, judged anew."""
    first_step: int = -1
    last_step: int = -1
    num_anomalies: int = 0
    """Anomalies that the files have."""
    num_new_anomalies: int = 0
    """Those that they did not have: the next daemon appends them."""
    num_left_out: int = 0
    """Anomalies of judging anew, of steps that had been judged, that were not found then."""
    num_revisions: int = 0
    num_new_revisions: int = 0
    num_open: int = 0
    """Incidents that are open."""
    num_waiting: int = 0
    """Messages that waited to be sent, taken over."""
    num_audit: int = 0
    lost: list[str] = []
    """What is gone, in words."""

    @property
    def words(self) -> list[str]:
        """What to tell a person, a line each."""
        if not self.reason:
            return ["the journal is whole: nothing to repair"]
        steps = f", steps {self.first_step} to {self.last_step}" if self.num_steps else ""
        left_out = [f"left out: {self.num_left_out} anomalies of steps that had been judged without them"]
        return [
            f"found: {self.reason}",
            *(f"moved aside: {one}" for one in self.set_aside),
            f"judged anew: {self.num_steps} steps that the spool holds{steps}, by the rules in use now",
            f"kept as the files have it: {self.num_anomalies} anomalies, {self.num_revisions} revisions of incidents",
            f"added: {self.num_new_anomalies} anomalies, {self.num_new_revisions} revisions",
            f"open: {self.num_open} incidents",
            *(left_out if self.num_left_out else ()),
            f"taken over: {self.num_waiting} messages that wait, {self.num_audit} lines of the audit",
            *(f"lost: {one}" for one in self.lost),
        ]


def what_to_repair(paths: RunPaths) -> str:
    """Return what is wrong with the journal of a run, in words; empty: it is whole, and not behind its files."""
    wrong = what_is_wrong(paths.journal)
    if wrong:
        return wrong
    with closing(Journal(paths.journal, read_only=True)) as journal:
        try:
            for _, kind, body in journal.decisions(journal.cut.seq):
                decode_decision(kind, body)
            for body in journal.found.newest_incidents(MAX_INCIDENTS):
                msgspec.json.decode(body, type=Incident)
            readable = False
            for _, body in journal.snapshots():
                readable = readable or _is_readable(body)
            if not readable and journal.cut.seq:
                return "none of the snapshots that the journal begins with can be read"
        except _UNREADABLE as error:
            return f"a record cannot be read ({error})"
        return _behind_files(paths, journal)


def _is_readable(snapshot: bytes) -> bool:
    try:
        Snapshot.read(snapshot)
    except _UNREADABLE:
        return False
    return True


def _behind_files(paths: RunPaths, journal: Journal) -> str:
    files = WrittenFiles(paths)
    newest = None
    for one in files.anomalies():
        newest = one
    if newest is not None and not journal.found.has_anomaly(newest.id):
        return "the journal lacks anomalies that the files have: its newest writes are gone"
    for incident in files.incidents():
        if not journal.found.has_revision(incident.id, incident.revision):
            return "the journal lacks revisions of incidents that the files have: its newest writes are gone"
    return ""


def repair(paths: RunPaths, config: DaemonConfig, packs: RulePacks, *, is_dry: bool) -> Repaired:
    """Rebuild the journal of a run, if anything is wrong with it; is_dry: change nothing, only say what would be done.

    LockHeld while a daemon serves the run.
    """
    with closing(RunLock(paths.lock_directory, f"run {paths.run_dir}")):
        reason = what_to_repair(paths)
        if not reason:
            return Repaired()
        found = salvaged(paths.journal)
        paths.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".repair-", dir=paths.state) as scratch:
            draft = Path(scratch) / "journal.sqlite"
            result = _Rebuilding(paths, config, packs, draft, found).run()
            result.reason = reason
            if not is_dry:
                moved = set_aside(paths.journal, f"damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
                result.set_aside = [str(one) for one in moved]
                draft.replace(paths.journal)
        return result


@dataclass
class _Rebuilding:
    """One journal that is made anew."""

    paths: RunPaths
    config: DaemonConfig
    packs: RulePacks
    draft: Path
    found: Salvage
    result: Repaired = field(default_factory=Repaired)
    _revisions: dict[str, list[tuple[int, FoundIncident, Incident]]] = field(default_factory=dict)
    """Id of an incident -> (seq, line, revision) of judging anew."""
    _left_out: dict[str, tuple[int, FoundAnomaly]] = field(default_factory=dict)
    """Id of an anomaly -> (seq, line) of those that the files do not have, of steps that had been judged."""

    def run(self) -> Repaired:
        """Write the journal and return what was done."""
        files = WrittenFiles(self.paths)
        with closing(Journal(self.draft)) as journal:
            journal.take_over(self.found)
            self._take_files(journal, files)
            commit = Commit(judged=0)
            stages = self._judged_anew(journal, files, commit)
            untold = self._reconcile(stages, files, commit)
            journal.values.put(UNTOLD_FACT, msgspec.json.encode(untold).decode())
            # The lines that the next daemon appends lie behind what the files have.
            commit.snapshot = snapshot_of(stages, (files.anomalies_position, files.incidents_position)).body
            commit.num_onsets = files.num_onsets + sum(b'"event":"onset"' in one.body for _, one in commit.anomalies)
            journal.commit(commit)
            journal.cut.put(commit.judged, commit.judged, time.time())
            stages.watch.close()
            self._count(stages, commit)
        return self.result

    def _take_files(self, journal: Journal, files: WrittenFiles) -> None:
        anomalies, incidents = files.anomalies(), files.incidents()
        while found := list(islice(anomalies, LINES_PER_COMMIT)):
            journal.commit(Commit(judged=0, anomalies=[(TAKEN_OVER, one) for one in found], num_onsets=files.num_onsets))
        while revisions := list(islice(incidents, LINES_PER_COMMIT)):
            journal.commit(Commit(judged=0, incidents=[(TAKEN_OVER, one) for one in revisions]))
        self.result.num_anomalies = files.anomalies_position.num_lines
        self.result.num_revisions = files.incidents_position.num_lines

    def _judged_anew(self, journal: Journal, files: WrittenFiles, commit: Commit) -> RunStages:
        """Judge what the spool holds, as a daemon would that starts now; open steps stay open."""
        kept = KeptPacks(journal, self.packs)
        kept.keep()
        stages = RunStages(self.paths, self.config.judging, kept, lambda _: None, pack_hash=kept.newest_hash)
        stages.assembler.pack_hash = kept.newest_hash
        while True:
            # Ranks may be writing: a torn tail is theirs to end, and what one wrote behind our back makes nobody late.
            attempt, settled_step = stages.assembler.attempt, stages.assembler.newest_step
            records = stages.follower.poll()
            stages.assembler.take(records, time.monotonic())
            stages.watch.tracker.receive(records)
            decided = stages.assembler.close(
                time.monotonic(), stages.follower.behind,
                settled_step=settled_step if stages.assembler.attempt == attempt else -1,
                before_attempt=lambda number: stages.watch.before_attempt(number, time.time()),
            )  # fmt: skip
            has_any = False
            for one in decided:
                has_any = True
                decision = one if isinstance(one, Tick) else one.decision
                assert decision is not None
                journal.record([encode_decision(decision)])
                judgement = stages.judged(one, decision.pack_hash)
                commit.judged = decision.seq
                self._take(decision, judgement.anomalies, judgement.incidents, files, commit)
            if not records and not has_any:
                return stages

    def _take(
        self,
        decision: Decision | Tick,
        anomalies: tuple[Anomaly, ...],
        incidents: tuple[Incident, ...],
        files: WrittenFiles,
        commit: Commit,
    ) -> None:
        if isinstance(decision, Decision):
            self.result.num_steps += 1
            self.result.first_step = decision.step if self.result.num_steps == 1 else self.result.first_step
            self.result.last_step = decision.step
        for one in anomalies:
            if one.id in files.ids:
                continue
            body = anomaly_line(one)
            found = FoundAnomaly(id=one.id, attempt=one.attempt, step=one.step, severity=one.severity.value, body=body)
            # Of a step that had been judged: the files would have it, had it been found.
            if (one.attempt, one.step) < files.newest:
                self._left_out[one.id] = decision.seq, found
            else:
                commit.anomalies.append((decision.seq, found))
        for incident in incidents:
            line = FoundIncident(id=incident.id, revision=incident.revision, body=json_line(incident))
            self._revisions.setdefault(incident.id, []).append((decision.seq, line, incident))

    def _reconcile(self, stages: RunStages, files: WrittenFiles, commit: Commit) -> list[Untold]:
        """Decide which revisions go on from what the files have; return those that people are to be notified of."""
        written = files.newest_revisions()
        untold: list[Untold] = []
        # A daemon may have been killed between the commit that told of a revision and its line in the file.
        is_maybe_told = "outbox" in self.found.unread
        new: list[tuple[int, FoundIncident]] = []
        differing = dict(written)
        for one, revisions in self._revisions.items():
            former = written.get(one)
            lines = {line.revision: line.body for _, line, _ in revisions}
            if former is not None and lines.get(former.revision) != files.newest_incidents[one]:
                continue
            differing.pop(one, None)
            newest = revisions[-1][2]
            if former is None and newest.state != "open" and (newest.attempt, newest.opened_step) < files.newest:
                continue
            members = [member for _, _, incident in revisions for member in incident.members]
            commit.anomalies += [self._left_out.pop(member) for member in members if member in self._left_out]
            for seq, line, incident in revisions:
                if former is None or incident.revision > former.revision:
                    new.append((seq, line))
                    untold.append(Untold(before=former, now=incident, is_maybe_told=is_maybe_told))
                    former = incident
        wanted = {
            cause for one in differing.values() if one.state == "open" for cause in (one.root or "", *one.first_causes)
        }
        roots = files.roots(wanted)
        for incident in stages.judge.reconcile(differing, roots, self.result.last_step + 1):
            line = FoundIncident(id=incident.id, revision=incident.revision, body=json_line(incident))
            new.append((commit.judged, line))
            untold.append(Untold(before=written.get(incident.id), now=incident, is_maybe_told=is_maybe_told))
        commit.incidents = sorted(new, key=lambda one: one[0])
        commit.anomalies.sort(key=lambda one: one[0])
        return untold

    def _count(self, stages: RunStages, commit: Commit) -> None:
        result, unread = self.result, self.found.unread
        result.num_new_anomalies, result.num_new_revisions = len(commit.anomalies), len(commit.incidents)
        result.num_left_out = len(self._left_out)
        result.num_open = len(stages.judge.open_incidents)
        result.num_waiting, result.num_audit = self.found.num_waiting, len(self.found.audit)
        if "outbox" in unread:
            result.lost.append(
                "which messages waited to be sent: open incidents are sent again to sinks that keep them, all others count "
                "as sent"
            )
        if "audit" in unread:
            result.lost.append("lines of the audit: who commanded what, and when")
        if "packs" in unread or "meta" in unread:
            result.lost.append("the rules of former days, or what the ranks said of themselves")
        result.lost.append("former decisions: `sentinel replay` begins behind the repair")
        if result.first_step > 0:
            result.lost.append(f"steps before {result.first_step} are not in the spool: baselines begin there anew")
