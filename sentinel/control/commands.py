"""Commands on paper: written for the ranks to find, answered in their spools, followed until they are over.

A command is one file `<run>/control/<seq>.json`, made whole before it has its name, so that nobody reads half of one.
Numbers go on from what lies there: a daemon that restarts and a person at a shell share one row of numbers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sentinel.command import (
    ALARM_KINDS,
    ANY_ATTEMPT,
    ChangeConfig,
    Command,
    DescribeStructure,
    DisableMonitoring,
    DumpTensors,
    EnableMonitoring,
    WithdrawCommand,
)
from sentinel.control.command_status import STATES, CommandStatus
from sentinel.errors import StoreError
from sentinel.messages import Ack
from sentinel.private_files import create_file, make_directory

GRACE_S = 2.0
"""A rank that has not answered for so long after another passed the command's step came too late (chosen)."""
MAX_REMEMBERED = 1000
"""Most commands followed or remembered; older ones stay on disk (chosen)."""

SCAN_INTERVAL_S = 0.2
"""Least time between two looks for commands that others wrote (chosen; a remote directory is slow to list)."""

Obeyed = EnableMonitoring | DisableMonitoring | ChangeConfig | DumpTensors | DescribeStructure
"""Commands that ranks obey at their step."""
_CommandT = TypeVar(
    "_CommandT", EnableMonitoring, DisableMonitoring, ChangeConfig, DumpTensors, DescribeStructure, WithdrawCommand
)
_FILE = re.compile(r"(\d{6,})\.json")
_DECODER: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


class RunCommands:
    """Writes the commands of one run and follows the answers. Not for several threads at once.

    run_dir: the run's directory. audit: told of every change of state: (time, actor, action, details).
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        audit: Callable[[float, str, str, dict[str, Any]], None] = lambda time, actor, action, details: None,
        expires_s: float = 600.0,
    ) -> None:
        self.directory = run_dir / "control"
        self.counts: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        """State -> commands that ever entered it: `RunMetrics.commands`."""
        self.monitoring_acked_step: int | None = None
        """at_step of the last command that every live rank it means answered with `armed`."""
        self.problem = ""
        """Why a command could not be withdrawn; empty when none waits for that."""
        self.attempt = ANY_ATTEMPT
        """Attempt that commands written from now on are meant for."""
        self.num_foreign = 0
        """Files in the directory that are no commands."""
        self._audit = audit
        self._expires_s = expires_s
        self._statuses: dict[str, CommandStatus] = {}
        self._keys: dict[str, str] = {}
        self._seen: set[int] = set()
        self._next_seq = 1
        self._last_scan = float("-inf")

    # What a restart keeps: the daemon puts it into the journal.

    def dump(self) -> bytes:
        """Return all that is known of commands, as JSON."""
        return msgspec.json.encode([*self._statuses.values()])

    def load(self, body: bytes) -> None:
        """Take back what `dump` returned, before anything else is done."""
        for status in msgspec.json.decode(body, type=list[CommandStatus]):
            self._remember(status)

    # Writing.

    def enable(
        self,
        *,
        at_step: int,
        now: float,
        kinds: tuple[str, ...] = ALARM_KINDS,
        targets: tuple[str, ...] = (),
        statistics: tuple[str, ...] | None = None,
        per_micro_step: bool = True,
        for_steps: int | None = None,
        ranks: tuple[int, ...] = (),
        reason: str = "",
        source: str = "cli",
        key: str = "",
    ) -> EnableMonitoring:
        """Write an order to measure more from `at_step` on; the one already written when `key` was used before."""
        known = self.find(key)
        if known is not None and isinstance(known.command, EnableMonitoring):
            return known.command
        return self._write(
            lambda seq: EnableMonitoring(
                id=command_id(seq, at_step, key or repr(now)), seq=seq, at_step=at_step, kinds=kinds, targets=targets,
                statistics=statistics, per_micro_step=per_micro_step, for_steps=for_steps, ranks=ranks, reason=reason,
                attempt=self.attempt,
            ),
            source, key, now,
        )  # fmt: skip

    def disable(
        self,
        *,
        at_step: int,
        now: float,
        kinds: tuple[str, ...] = (),
        targets: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        reason: str = "",
        source: str = "cli",
    ) -> DisableMonitoring:
        """Write an order to stop from `at_step` on what was enabled; no kinds: all of it."""
        return self._write(
            lambda seq: DisableMonitoring(
                id=command_id(seq, at_step, repr(now)), seq=seq, at_step=at_step, kinds=kinds, targets=targets,
                ranks=ranks, reason=reason, attempt=self.attempt,
            ),
            source, "", now,
        )  # fmt: skip

    def change(
        self,
        *,
        at_step: int,
        now: float,
        settings: dict[str, Any],
        changed: tuple[str, ...],
        path: str,
        text_hash: str,
        reason: str,
        key: str,
    ) -> ChangeConfig:
        """Write an order to measure by other settings from `at_step` on; the one already written for the same `key`."""
        known = self.find(key)
        if known is not None and isinstance(known.command, ChangeConfig):
            return known.command
        return self._write(
            lambda seq: ChangeConfig(
                id=command_id(seq, at_step, key), seq=seq, at_step=at_step, settings=settings, changed=changed,
                path=path, text_hash=text_hash, reason=reason, attempt=self.attempt,
            ),
            "config", key, now,
        )  # fmt: skip

    def dump_tensors(
        self,
        *,
        at_step: int,
        now: float,
        kinds: tuple[str, ...] = ("wgrad",),
        targets: tuple[str, ...] = (),
        for_steps: int = 1,
        step_interval: int = 1,
        first_n: int | None = None,
        ranks: tuple[int, ...] = (),
        reason: str = "",
        source: str = "cli",
        key: str = "",
    ) -> DumpTensors:
        """Write an order to dump raw tensors from `at_step` on; the one already written when `key` was used before."""
        known = self.find(key)
        if known is not None and isinstance(known.command, DumpTensors):
            return known.command
        return self._write(
            lambda seq: DumpTensors(
                id=command_id(seq, at_step, key or repr(now)), seq=seq, at_step=at_step, kinds=kinds, targets=targets,
                for_steps=for_steps, step_interval=step_interval, first_n=first_n, ranks=ranks, reason=reason,
                attempt=self.attempt,
            ),
            source, key, now,
        )  # fmt: skip

    def describe(
        self, *, at_step: int, now: float, ranks: tuple[int, ...] = (), reason: str = "", source: str = "cli"
    ) -> DescribeStructure:
        """Write an order to write down the model's structure as the forward of `at_step` shows it."""
        return self._write(
            lambda seq: DescribeStructure(
                id=command_id(seq, at_step, repr(now)), seq=seq, at_step=at_step, ranks=ranks, reason=reason,
                attempt=self.attempt,
            ),
            source, "", now,
        )  # fmt: skip

    def withdraw(self, command: str, *, now: float, reason: str = "", source: str = "policy") -> WithdrawCommand:
        """Write that a command is to be forgotten."""
        return self._write(
            lambda seq: WithdrawCommand(
                id=command_id(seq, -1, command), seq=seq, withdraws=command, reason=reason
            ),
            source, f"withdraw:{command}", now,
        )  # fmt: skip

    def note_dry_run(self, details: dict[str, Any], now: float) -> None:
        """Write down what a dry run would have ordered."""
        self.counts["dry_run"] += 1
        self._audit(now, "policy", "command.dry_run", details)

    # Following.

    def acknowledge(self, rank: int, ack: Ack, now: float) -> None:
        """Take a rank's answer. Answers may come twice, and for commands that nobody here remembers."""
        if ack.command not in self._statuses:
            self.scan(now)
        status = self._statuses.get(ack.command)
        if status is None or status.acks.get(rank) == ack.state:
            return
        status.acks[rank] = ack.state
        if ack.state in ("missed", "refused"):
            # Only these: thousands of ranks say `armed`, and the change of state that follows says it for all.
            details = {"command": ack.command, "state": ack.state, "step": ack.step, "reason": ack.reason}
            self._audit(now, f"rank {rank}", "ack", details)

    def scan(self, now: float) -> None:
        """Find commands that others wrote (`sentinel enable` beside a daemon), and learn the next number."""
        self._last_scan = now
        try:
            names = sorted(path.name for path in self.directory.iterdir())
        except OSError:
            return
        for name in names:
            match = _FILE.fullmatch(name)
            if match is None or int(match[1]) in self._seen:
                continue
            seq = int(match[1])
            self._seen.add(seq)
            self._next_seq = max(self._next_seq, seq + 1)
            command = self._read(self.directory / name)
            if command is None or command.seq != seq:
                self.num_foreign += 1
                self._audit(now, "cli", "command.foreign", {"file": name})
            elif command.id not in self._statuses:
                self._enter(CommandStatus(command=command, source="cli", issued=now), now)

    def tick(self, ended: Mapping[int, int], now: float) -> list[CommandStatus]:
        """Move commands on; return those whose state changed. ended: live rank -> newest step it has spoken for (-1:
        none). now: seconds since the epoch. Withdraws what came too late and is obeyed by nobody yet."""
        # Also when the clock was set back.
        if not 0 <= now - self._last_scan < SCAN_INTERVAL_S:
            self.scan(now)
        changed, self.problem = [], ""
        for status in list(self._statuses.values()):
            if status.is_final:
                continue
            before = status.state
            try:
                self._move(status, ended, now)
            except StoreError as error:
                # The disk may be full; the withdrawal is tried again at the next tick.
                self.problem = str(error)
            if status.state != before:
                changed.append(status)
        self._forget()
        return changed

    def begin_attempt(self, now: float, attempt: int | None = None) -> None:
        """Withdraw what stands: a step number of one attempt means another moment in the next.

        attempt: the one that begins; what is ordered for it, or for any, stays. None: nothing stays.
        """
        for status in self.statuses():
            meant = getattr(status.command, "attempt", ANY_ATTEMPT)
            stays = attempt is not None and (meant == ANY_ATTEMPT or meant >= attempt)
            if not status.is_final and not stays:
                self.withdraw(status.command.id, now=now, reason="a new attempt began")

    def find(self, key: str) -> CommandStatus | None:
        """Return the command that follows from `key`, or None."""
        return self._statuses.get(self._keys.get(key, "")) if key else None

    def statuses(self) -> list[CommandStatus]:
        """Return all that is remembered, in order of their numbers."""
        return sorted(self._statuses.values(), key=lambda status: status.command.seq)

    def covers(self, kinds: Collection[str], ranks: Collection[int], newest_step: int) -> bool:
        """Return whether an order stands that measures `kinds` on `ranks` (empty: all) behind `newest_step`."""
        return any(
            set(kinds) <= set(command.kinds)
            and not command.targets
            and (not command.ranks or (bool(ranks) and set(ranks) <= set(command.ranks)))
            and not _is_over(command, newest_step + 1)
            for command in self._enabled_in(("issued", "armed", "applied", "partial"))
        )

    def is_on(self, newest_step: int) -> bool:
        """Return whether some rank obeys an order to measure more at `newest_step`."""
        return any(
            command.at_step <= newest_step and not _is_over(command, newest_step)
            for command in self._enabled_in(("applied", "partial"))
        )

    # Inside.

    def _enabled_in(self, states: Collection[str]) -> list[EnableMonitoring]:
        return [
            status.command
            for status in self._statuses.values()
            if isinstance(status.command, EnableMonitoring) and status.state in states
        ]

    def _move(self, status: CommandStatus, ended: Mapping[int, int], now: float) -> None:
        command = status.command
        assert not isinstance(command, WithdrawCommand)
        live = [rank for rank in ended if not command.ranks or rank in command.ranks]
        acks = {rank: status.acks.get(rank, "") for rank in live}
        obeying = [rank for rank, answer in acks.items() if answer in ("applied", "ended")]
        obeying += [rank for rank, answer in acks.items() if answer == "armed" and ended[rank] >= command.at_step]
        if status.state == "issued":
            self._move_issued(status, command, ended, acks, obeying, now)
        if status.state == "armed":
            failed = sorted(rank for rank, answer in acks.items() if answer in ("missed", "refused"))
            if failed:
                # A rank that was armed and yet missed its step: the others go on.
                self._enter_state(status, "partial", now, f"too late on {_ranks(failed)}")
            elif live and len(set(obeying)) == len(live):
                self._enter_state(status, "applied", now)
        if status.state in ("applied", "partial") and live:
            if not isinstance(command, (EnableMonitoring, DumpTensors)):
                if isinstance(command, DisableMonitoring):
                    self._end_disabled(command, now)
                self._enter_state(status, "ended", now)
            elif all(
                answer in ("ended", "missed", "refused") or _is_over(command, ended[rank] + 1)
                for rank, answer in acks.items()
            ):
                self._enter_state(status, "ended", now)

    def _move_issued(
        self,
        status: CommandStatus,
        command: Obeyed,
        ended: Mapping[int, int],
        acks: Mapping[int, str],
        obeying: Collection[int],
        now: float,
    ) -> None:
        silent = [rank for rank, answer in acks.items() if not answer]
        is_found = isinstance(command, ChangeConfig) and status.source != "config"
        if is_found and acks and all(not acks[rank] and ended[rank] >= command.at_step for rank in acks):
            # The journal was lost and its answers with it; to withdraw it would undo what the ranks measure by.
            self._enter_state(status, "ended", now, "found again after its step; the ranks say what is in force")
            return
        refused = sorted(rank for rank, answer in acks.items() if answer == "refused")
        late = {rank for rank, answer in acks.items() if answer == "missed"}
        # A rank's answer lies in its spool before the end of the step in which it gave it.
        late.update(rank for rank in silent if ended[rank] >= command.at_step)
        if silent and any(ended[rank] >= command.at_step for rank in acks):
            status.overdue_since = now if status.overdue_since is None else min(status.overdue_since, now)
            if now - status.overdue_since >= GRACE_S:
                late.update(silent)
        if acks and not silent and not late and not refused:
            self.monitoring_acked_step = command.at_step
            self._enter_state(status, "armed", now)
        elif acks and len(refused) == len(acks):
            self._enter_state(status, "refused", now, "every rank refused")
        elif late or refused:
            words = [f"too late on {_ranks(sorted(late))}"] if late else []
            words += [f"refused by {_ranks(refused)}"] if refused else []
            reason = ", ".join(words)
            # What is to stop is not kept running everywhere because one rank will stop later.
            if obeying or isinstance(command, DisableMonitoring):
                self._enter_state(status, "partial", now, reason)
            elif late or not silent:
                status.is_late = bool(late)
                self.withdraw(command.id, now=now, reason=reason)
        elif abs(now - status.issued) > self._expires_s:
            self._enter_state(status, "expired", now, f"not answered within {self._expires_s:g} s")
            self.withdraw(command.id, now=now, reason=status.reason)

    def _end_disabled(self, disable: DisableMonitoring, now: float) -> None:
        for status in self._statuses.values():
            command = status.command
            if (
                isinstance(command, (EnableMonitoring, DumpTensors))
                and status.state in ("issued", "armed", "applied", "partial")
                and command.seq < disable.seq
                and (not disable.kinds or set(command.kinds) <= set(disable.kinds))
                and not disable.targets
                and (not disable.ranks or (command.ranks and set(command.ranks) <= set(disable.ranks)))
            ):
                self._enter_state(status, "ended", now, f"disabled by {disable.id}")

    def _write(self, make: Callable[[int], _CommandT], source: str, key: str, now: float) -> _CommandT:
        self.scan(now)
        try:
            make_directory(self.directory)
            command = self._claim(make)
        except OSError as error:
            raise StoreError(f"{self.directory}: cannot write a command: {error.strerror or error}") from error
        self._enter(CommandStatus(command=command, source=source, key=key, issued=now), now)
        return command

    def _claim(self, make: Callable[[int], _CommandT]) -> _CommandT:
        while True:
            seq = self._next_seq
            command = make(seq)
            path = self.directory / f"{seq:06d}.json"
            draft = self.directory / f".{seq:06d}.{secrets.token_hex(4)}.tmp"
            file = create_file(draft, os.O_WRONLY | os.O_EXCL | os.O_NOFOLLOW)
            try:
                with os.fdopen(file, "wb") as stream:
                    stream.write(msgspec.json.encode(command))
                # A link, unlike a rename, fails where somebody took the number meanwhile.
                os.link(draft, path)
            except FileExistsError:
                self._next_seq = seq + 1
                continue
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                    raise
                # A file system without links: two writers at one instant could collide, one alone cannot.
                if path.exists():
                    self._next_seq = seq + 1
                    continue
                draft.rename(path)
            finally:
                with contextlib.suppress(OSError):
                    draft.unlink(missing_ok=True)
            self._seen.add(seq)
            self._next_seq = seq + 1
            return command

    def _read(self, path: Path) -> Command | None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(file, "rb") as stream:
                if os.fstat(file).st_uid != os.geteuid():
                    return None
                return _DECODER.decode(stream.read(2**20))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError):
            return None

    def _enter(self, status: CommandStatus, now: float) -> None:
        self._remember(status)
        command = status.command
        self.counts["issued"] += 1
        self._audit(now, status.source, "command.issued", {"command": msgspec.to_builtins(command)})
        if isinstance(command, WithdrawCommand):
            target = self._statuses.get(command.withdraws)
            if target is not None and not target.is_final:
                self._enter_state(target, "withdrawn", now, command.reason)

    def _remember(self, status: CommandStatus) -> None:
        self._statuses[status.command.id] = status
        self._seen.add(status.command.seq)
        self._next_seq = max(self._next_seq, status.command.seq + 1)
        if status.key:
            self._keys[status.key] = status.command.id

    def _enter_state(self, status: CommandStatus, state: str, now: float, reason: str = "") -> None:
        status.state, status.reason = state, reason
        self.counts[state] += 1
        answers = dict(Counter(status.acks.values()))
        self._audit(now, "desk", f"command.{state}", {"command": status.command.id, "reason": reason, "answers": answers})

    def _forget(self) -> None:
        for status in self.statuses()[: max(len(self._statuses) - MAX_REMEMBERED, 0)]:
            if status.is_final:
                del self._statuses[status.command.id]
                self._keys.pop(status.key, None)


def command_id(seq: int, at_step: int, what: str) -> str:
    """Return `c`, the number and 8 hex digits: a name for a command that no other run or attempt uses by chance."""
    return f"c{seq:06d}-" + hashlib.blake2b(f"{seq}\x1f{at_step}\x1f{what}".encode(), digest_size=4).hexdigest()


def _is_over(command: EnableMonitoring | DumpTensors, step: int) -> bool:
    return command.for_steps is not None and step >= command.at_step + command.for_steps


def _ranks(ranks: Collection[int]) -> str:
    shown = ", ".join(map(str, list(ranks)[:16]))
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}" + (" and others" if len(ranks) > 16 else "") if ranks else ""
