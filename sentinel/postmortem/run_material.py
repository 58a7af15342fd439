"""RunMaterial: what a post-mortem is made of, read once from what lies on disk. What cannot be read is said."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sentinel.control.command_status import CommandStatus
from sentinel.daemon.command_note import CommandNote, read_note
from sentinel.daemon.commanding import COMMANDS_FACT
from sentinel.decision import TICK, Tick, decode_decision, decode_pack_hash
from sentinel.errors import SentinelError
from sentinel.explain.anomaly_files import anomaly_files
from sentinel.explain.story import SentAlert
from sentinel.incident import Incident
from sentinel.judge.packs import decode_pack
from sentinel.recorded_incidents import incident_revisions
from sentinel.rules.language.schema import Pack
from sentinel.run_end import RunEnd
from sentinel.store.audit import AuditEntry
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

MOST_AUDIT = 500
"""Newest entries of the audit that are looked at."""
MOST_TICKS = 256
MOST_RULE_BYTES = 64 * 2**20
"""Bytes of anomaly files of which it is counted which rules spoke (chosen: a tenth of a second)."""
_RULE = re.compile(rb'"rule":"([^"\\]{1,200})"')
_ONSET = b'"event":"onset"'


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands, as `sentinel status` says it."""

    lines: tuple[str, ...] = ()
    judged_by: str = ""
    """The process that judges it now; empty: none does."""
    is_over: bool = False
    """How it ended is known."""


class EndSaid(msgspec.Struct, frozen=True):
    """That an attempt of the run was over."""

    attempt: int
    time: float
    ended: RunEnd


class RunMaterial:
    """Of one run."""

    def __init__(self, run_dir: Path, now: float, standing: Standing, alerts: Sequence[tuple[str, SentAlert]] = ()) -> None:
        """now: seconds since the epoch. alerts: (incident id, alert), of all incidents, as far as they are known."""
        self.run_dir, self.now, self.standing, self.alerts = run_dir, now, standing, tuple(alerts)
        self.problems: list[str] = []
        """What could not be read, in words."""
        self.revisions: dict[str, list[Incident]] = {}
        """Incident -> its revisions, oldest first."""
        self.commands: list[CommandStatus] = []
        self.audit: list[AuditEntry] = []
        """Oldest first; of many the newest."""
        self.ends: list[EndSaid] = []
        self.pack: Pack | None = None
        """The rules that judged last; None: they are not recorded."""
        self.has_journal = False
        self.note = CommandNote()
        self._read_incidents()
        self._read_journal()
        self.rule_counts, self.num_anomalies = self._count_rules()

    @property
    def is_live(self) -> bool:
        """Whether a daemon judges it now, and no end of it is known."""
        return bool(self.standing.judged_by) and not self.standing.is_over

    @property
    def newest(self) -> dict[str, Incident]:
        """The newest revision of each incident."""
        return {name: revisions[-1] for name, revisions in self.revisions.items()}

    def opened(self, incident: str) -> float:
        """Return when an incident opened, seconds since the epoch."""
        return self.revisions[incident][0].time

    def _read_incidents(self) -> None:
        revisions = incident_revisions(self.run_dir) if (self.run_dir / "incidents.jsonl").is_file() else []
        for one in sorted(revisions, key=lambda one: one.revision):
            self.revisions.setdefault(one.id, []).append(one)
        with contextlib.suppress(OSError):
            num_lines = sum(bool(line.strip()) for line in (self.run_dir / "incidents.jsonl").read_bytes().split(b"\n"))
            if num_lines > len(revisions):
                self.problems.append(f"{num_lines - len(revisions)} lines of incidents.jsonl could not be read")

    def _read_journal(self) -> None:
        try:
            paths = RunPaths.of(self.run_dir)
            self.note = read_note(paths)
            if not paths.journal.exists():
                return
            journal = Journal(paths.journal, read_only=True)
        except (SentinelError, sqlite3.Error, OSError) as error:
            self.problems.append(f"the journal could not be read: {error}")
            return
        self.has_journal = True
        try:
            with self._noting("the audit"):
                self.audit = journal.audit.newest(MOST_AUDIT)[::-1]
            with self._noting("commands"):
                self.commands = msgspec.json.decode(journal.values.get(COMMANDS_FACT) or "[]", type=list[CommandStatus])
            with self._noting("how attempts ended"):
                ticks = [decode_decision(TICK, body) for body in journal.newest_decisions(TICK, MOST_TICKS)]
                said = [one for one in ticks[::-1] if isinstance(one, Tick)]
                self.ends = [EndSaid(one.attempt, one.ended.time or one.time, one.ended) for one in said if one.ended]
            with self._noting("the rules"):
                for _, _, body in journal.decisions(after=journal.last_seq - 1):
                    kept = journal.pack(decode_pack_hash(body))
                    self.pack = None if kept is None else decode_pack(kept)
        finally:
            journal.close()

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except (SentinelError, sqlite3.Error, ValueError, RecursionError) as error:
            self.problems.append(f"{what} could not be read from the journal: {error}")

    def _count_rules(self) -> tuple[Counter[str], int]:
        """Return rule -> anomalies of it, and all, as far as the bound on bytes reaches."""
        counts: Counter[str] = Counter()
        num_bytes = num_anomalies = 0
        try:
            found = anomaly_files(self.run_dir)
        except SentinelError:
            found = []
        files = [path for path in found if path.suffix == ".jsonl"]
        if len(found) > len(files):
            self.problems.append(f"anomalies in {len(found) - len(files)} packed files are not counted by rule")
        for path in files:
            try:
                with path.open("rb") as file:
                    for line in file:
                        num_bytes += len(line)
                        if _ONSET in line and (match := _RULE.search(line)) is not None:
                            num_anomalies += 1
                            counts[match[1].decode("utf-8", "replace")] += 1
                        if num_bytes > MOST_RULE_BYTES:
                            self.problems.append(
                                f"anomalies were counted in the first {MOST_RULE_BYTES >> 20} MiB of their files alone"
                            )
                            return counts, num_anomalies
            except OSError as error:
                self.problems.append(f"{path.name} could not be read: {error.strerror or error}")
        return counts, num_anomalies
