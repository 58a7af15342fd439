"""One run as the daemon serves it: follow, decide, journal, judge, commit, append, acknowledge; and pick up after a crash.

What survives kill -9 at any instant, and why:

- A decision is durable before it is judged, and says which frames it took. After a crash it is judged again from the
  spool, with the rules it named, from the state of the last snapshot: the same verdict, byte for byte.
- The verdict, the judged offset, the incidents and the outbox are one transaction. A verdict is in it or it is not.
- Files are appended after the commit, so they are a prefix of the journal, and `AppendLog.recover` completes them.
- The spool is acknowledged, and may be deleted, only as far as no snapshot needs it any more.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.command import ANY_ATTEMPT
from sentinel.control.acts import ActInbox
from sentinel.control.edits import ConfigInUse
from sentinel.daemon.command_note import read_note
from sentinel.daemon.commanding import Commanding
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.gauges import WATCHED_FACT, RunGauges, standing_of
from sentinel.daemon.notes import Notes, note_lines
from sentinel.daemon.spool_watch import SpoolWatch
from sentinel.daemon.watching import RunWatch
from sentinel.decision import Tick, decode_decision, encode_decision
from sentinel.errors import SentinelError, StoreError
from sentinel.exports.series import RecentSteps
from sentinel.incident import Incident
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.incarnation import Incarnation, SpoolPosition, SpoolRecord
from sentinel.ingest.steps import StepAssembler, snapshot_positions
from sentinel.judge.judge import Judge, Verdict
from sentinel.judge.packs import RulePacks, decode_pack, encode_pack
from sentinel.messages import Ack
from sentinel.report.alert import Alert, RouteConfig, alerts_for, standing
from sentinel.report.files import AppendLog, LogPosition, anomaly_line, json_line
from sentinel.report.metrics import RunMetrics
from sentinel.rules.language.schema import Pack
from sentinel.step_view import StepView
from sentinel.store.journal import Commit, FoundAnomaly, FoundIncident, Journal, Outgoing
from sentinel.store.lock import RunLock
from sentinel.store.run_paths import RunPaths
from sentinel.store.trouble import journal_trouble
from sentinel.wire.spool import write_ack

log = logging.getLogger("sentinel.serving")

STEPS_PER_COMMIT = 64
"""Most steps judged between two commits: while catching up, the first alert must not wait for the last step."""
LIVE_S = 30.0
"""A life that was silent for so long is not waited for when a command goes out."""
DESK_S = 0.05
"""The command folder is looked at so often when nothing else calls for it."""
FORGET_S = 600.0
"""The recent steps of a run that was silent for so long are let go of; the spool has them (chosen)."""
SNAPSHOT_SHARE = 0.05
"""Most of the time that snapshots may take."""

_SNAPSHOT_VERSION = 1
_INCIDENT = msgspec.json.Decoder(Incident)


class _Snapshot(msgspec.Struct, kw_only=True):
    """What a restart goes on from: the state after one decision."""

    version: int
    pack_hash: str
    judge: bytes
    ingest: bytes
    anomalies: LogPosition
    incidents: LogPosition


class ServedRun:
    """Owned by the loop; what other threads read is replaced, never changed. SentinelError when it cannot be served."""

    def __init__(self, paths: RunPaths, config: DaemonConfig, packs: RulePacks) -> None:
        self.paths = paths
        self.name = paths.name
        self.has_alerts = False
        """Alerts were committed since the loop last looked."""
        self.last_heard = time.time()
        """Seconds since the epoch when the spool last brought something."""
        self.recent = RecentSteps()
        """The newest judged steps, for whoever asks for series."""
        self._config = config
        self._packs = packs
        self._routes = config.notify.routes()
        self._problems: dict[str, str] = {}
        self._blind: list[str] = []
        self._desk_due = self._acts_due = 0.0
        self._spool_watch = SpoolWatch(self.name, paths.run_dir)
        self._acts = ActInbox(paths.run_dir, log.warning)
        self._replicas = ""
        self._watched: dict[str, int] = {}
        self._lock = RunLock(paths.lock_directory, f"run {paths.run_dir}")
        try:
            self.journal = Journal(paths.journal)
            try:
                paths.remember()
                self._open()
            except BaseException:
                self.journal.close()
                raise
        except sqlite3.Error as error:
            self._lock.close()
            raise journal_trouble(paths.journal, error) from error
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            self._lock.close()
            raise StoreError(
                f"{paths.journal}: a record cannot be read: {error}; check this disk, then move the journal away: the spool "
                "that is left is judged anew"
            ) from error
        except BaseException:
            self._lock.close()
            raise

    def turn(self, now: float) -> bool:
        """Do what there is to do and return whether there was anything. now: seconds since the epoch.

        SentinelError when the journal cannot be written: the run must be closed and opened anew.
        """
        try:
            # A step that a newer attempt begins with makes nobody of the older one late, hence -1.
            attempt, settled_step = self._assembler.attempt, self._assembler.newest_step
            has_moved = self._hear(self._follower.poll(), now)
            if self._assembler.attempt != attempt:
                settled_step = -1
            views = self._assembler.close(
                time.monotonic(), self._follower.behind, settled_step=settled_step,
                before_attempt=lambda number: self._watching.before_attempt(number, time.time()),
            )  # fmt: skip
            has_moved = self._judge(views) or has_moved
            self._watch()
            self._spool_watch.look(self._gauges.metrics)
            self._take_acts(now)
            self._mend_files()
            if now - self.last_heard > FORGET_S:
                self.recent.clear()
            mono = time.monotonic()
            if has_moved or mono >= self._desk_due:
                self._desk_due = mono + DESK_S
                self._command(now, mono)
        except sqlite3.Error as error:
            raise journal_trouble(self.paths.journal, error) from error
        return has_moved

    def finish(self, now: float, *, is_over: bool, deadline: float) -> None:
        """Judge what is left before the daemon ends, and leave a snapshot.

        is_over: the run itself is over, so open steps close with what there is. deadline: on the monotonic clock.
        """
        try:
            while is_over and time.monotonic() < deadline:
                records = self._follower.poll(final=True)
                has_moved = self._hear(records, now)
                if not self._judge(self._assembler.close(time.monotonic(), self._follower.behind)) and not has_moved:
                    self._judge(self._assembler.finish(time.monotonic()))
                    self._judge(self._watching.finish(time.time()))
                    break
            if self._seq > self._snapshot_seq:
                self._commit(Commit(judged=self._seq), with_snapshot=True)
            self._mend_files()
            self._anomaly_log.sync()
            self._incident_log.sync()
        except sqlite3.Error as error:
            raise journal_trouble(self.paths.journal, error) from error

    def close(self) -> None:
        """Let go of everything. What was committed stays."""
        self._watching.close()
        self._anomaly_log.close()
        self._incident_log.close()
        self.journal.close()
        self._lock.close()

    def note_reload(self, outcome: str, now: float) -> None:
        """Judge by the rules now in use from the next decision on, and write down that they were read again.

        SentinelError when the journal cannot be written, as of `turn`.
        """
        problem = {"problem": self._packs.problem} if self._packs.problem else {}
        details = {"outcome": outcome, "pack_hash": self._packs.pack_hash, **problem}
        try:
            self._offer_pack()
            self.journal.audit(now, "daemon", "reload", details)
        except sqlite3.Error as error:
            raise journal_trouble(self.paths.journal, error) from error

    def standing(self, routes: Sequence[tuple[str, RouteConfig]]) -> list[Alert]:
        """Return the open incidents that each sink has been told of: what a keep-alive repeats after a restart."""
        now = time.time()
        return [alert for sink, route in routes for alert in standing(self._told.values(), sink, route, now)]

    # What other threads ask.

    def problems(self) -> list[str]:
        """Return what is wrong with the run, in words."""
        logs = [one.problem for one in (self._anomaly_log, self._incident_log) if one.problem]
        desk = [one for one in (self.commanding.problem, self.commanding.config_problem) if one]
        room = [self._spool_watch.problem] if self._spool_watch.problem else []
        return [*self._problems.values(), *room, *logs, *desk]

    def metrics(self) -> RunMetrics:
        """Return the newest gauges."""
        return self._published

    def describe(self) -> dict[str, Any]:
        """Return what `/api/v1/runs` says of the run."""
        return {
            "run": self.name,
            "directory": str(self.paths.run_dir),
            **standing_of(self._published),
            "num_anomalies": self._num_onsets,
            "num_rows_lost": self._published.num_rows_dropped,
            "num_steps_lost": self._published.num_steps_dropped,
            "is_complete": not self._published.num_rows_dropped and not self._published.num_steps_dropped,
            "replicas": self._gauges.replica_words,
            **self.commanding.describe(),
            "problems": self.problems(),
            "notes": note_lines(self._notes),
        }

    def recent_scalars(self, name: str | None) -> list[tuple[str, list[tuple[int, int, float]]]]:
        """Return (scalar, [(attempt, step, value)]), oldest first."""
        return self._gauges.recent(name)

    # Opening: the state of the last snapshot, the decisions behind it, the files as the journal has them.

    def _open(self) -> None:
        self.commanding = Commanding(self.paths, self._config.control, self.journal)
        self._gauges = RunGauges(self.name, [rule.name for rule in self._packs.pack.rules])
        self._notes = Notes.recalled(self.journal)
        self._told = {
            incident.id: incident
            for incident in map(_INCIDENT.decode, self.journal.newest_incidents(10_000))
            if incident.state == "open"
        }
        self._anomaly_log, self._incident_log = AppendLog(self.paths.anomalies), AppendLog(self.paths.incidents)
        self._num_onsets = self.journal.num_onsets()
        self._heard_at: dict[bytes, float] = {}
        self._acknowledgeable: dict[str, SpoolPosition] = {}
        self._judged = self._seq = self.journal.judged
        self._snapshot_seq = 0
        self._snapshot_due = 0.0
        snapshot = self._restore()
        self._recover(self._anomaly_log, "anomalies", snapshot.anomalies if snapshot else None)
        self._recover(self._incident_log, "incidents", snapshot.incidents if snapshot else None)
        self._offer_pack()
        for _, kind, body in self.journal.decisions(after=self._judged - 1, until=self._judged):
            newest = decode_decision(kind, body)
            self._gauges.metrics.attempt = newest.attempt
            self._gauges.metrics.judged_step = newest.step if newest.step >= 0 else None
        decisions = [decode_decision(kind, body) for _, kind, body in self.journal.decisions(after=self._snapshot_seq)]
        self._assembler.replay_decisions(decisions)
        if decisions:
            log.info(
                "run %s: %d decisions to judge again, from %d on, %d of them not committed",
                self.name, len(decisions), decisions[0].seq, decisions[-1].seq - self._judged,
            )  # fmt: skip
        self._note_losses()
        self._publish(time.time())

    def _restore(self) -> _Snapshot | None:
        for seq, body in self.journal.snapshots():
            try:
                snapshot = msgspec.msgpack.decode(body, type=_Snapshot)
                if snapshot.version != _SNAPSHOT_VERSION:
                    raise StoreError(f"version {snapshot.version}, expected {_SNAPSHOT_VERSION}")
                self._begin(snapshot.pack_hash)
                self._court.restore(snapshot.judge)
                self._follower.restore(snapshot_positions(snapshot.ingest))
                self._assembler.restore(snapshot.ingest, self._follower.lives)
                self._watching.tracker.restore(self._follower.lives.values())
            except (SentinelError, msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
                # An older one, or the whole spool, gives the same state; it only takes longer.
                log.warning("run %s: the snapshot after decision %d cannot be used: %s", self.name, seq, error)
                self.journal.drop_snapshot(seq)
                continue
            self._snapshot_seq = seq
            return snapshot
        self._begin(self._packs.pack_hash)
        return None

    def _begin(self, pack_hash: str) -> None:
        self._pack_hash = pack_hash
        self._court = Judge(self._pack(pack_hash), max_anomalies=self._config.judging.max_anomalies_per_step)
        self._follower = RunFollower(self.paths.run_dir, on_problem=self._note_problem)
        self._assembler = StepAssembler(
            self.name,
            late_after_steps=self._config.judging.late_after_steps,
            late_after_s=self._config.judging.late_after_s,
        )
        self._watching = RunWatch(self._follower, self._assembler, lambda: read_note(self.paths))

    def _offer_pack(self) -> None:
        self.journal.keep_pack(self._packs.pack_hash, encode_pack(self._packs.pack))
        self._assembler.pack_hash = self._packs.pack_hash
        self._gauges.metrics.rules = tuple(rule.name for rule in self._packs.pack.rules)

    def _pack(self, pack_hash: str) -> Pack:
        if pack_hash == self._packs.pack_hash:
            return self._packs.pack
        body = self.journal.pack(pack_hash)
        if body is None:
            raise StoreError(f"{self.paths.journal}: the rules {pack_hash} that it names are not in it")
        return decode_pack(body)

    def _recover(self, lines: AppendLog, table: str, since: LogPosition | None) -> None:
        def tail(after: int) -> Iterable[bytes]:
            return (body for _, body in self.journal.bodies(table, after))

        try:
            found = lines.recover(tail(since.num_lines if since else 0), since)
        except StoreError:
            found = lines.recover(tail(0))
        if found.num_written or found.set_aside:
            aside = f"; bytes that are not ours are now in {found.set_aside}" if found.set_aside else ""
            log.info("run %s: %d lines of %s were completed%s", self.name, found.num_written, table, aside)

    # The flow.

    def _hear(self, records: Sequence[SpoolRecord], now: float) -> bool:
        if not records:
            return False
        self.last_heard = now
        mono = time.monotonic()
        for record in records:
            self._heard_at[record.life.id] = mono
            if isinstance(record.message, Ack):
                self.commanding.acknowledge(record.life.rank, record.message, now)
        self._assembler.take(records, mono)
        self._watching.tracker.hear(records)
        return True

    def _watch(self) -> None:
        """Look who lives, moves or is gone; only what is new is decided, journalled and judged."""
        for tick in self._watching.look(time.monotonic(), time.time(), self._court.has_news):
            self._judge([tick])
        self._watching.rest(time.monotonic())

    def _take_acts(self, now: float) -> None:
        """Judge what people did about incidents, and let go of it once that is committed."""
        if time.monotonic() < self._acts_due or self._assembler.is_replaying:
            return
        self._acts_due = time.monotonic() + DESK_S
        for path, act in self._acts.waiting():
            why = self._court.why_not(act)
            if why:
                log.warning("run %s: %s by %s is not done: %s", self.name, act.act, act.who, why)
            else:
                self._judge([self._assembler.tick(self._watching.facts(), self._watching.tracker.now, (act,))])
            self.journal.audit(now, act.who, act.act, {"incident": act.incident, "why": act.why, "refused": why})
            self._acts.take(path)

    def _judge(self, views: Iterable[StepView | Tick]) -> bool:
        """Judge the steps and moments, commit them in batches, and return whether there were any."""
        commit: Commit | None = None
        view: StepView | None = None
        judged: StepView | Tick | None = None
        begun, first = time.monotonic(), 0
        for judged in views:
            decision = judged if isinstance(judged, Tick) else judged.decision
            assert decision is not None
            if decision.seq > self.journal.last_seq:
                self.journal.record([encode_decision(decision)])
            if decision.pack_hash != self._pack_hash:
                self._court.reload(self._pack(decision.pack_hash))
                self._pack_hash = decision.pack_hash
            is_new = decision.seq > self._judged
            if isinstance(judged, Tick):
                verdict = self._court.judge_tick(judged)
                self._gauges.take_anomalies(verdict.anomalies if is_new else ())
            else:
                view = judged
                verdict = self._court.judge(view.decision, view)
                self._gauges.take_step(view, verdict.anomalies, is_new=is_new)
                self.recent.add(view)
                self._notes.take(view)
            if is_new:
                if commit is None:
                    commit, first = Commit(judged=decision.seq), decision.seq
                self._add(commit, decision.seq, verdict)
                self._judged = decision.seq
            self._seq = decision.seq
            if commit is not None and decision.seq - first >= STEPS_PER_COMMIT - 1:
                self._commit(commit)
                commit = None
        if judged is None:
            return False
        if commit is not None:
            self._commit(commit)
        if view is not None:
            self._note_replicas()
            self._note_blindness()
            self._note_losses()
            self._notes.write(self.journal)
            self._gauges.take_norms(view)
        self._gauges.take_incidents(self._court.open_incidents)
        self._gauges.metrics.judging_s += time.monotonic() - begun
        self._gauges.metrics.last_judged_time = time.time()
        return True

    def _add(self, commit: Commit, seq: int, verdict: Verdict) -> None:
        commit.judged = seq
        commit.anomalies += [(seq, _found(one)) for one in verdict.anomalies]
        self._num_onsets += sum(one.event == "onset" for one in verdict.anomalies)
        now = time.time()
        for incident in verdict.incidents:
            line = json_line(incident)
            commit.incidents.append((seq, FoundIncident(id=incident.id, revision=incident.revision, body=line)))
            alerts = alerts_for(self._told.get(incident.id), incident, self._routes, now)
            commit.outbox += [Outgoing(key=one.key, topic=one.topic, body=one.body) for one in alerts]
            if incident.state == "open":
                self._told[incident.id] = incident
            else:
                self._told.pop(incident.id, None)
        for asked in (verdict.proposal, verdict.dump):
            if asked is not None:
                commit.outbox.append(Outgoing(key=asked.key, topic=asked.topic, body=asked.body))

    def _commit(self, commit: Commit, *, with_snapshot: bool = False) -> None:
        begun = time.monotonic()
        with_snapshot = with_snapshot or begun >= self._snapshot_due
        if with_snapshot:
            commit.snapshot = msgspec.msgpack.encode(
                _Snapshot(
                    version=_SNAPSHOT_VERSION,
                    pack_hash=self._pack_hash,
                    judge=self._court.snapshot(),
                    ingest=self._assembler.snapshot(),
                    anomalies=self._anomaly_log.position,
                    incidents=self._incident_log.position,
                )
            )
        self.journal.commit(commit)
        if with_snapshot:
            self._snapshot_seq = commit.judged
            took = time.monotonic() - begun
            self._snapshot_due = begun + max(self._config.judging.snapshot_interval_s, took / SNAPSHOT_SHARE)
        self._anomaly_log.append(one.body for _, one in commit.anomalies)
        self._incident_log.append(one.body for _, one in commit.incidents)
        self.has_alerts = self.has_alerts or any(one.topic != "escalation" for one in commit.outbox)
        if with_snapshot:
            self._acknowledge()

    def _acknowledge(self) -> None:
        # Two snapshots are kept, for the newer may prove unreadable: what the older one needs must stay.
        positions, self._acknowledgeable = self._acknowledgeable, self._assembler.positions()
        for folder, position in positions.items():
            try:
                write_ack(self.paths.run_dir / "spool" / folder, position.file_index, position.offset)
            except OSError as error:
                self._problems["ack"] = f"spool {folder} cannot be acknowledged: {error.strerror or error}"
                return
        self._problems.pop("ack", None)

    def _mend_files(self) -> None:
        for lines, table in ((self._anomaly_log, "anomalies"), (self._incident_log, "incidents")):
            if lines.needs_recovery:
                self._recover(lines, table, lines.position)
            elif lines.num_pending:
                lines.retry()

    def _command(self, now: float, mono: float) -> None:
        newest: dict[int, tuple[float, int]] = {}
        speaking: dict[int, Incarnation] = {}
        for life in self._follower.lives.values():
            heard = self._heard_at.get(life.id, 0.0)
            if (
                life.bye is None
                and heard
                and mono - heard < LIVE_S
                and (heard, life.last_step) >= newest.get(life.rank, (0.0, -1))
            ):
                newest[life.rank], speaking[life.rank] = (heard, life.last_step), life
        ended = {rank: step for rank, (_, step) in newest.items()}
        known = [life.heartbeat.step for life in self._follower.lives.values() if life.heartbeat and life.rank in ended]
        newest_step = max([self._assembler.newest_step, *ended.values(), *known])
        attempt = max((life.attempt for life in speaking.values() if life.attempt is not None), default=ANY_ATTEMPT)
        step_time_s = self._gauges.metrics.step_time_s

        def in_use() -> dict[int, ConfigInUse]:
            mine = ((rank, life) for rank, life in speaking.items() if life.attempt in (None, attempt))
            return {rank: ConfigInUse.told_by(life.descriptor, life.last_step) for rank, life in mine}

        self.commanding.turn(ended, newest_step, step_time_s, now, attempt=attempt, in_use=in_use)
        self._publish(now, num_live=len(ended))

    def _publish(self, now: float, num_live: int = 0) -> None:
        metrics = self._gauges.metrics
        self._gauges.hear(self._follower, self._assembler)
        metrics.ranks = {**metrics.ranks, "live": num_live, "stale": len(self._court.stale_ranks)}
        heard_at = self._watching.tracker.heard_at()
        metrics.quietest_heard_time = None if heard_at is None else now - (self._watching.tracker.now - heard_at)
        metrics.commands = self.commanding.counts()
        metrics.config_edits = self.commanding.edits()
        metrics.is_monitoring = self.commanding.is_monitoring()
        metrics.monitoring_acked_step = self.commanding.monitoring_acked_step
        metrics.num_file_failures = self._anomaly_log.num_failures + self._incident_log.num_failures
        metrics.num_file_lines_pending = self._anomaly_log.num_pending + self._incident_log.num_pending
        self._published = msgspec.structs.replace(metrics)

    def _note_replicas(self) -> None:
        """Write down, when it changes, how much is watched, and how many weights have copies to compare: status says it."""
        if self._gauges.watched != self._watched:
            self._watched = self._gauges.watched
            self.journal.remember(WATCHED_FACT, json_line(self._watched).decode())
        words = self._gauges.replica_words
        if words != self._replicas:
            self._replicas = words
            if words != self.journal.recall("replicas"):
                self.journal.remember("replicas", words)
                log.info("run %s: replicas: %s", self.name, words)

    def _note_losses(self) -> None:
        """Write down what was lost before it could be judged: health, `sentinel status` and the report say it."""
        losses = self._assembler.losses
        if losses.is_complete:
            return
        if "losses" not in self._problems:
            log.warning("run %s: %s", self.name, losses.words)
        self._problems["losses"] = losses.words
        body = msgspec.json.encode(losses).decode()
        if body != self.journal.recall("losses"):
            self.journal.remember("losses", body)

    def _note_blindness(self) -> None:
        """Say, in the log and in health, which rules are blind: while they are."""
        blind = self._court.blindness
        for problem in self._blind:
            if problem not in blind:
                self._problems.pop(problem, None)
        for problem in blind:
            if problem not in self._blind:
                self._note_problem(problem)
        self._blind = blind

    def _note_problem(self, problem: str) -> None:
        log.warning("run %s: %s", self.name, problem)
        self._problems[problem] = problem


def _found(anomaly: Anomaly) -> FoundAnomaly:
    return FoundAnomaly(
        id=anomaly.id,
        attempt=anomaly.attempt,
        step=anomaly.step,
        severity=anomaly.severity.value,
        body=anomaly_line(anomaly),
    )
