"""Edits of the trainer's config file: a text that stands still becomes one command, obeyed by every rank at one step.

What is in force is what each rank's descriptor says. So a restart of the trainer, which reads the
file anew, asks for nothing; nor does one of the daemon, which reads what the ranks measure by.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sentinel.command import ChangeConfig
from sentinel.config_file import ConfigFile, ConfigText
from sentinel.control.command_status import CommandStatus
from sentinel.control.commands import RunCommands
from sentinel.control.config import MAX_LATENCY_S, ControlConfig
from sentinel.control.policy import first_step
from sentinel.errors import ConfigError
from sentinel.messages import Descriptor
from sentinel.monitor_config import Measurement, as_reported, refuse_fixed

log = logging.getLogger("sentinel.control")

LOOK_S = 0.5
"""Seconds between two looks at the file. Shorter: what each of thousands of ranks has in force is compared more often;
longer: a person waits for an edit to be ordered."""
AWAY_S = 2.0
"""A file that cannot be read for so long is said to be away: editors replace a file in two moves."""
MAX_TRIES = 5
"""An edit that was ordered so often and still is not in force everywhere is given up, until the file changes again."""
PERSON_LATENCY_S = 0.5
"""Least time, in seconds, that an edit, or a command of a person, is given to reach every rank. Shorter: a slow rank
misses its step, which costs a second; longer: it comes into force some steps later, which nobody counts."""
OUTCOMES: tuple[str, ...] = ("ordered", "broken", "given_up", "unreadable")


class ConfigInUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measures by, as its descriptor says."""

    path: str
    text_hash: str
    settings: dict[str, Any]
    host: str = ""
    ended: int = -1
    """Newest step whose end the rank's frames have reported; -1: none."""

    @classmethod
    def reported_by(cls, descriptor: Descriptor | None, ended: int) -> ConfigInUse:
        """Return what a rank's newest descriptor says; a rank that has sent none measures by no file."""
        if descriptor is None:
            return cls(path="", text_hash="", settings={})
        return cls(
            path=descriptor.config_path,
            text_hash=descriptor.config_hash,
            settings=descriptor.settings,
            host=descriptor.environment.get("host", ""),
            ended=ended,
        )


class EditState(msgspec.Struct, kw_only=True):
    """What is kept across restarts of the daemon."""

    path: str = ""
    attempt: int = -1
    text_hash: str = ""
    """The newest text that stood still."""
    edit: int = 0
    """Number of that text, counted from the first edit; 0: the text that the trainer was started with."""
    tries: int = 0
    """Times that it was ordered."""
    is_known: bool = False
    """The file here once had the very text that the ranks were started with: it is theirs."""
    broken_hash: str = ""
    """The broken text that was said last."""
    problem: str = ""
    """Why the newest text is not in force; empty when it is, or will be."""


class ConfigFileEdits:
    """Follows the config file of one run. Not for several threads at once.

    host: the name of this machine. audit: called for every broken edit, and with what became of others.
    """

    def __init__(
        self,
        config: ControlConfig,
        commands: RunCommands,
        audit: Callable[[float, str, str, dict[str, Any]], None],
        host: str,
    ) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        """Outcome -> edits since the daemon started."""
        self.state = EditState()
        self.config = config
        self._commands = commands
        self._audit = audit
        self._host = host
        self._file: ConfigFile | None = None
        self._looked = float("-inf")
        self._away_since: float | None = None
        self._said = ""
        self._latency_s = max(PERSON_LATENCY_S, config.latency_s)
        self._times: list[float] = []
        self._dry_edit = 0

    def dump(self) -> bytes:
        """Return what a restart of the daemon keeps, as JSON."""
        return msgspec.json.encode(self.state)

    def load(self, body: bytes) -> None:
        """Take back what `dump` returned."""
        self.state = msgspec.json.decode(body, type=EditState)

    def turn(
        self,
        ask: Callable[[], Mapping[int, ConfigInUse]],
        *,
        newest_step: int,
        step_time_s: float | None,
        now: float,
        mono: float,
    ) -> None:
        """Look at the file, when that is due, and order what it asks for.

        ask: returns live rank -> what it measures by. newest_step: of any rank. now: seconds since the epoch; mono:
        seconds of a clock that never jumps. StoreError when the command could not be written: the next turn tries again.
        """
        if not self.config.follow_config or 0 <= mono - self._looked < LOOK_S:
            return
        self._looked = mono
        in_use = {rank: one for rank, one in sorted(ask().items()) if one.path}
        if not in_use:
            return
        path = next(iter(in_use.values())).path
        self._begin(path)
        reading = self._look(path, now, mono)
        if reading is None or not self._is_theirs(in_use, reading, now):
            return
        if reading.text_hash != self.state.text_hash:
            self._note_text(in_use, reading)
        problem = reading.problem or self._fixed(in_use, reading)
        if problem:
            self._report_broken(reading, problem, now)
            return
        pending = [change for status, change in self._changes() if status.state in ("issued", "armed")]
        for change in pending:
            if change.text_hash != reading.text_hash:
                self._commands.withdraw(change.id, now=now, reason="the file was edited again", source="config")
        if all(one.text_hash == reading.text_hash for one in in_use.values()):
            self.state.problem, self.state.tries = "", 0
        elif not any(change.text_hash == reading.text_hash for change in pending):
            self._order(in_use, reading, newest_step, step_time_s, now)

    # Which file, and whether it is the trainer's.

    def _begin(self, path: str) -> None:
        if self._file is None or self._file.path != path:
            self._file, self._away_since = ConfigFile(path), None
        if (path, self._commands.attempt) != (self.state.path, self.state.attempt):
            # A restarted trainer has read the file itself.
            known = self.state.is_known and path == self.state.path
            self.state = EditState(path=path, attempt=self._commands.attempt, edit=self.state.edit, is_known=known)
            self._said = ""

    def _look(self, path: str, now: float, mono: float) -> ConfigText | None:
        assert self._file is not None
        reading = self._file.look(mono)
        if not self._file.problem:
            if self._away_since is not None and self.state.problem.startswith(path):
                self.state.problem = ""
            self._away_since = None
            return reading
        self._away_since = mono if self._away_since is None else self._away_since
        if mono - self._away_since >= AWAY_S:
            # Never read: another host, perhaps, and no fault. Read before: somebody took it away.
            if self.state.is_known:
                self.state.problem = f"{self._file.problem}; the config in force stays"
            self._report("unreadable", f"{self._file.problem}; edits of it are not seen here", now)
        return None

    def _is_theirs(self, in_use: Mapping[int, ConfigInUse], reading: ConfigText, now: float) -> bool:
        paths, hashes = {one.path for one in in_use.values()}, {one.text_hash for one in in_use.values()}
        hosts = {one.host for one in in_use.values()}
        if len(paths) > 1:
            return self._report("unreadable", f"the ranks read {len(paths)} config files: no edit is followed", now)
        if reading.text_hash in hashes and len(hashes) == 1:
            self.state.is_known = True
        if self.state.is_known or hosts <= {self._host}:
            return True
        what = "other text than the ranks'" if len(hashes) == 1 else "one text, and the ranks have different ones"
        words = f"{self.state.path}: {what}, on another host: edits are not followed until they agree"
        return self._report("unreadable", words, now)

    # What it says.

    def _note_text(self, in_use: Mapping[int, ConfigInUse], reading: ConfigText) -> None:
        is_edit = any(one.text_hash != reading.text_hash for one in in_use.values()) or bool(self.state.text_hash)
        self.state.text_hash, self.state.tries = reading.text_hash, 0
        self.state.edit += is_edit
        self.state.problem = ""

    def _fixed(self, in_use: Mapping[int, ConfigInUse], reading: ConfigText) -> str:
        if reading.text_hash == self.state.broken_hash and self.state.problem:
            return self.state.problem
        try:
            refuse_fixed(reading.text, self.state.path, next(iter(in_use.values())).settings)
        except ConfigError as error:
            return str(error)
        return ""

    def _report_broken(self, reading: ConfigText, problem: str, now: float) -> None:
        self.state.problem = problem
        if self.state.broken_hash == reading.text_hash:
            return
        self.state.broken_hash = reading.text_hash
        self.counts["broken"] += 1
        log.error("the former config stays in force, because the edit cannot be followed: %s", problem)
        self._audit(now, "config", "config.broken", {"path": self.state.path, "problem": problem})

    # What follows.

    def _order(
        self,
        in_use: Mapping[int, ConfigInUse],
        reading: ConfigText,
        newest_step: int,
        step_time_s: float | None,
        now: float,
    ) -> None:
        assert reading.config is not None
        tried = [(status, change) for status, change in self._changes() if change.text_hash == reading.text_hash]
        if self.state.tries and tried:
            last, change = tried[-1]
            if last.state in ("ended", "applied") and any(one.ended < change.at_step for one in in_use.values()):
                return  # What a rank measures by is said with the end of that very step.
            if "refused" in last.acks.values():
                self._give_up(f"{self.state.path}: the edit was refused: {last.reason}; see allow_commands", now)
                return
            if self.state.tries >= MAX_TRIES:
                self._give_up(f"{self.state.path}: ordered {MAX_TRIES} times, not in force everywhere: {last.reason}", now)
                return
            self._latency_s = min(self._latency_s * 2.0, MAX_LATENCY_S)
        self._times = [time for time in self._times if now - 3600.0 < time <= now]
        if len(self._times) >= self.config.max_edits_per_hour:
            most = self.config.max_edits_per_hour
            self.state.problem = f"{self.state.path}: {most} edits in the last hour; the newest one waits"
            return
        wanted = as_reported(reading.config.measurement)
        settings = next(iter(in_use.values())).settings
        changed = tuple(key for key in Measurement.__struct_fields__ if wanted[key] != settings.get(key))
        at_step = max(first_step(newest_step, step_time_s, self._latency_s), reading.config.at_step or 0)
        words = f"edit of {self.state.path}: {', '.join(changed) or 'no key'} changed"
        if self.config.dry_run:
            if self._dry_edit != self.state.edit:
                self._dry_edit = self.state.edit
                self._commands.audit.dry_run({"at_step": at_step, "settings": wanted, "reason": words}, now)
            return
        command = self._commands.change(
            at_step=at_step,
            now=now,
            settings=wanted,
            changed=changed,
            path=self.state.path,
            text_hash=reading.text_hash,
            reason=words,
            key=f"config:{self.state.attempt}:{self.state.edit}:{self.state.tries}",
        )
        self.state.tries += 1
        self.state.problem = ""
        self._times.append(now)
        self.counts["ordered"] += 1
        log.info("%s; ordered as %s from step %d on", words, command.id, at_step)

    def _changes(self) -> list[tuple[CommandStatus, ChangeConfig]]:
        return [
            (one, one.command)
            for one in self._commands.known.statuses()
            if isinstance(one.command, ChangeConfig) and one.command.attempt == self._commands.attempt
        ]

    def _give_up(self, problem: str, now: float) -> None:
        if self.state.problem != problem:
            self.state.problem = problem
            self._report("given_up", problem, now)

    def _report(self, outcome: str, message: str, now: float) -> bool:
        if message != self._said:
            self._said = message
            self.counts[outcome] += 1
            log.warning("%s", message)
            self._audit(now, "config", f"config.{outcome}", {"path": self.state.path, "problem": message})
        return False
