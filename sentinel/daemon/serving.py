"""One run as the daemon serves it: follow, decide, journal, judge, commit, append, acknowledge; and pick up after a crash.

What survives kill -9 at any instant, and why:

- A decision is durable before it is judged, and says which frames it took. After a crash it is judged again from the
  spool, with the rules it named, from the state of the last snapshot: the same judgement, byte for byte.
- The judgement, the judged offset, the incidents and the outbox are one transaction. A judgement is in it or it is not.
- Files are appended after the commit, so they are a prefix of the journal, and `AppendLog.recover` completes them.
- The spool is acknowledged, and may be deleted, only as far as no snapshot needs it any more.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from sentinel.daemon.absent_ranks import MissingRanks
from sentinel.daemon.alert_contexts import AlertContexts
from sentinel.daemon.command_turns import CommandTurns
from sentinel.daemon.commanding import Commanding
from sentinel.daemon.commits import StepCommits
from sentinel.daemon.config import DaemonConfig, hash_of
from sentinel.daemon.gauges import RunGauges
from sentinel.daemon.incident_alerts import IncidentAlerts
from sentinel.daemon.judged_acts import JudgedActs
from sentinel.daemon.kept_packs import KeptPacks
from sentinel.daemon.meters import DaemonMeters
from sentinel.daemon.run_files import RunFiles
from sentinel.daemon.run_history import RunHistory
from sentinel.daemon.run_marks import RunMark, RunMarks
from sentinel.daemon.run_mirrors import RunMirrors
from sentinel.daemon.run_notices import RunNotices
from sentinel.daemon.run_retention import RunRetention
from sentinel.daemon.run_status import RunStatus
from sentinel.daemon.run_turns import PlainTurns, RunTurns
from sentinel.daemon.snapshots import Acknowledgement, Snapshots
from sentinel.daemon.spool_pruning import SpoolPruning
from sentinel.daemon.spool_watch import SpoolWatch
from sentinel.daemon.stages import RunStages
from sentinel.decision import Tick, decode_decision
from sentinel.errors import StoreError
from sentinel.exports.series import RecentSteps
from sentinel.incident import Incident
from sentinel.ingest.arrivals import Arrivals
from sentinel.ingest.away_rows import RowSource
from sentinel.ingest.incarnation import SpoolRecord
from sentinel.judge.packs import RulePacks
from sentinel.judge.snapshot import Snapshot
from sentinel.messages import Ack, Heartbeat
from sentinel.report.alert_context import AlertContext
from sentinel.report.silences import Silence
from sentinel.step_view import StepView
from sentinel.store.journal import Journal
from sentinel.store.lock import RunLock
from sentinel.store.run_paths import RunPaths
from sentinel.store.trouble import journal_trouble, repair_words

log = logging.getLogger("sentinel.serving")

ESCALATION_S = 0.5
"""It is looked so often for pages that nobody has acknowledged."""
FORGET_S = 600.0
"""Seconds of silence after which a run's recent steps leave memory. Too small: a pause has the page read the spool again;
too large: ended runs hold up to 16 MiB each."""


NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


class ServedRun:
    """Owned by the loop; what other threads read is replaced, never changed. SentinelError when it cannot be served."""

    def __init__(
        self,
        paths: RunPaths,
        config: DaemonConfig,
        packs: RulePacks,
        meters: DaemonMeters | None = None,
        environ: Mapping[str, str] = NO_ENVIRONMENT,
        arrivals: Callable[[], Arrivals] = Arrivals,
        rows_from: RowSource | None = None,
        epoch: int = 0,
        advanced: Callable[[], None] = lambda: None,
        turns: RunTurns = PlainTurns(),  # noqa: B008  (holds nothing)
    ) -> None:
        """meters: of the daemon that serves it; None: its work is not measured. environ: for the secrets of mirrors.

        arrivals: as of `RunFollower`. rows_from: as of `StepMaker`. epoch: of the lease under which it is served, as of
        `Journal`; 0: under none. advanced: called behind each step and moment that was judged. turns: in which it is taken.
        """
        self._arrivals, self._rows_from, self._advanced, self._turns = arrivals, rows_from, advanced, turns
        self._meters = meters or DaemonMeters()
        self.paths = paths
        self.name = paths.name
        self.last_received = time.time()
        """Seconds since the epoch when the spool last brought something."""
        self.has_caught_up = False
        """Whether all that lay in the spool when the run was opened has been judged, as far as it can be."""
        self.recent = RecentSteps()
        """The newest judged steps, for whoever asks for series."""
        self._escalation_due = 0.0
        self._spool_watch = SpoolWatch(self.name, paths.run_dir)
        with contextlib.ExitStack() as opened:
            self._lock = opened.enter_context(
                contextlib.closing(RunLock(paths.lock_directory, f"run {paths.run_dir}", epoch=epoch))
            )
            if self._lock.former:
                log.warning("run %s: taken over from process %s, which has not ended", self.name, self._lock.former)
            with _records_in_words(paths.journal), _trouble_in_words(paths.journal):
                self.journal = opened.enter_context(contextlib.closing(Journal(paths.journal, epoch=epoch)))
                paths.remember()
                self._acts = JudgedActs(paths.run_dir, self.journal)
                self.commanding = Commanding(paths, config.control, self.journal)
                self._packs = KeptPacks(self.journal, packs)
                self._gauges = RunGauges(self.name, [rule.name for rule in self._packs.newest.rules])
                self._command_turns = CommandTurns(self.commanding, self._gauges)
                self._notices = RunNotices(self.name, self.journal)
                self._marks = RunMarks(self.journal)
                self._contexts = AlertContexts(
                    self.journal, lambda: self._stages.follower.incarnations.values(), config.labels, paths.run_dir
                )
                self._alerts = IncidentAlerts(
                    self.journal, config.notify.routes(), self._contexts.of, config.notify.escalate
                )
                self._files = opened.enter_context(contextlib.closing(RunFiles(paths, self.journal)))
                self._history = RunHistory(
                    paths.run_dir, paths.journal, config.history, is_ours=lambda: not self.journal.is_fenced_off
                )
                self.mirrors = RunMirrors(paths, self.journal, config.mirrors, config.labels, environ)
                acknowledgement = Acknowledgement(paths.run_dir / "spool")
                self._snapshots = Snapshots(self.name, self.journal, config.judging.snapshot_interval_s)
                self._spool_pruning = SpoolPruning(self.name, paths.run_dir / "spool", config.retention)
                self._retention = RunRetention(self.name, self.journal, self._files, self._packs, config.retention)
                self._commits = StepCommits(
                    self.journal, self._files, self._alerts, self._snapshots, acknowledgement, self.commanding.takes,
                    self._history,
                )  # fmt: skip
                self.status = RunStatus(
                    paths, self._gauges, self._notices, self._commits, self.commanding, self._files, acknowledgement,
                    self._spool_watch, self.journal.writes, self._history, self.mirrors,
                )  # fmt: skip
                self._stages = self._restored(config)
                self._history.begin(self._snapshots.seq)
                opened.callback(self._history.close)
                self.mirrors.begin(self._snapshots.seq)
                opened.callback(self.mirrors.close)
                opened.callback(self._stages.watch.close)
                self._use_newest_pack()
                self._replay()
                self._commits.tell_repaired(time.time())
                self._commits.tell_newcomers(time.time())
                self._notices.keep_losses(self._stages.assembler.losses)
                self.status.publish(self._stages, time.time())
                self.status.take_judge(self._stages.judge)
            self._opened = opened.pop_all()

    def turn(self, now: float) -> bool:
        """Do what there is to do and return whether there was anything. now: seconds since the epoch.

        SentinelError when the journal cannot be written: the run must be closed and opened anew.
        """
        with _trouble_in_words(self.paths.journal):
            has_moved = self._follow(now)
            # A run that trains brings something at each look; who reads to the end of it is behind of nothing all the same.
            is_behind = self._stages.follower.behind or self._stages.assembler.is_replaying
            self.has_caught_up |= not has_moved or not is_behind
            self._watch()
            self._spool_watch.look(self._gauges.metrics)
            self._acts.turn(self._stages, lambda tick: self._judge([tick]), now)
            if now >= self._escalation_due or now < self._escalation_due - ESCALATION_S:
                self._escalation_due = now + ESCALATION_S
                self._commits.escalate(now)
            self._files.mend()
            self._retention.turn(self._snapshots.seq, self._stages.judge.open_incidents, now)
            known = self._stages.follower.incarnations.values()
            self._spool_pruning.turn((one.folder for one in known if one.has_left), now)
            self.mirrors.look(lambda: [one.has_left for one in known])
            if now - self.last_received > FORGET_S:
                self.recent.clear()
            # Whoever was heard when the turn began is not silent for what others took meanwhile.
            begun = time.monotonic()
            heard = self._command_turns.turn(self._stages, now, begun - self._turns.left_s, is_due=has_moved)
            if heard is not None:
                self.status.publish(self._stages, now, heard=heard)
                self._notices.keep_missing(MissingRanks.of(self._gauges.metrics.num_ranks_expected, heard, known))
                ended = time.monotonic()
                self._command_turns.rest(ended - begun, ended - self._turns.left_s)
        return has_moved

    def finish(self, now: float, *, is_over: bool, deadline: float) -> bool:
        """Judge what is left before the daemon ends, and leave a snapshot; return whether all of it was judged.

        is_over: the run itself is over, so open steps close with what there is, and how it ended is decided. deadline: on
        the monotonic clock; behind it no more than one look is taken, and what is left over waits for the next daemon.
        """
        stages, is_done = self._stages, not is_over
        with _trouble_in_words(self.paths.journal):
            while not is_done:
                has_moved = self._receive(stages.follower.poll(final=True), now)
                has_judged = self._judge(stages.assembler.close(time.monotonic(), stages.follower.behind))
                is_done = not has_judged and not has_moved
                if not is_done and time.monotonic() >= deadline:
                    break
            if is_over and is_done:
                self._judge(stages.assembler.finish(time.monotonic()))
                self._judge(stages.watch.finish(time.time()))
                self.mirrors.end()
            self._commits.keep(stages)
            self._files.mend()
            self._files.sync()
        return is_done

    def close(self) -> None:
        """Let go of everything. What was committed stays."""
        self._opened.close()

    def note_reload(self, outcome: str, now: float) -> None:
        """Judge by the rules now in use from the next decision on, and write down that they were read again.

        SentinelError when the journal cannot be written, as of `turn`.
        """
        problem = {"problem": self._packs.problem} if self._packs.problem else {}
        details = {"outcome": outcome, "pack_hash": self._packs.newest_hash, **problem}
        with _trouble_in_words(self.paths.journal):
            self._use_newest_pack()
            self.journal.audit.add(now, "daemon", "reload", details)

    def use(self, config: DaemonConfig) -> None:
        """Judge, alert and command by another configuration from now on; SentinelError as of `turn`."""
        self._stages.use(config.judging)
        self._snapshots.interval_s = config.judging.snapshot_interval_s
        self._alerts.routes, self._alerts.steps = config.notify.routes(), config.notify.escalate
        self._contexts.labels = config.labels
        self.commanding.use(config.control)
        self._retention.use(config.retention)
        self._spool_pruning.use(config.retention)
        self._history.use(config.history)
        self.mirrors.use(config.mirrors)
        with _trouble_in_words(self.paths.journal):
            self._commits.tell_newcomers(time.time())
            self.journal.audit.add(time.time(), "daemon", "reload", {"outcome": "ok", "config_hash": hash_of(config)})

    def note_silences(self, silences: Sequence[Silence], now: float) -> None:
        """Write down who silenced what, and who ended it, each once; SentinelError as of `turn`."""
        with _trouble_in_words(self.paths.journal):
            noted = set((self.journal.values.get("silences") or "").split())
            words = {f"{one.id}{'-' if one.ended_by else '+'}": one for one in silences}
            for word in words.keys() - noted:
                one = words[word]
                details = {"silence": one.id, "matchers": list(one.matchers), "why": one.why, "until": one.until}
                act = "end silence" if one.ended_by else "silence"
                self.journal.audit.add(now, one.ended_by or one.who, act, details)
            if words.keys() != noted:
                self.journal.values.put("silences", " ".join(words))

    def phases(self) -> set[str]:
        """Return what the ranks of the run are at: train, eval, checkpoint, init. For any thread."""
        known = list(self._stages.follower.incarnations.values())
        return {one.heartbeat.activity for one in known if one.bye is None and one.heartbeat is not None}

    def take_alerts(self) -> bool:
        """Return whether alerts were committed since this was last asked."""
        return self._commits.take_alerts()

    def context_of(self, incident: Incident) -> AlertContext:
        """Return what messages say of an incident beside its judgement. For any thread."""
        return self._contexts.of(incident)

    def recent_scalars(self, name: str | None) -> list[tuple[str, list[tuple[int, int, float]]]]:
        """Return (scalar, [(attempt, step, value)]), oldest first; of all scalars when `name` is None. For any thread."""
        return self._gauges.recent(name)

    def marks(self) -> list[RunMark]:
        """Return restarts, checkpoints, changes of the rules and commands, in the order of steps. For any thread."""
        return self._marks.told(self.commanding.statuses(), self._history.attempts())

    # Opening: the state of the last snapshot, the files as the journal has them, the decisions behind it.

    def _restored(self, config: DaemonConfig) -> RunStages:
        def stages(pack_hash: str) -> RunStages:
            return RunStages(
                self.paths, config.judging, self._packs, self._notices.add_problem, pack_hash=pack_hash,
                arrivals=self._arrivals, rows_from=self._rows_from,
            )  # fmt: skip

        def restored(snapshot: Snapshot) -> RunStages:
            made = stages(snapshot.pack_hash)
            made.restore(snapshot.judge, snapshot.ingest)
            return made

        is_whole = not any((self.paths.run_dir / "spool").glob("*/ack"))
        found = self._snapshots.restore(restored, self._history.decision, may_begin_anew=is_whole)
        if found is None and self.journal.cut.seq:
            raise StoreError(
                f"{self.paths.journal}: none of its snapshots can be used, and it begins with decision "
                f"{self.journal.cut.seq + 1}; {repair_words(self.paths.journal)}"
            )
        self._files.complete(found[1].positions if found else None)
        return found[0] if found else stages(self._packs.newest_hash)

    def _use_newest_pack(self) -> None:
        self._packs.keep()
        self._stages.assembler.pack_hash = self._packs.newest_hash
        self._gauges.metrics.rules = tuple(rule.name for rule in self._packs.newest.rules)

    def _replay(self) -> None:
        """Have the decisions behind the snapshot be made again, those that were judged too."""
        judged = self._commits.judged
        for _, kind, body in self.journal.decisions(after=judged - 1, until=judged):
            newest = decode_decision(kind, body)
            self._gauges.metrics.attempt = newest.attempt
            self._gauges.metrics.judged_step = newest.step if newest.step >= 0 else None
        later = self.journal.decisions(after=self._snapshots.seq)
        decisions = [decode_decision(kind, body) for _, kind, body in later]
        self._stages.assembler.replay_decisions(decisions)
        if decisions:
            log.info(
                "run %s: %d decisions to judge again, from %d on, %d of them not committed",
                self.name, len(decisions), decisions[0].seq, decisions[-1].seq - judged,
            )  # fmt: skip

    # The flow.

    def _follow(self, now: float) -> bool:
        """Take in what the spool brought, and judge the steps that close of it."""
        follower, assembler, watch = self._stages.follower, self._stages.assembler, self._stages.watch
        # A step that a newer attempt begins with makes nobody of the older one late, hence -1.
        attempt, settled_step = assembler.attempt, assembler.newest_step
        with self._meters.stages.measure("follow"):
            records = follower.poll()
        has_moved = self._receive(records, now)
        if assembler.attempt != attempt:
            settled_step = -1
        decided = assembler.close(
            time.monotonic(), follower.behind, settled_step=settled_step,
            before_attempt=lambda number: watch.before_attempt(number, time.time()),
        )  # fmt: skip
        return self._judge(decided) or has_moved

    def _receive(self, records: Sequence[SpoolRecord], now: float) -> bool:
        if not records:
            return False
        self.last_received = now
        mono = time.monotonic()
        self._command_turns.receive(records, mono)
        self._history.receive(records)
        for record in records:
            if isinstance(record.message, Ack):
                self.commanding.acknowledge(record.incarnation.rank, record.message, now, record.time_ns / 1e9)
            elif isinstance(record.message, Heartbeat):
                self._marks.take_heartbeat(record.message, record.incarnation.attempt or 0, record.time_ns / 1e9)
        with self._meters.stages.measure("assemble"):
            self._stages.assembler.take(records, mono)
        self._meters.stages.add("follow", 0.0, len(records))
        self._stages.watch.tracker.receive(records, self._stages.follower.unheard)
        return True

    def _watch(self) -> None:
        """Look who lives, moves or is gone; only what is new is decided, journalled and judged."""
        watch = self._stages.watch
        for tick in watch.look(time.monotonic(), time.time(), self._stages.judge.has_news):
            self._judge([tick])
        watch.rest(time.monotonic())

    def _judge(self, decided: Iterable[StepView | Tick]) -> bool:
        """Judge steps and moments, each behind its decision in the journal; return whether there were any."""
        begun, left_s = time.monotonic(), self._turns.left_s
        newest: StepView | None = None
        has_any = False
        stages, ended = self._meters.stages, list[float]()
        for one in stages.each("assemble", decided):
            has_any = True
            decision = one if isinstance(one, Tick) else one.decision
            assert decision is not None
            with stages.measure("commit"):
                is_new = self._commits.begin(decision)
            with stages.measure("judge", 1):
                judgement = self._stages.judged(one, decision.pack_hash)
            if isinstance(one, Tick):
                self._gauges.take_anomalies(judgement.anomalies if is_new else ())
                self._history.pass_by(one)
                self.mirrors.pass_by(one)
            else:
                newest = one
                self._gauges.take_step(one, judgement.anomalies, is_new=is_new)
                step = self.recent.add(one)
                self._history.take(step)
                self.mirrors.take(step, one.step_time_s)
                self._notices.take_step(one)
                self._marks.take_step(one)
                if is_new and one.parts:
                    ended.append(max(part.time for part in one.parts))
            if is_new:
                with stages.measure("commit", 1):
                    self._commits.add(judgement, self._stages)
            self._advanced()
            if not isinstance(one, Tick) and self._turns.is_share_over:
                # What was found is told first.
                with stages.measure("commit"):
                    self._commits.flush(self._stages)
                self._turns.give_way()
                with stages.measure("commit"):
                    self._commits.keep_due(self._stages)
        if has_any:
            with stages.measure("commit"):
                self._commits.flush(self._stages)
                self._commits.keep_due(self._stages)
            self._meters.take_judged(ended, time.time())
            self._take_stock(newest)
            self._gauges.metrics.judging_s += time.monotonic() - begun - (self._turns.left_s - left_s)
        return has_any

    def _take_stock(self, newest: StepView | None) -> None:
        """Show what a batch of judged steps came to. newest: the last of them; None: there were moments alone."""
        if newest is not None:
            judge = self._stages.judge
            follower, assembler = self._stages.follower, self._stages.assembler
            self._notices.keep(self._gauges, judge.blindness, judge.failures, assembler.losses)
            self._notices.keep_partial(assembler.num_late_rows, follower.incarnations.values())
            self._gauges.take_norms(newest)
            self.status.take_judge(judge)
        self._marks.keep()
        self._gauges.take_incidents(self._stages.judge.open_incidents)
        self._gauges.metrics.last_judged_time = time.time()


@contextlib.contextmanager
def _trouble_in_words(journal: Path) -> Iterator[None]:
    """Say what SQLite says of a journal as a StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        raise journal_trouble(journal, error) from error


@contextlib.contextmanager
def _records_in_words(journal: Path) -> Iterator[None]:
    """Say that a record of a journal cannot be read as a StoreError."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise StoreError(
            f"{journal}: a record cannot be read: {error}; check this disk, then {repair_words(journal)}"
        ) from error
