"""Commands on paper: written for the ranks to find, answered in their spools, followed until they are over."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sentinel.command import (
    ALARM_KINDS,
    ANY_ATTEMPT,
    ChangeConfig,
    DescribeStructure,
    DisableMonitoring,
    DumpTensors,
    EnableMonitoring,
    RequestAction,
    TraceTensors,
    TrainerAction,
    WithdrawCommand,
    bounded,
)
from sentinel.control.command_audit import CommandAudit, WriteDown
from sentinel.control.command_files import CommandFiles, CommandT
from sentinel.control.command_moves import next_move
from sentinel.control.command_status import CommandStatus
from sentinel.control.known_commands import KnownCommands
from sentinel.errors import StoreError
from sentinel.messages import Ack
from sentinel.trace import AS_TILES, Trace

SCAN_INTERVAL_S = 0.2
"""Least seconds between two looks for commands that others wrote. Shorter: a remote directory, slow to list, is listed more
often; longer: a command waits."""


class RunCommands:
    """Writes the commands of one run and follows the answers. Not for several threads at once.

    run_dir: the run's directory. audit: called for every change of state: (time, actor, action, details).
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        audit: WriteDown = lambda time, actor, action, details: None,
        expires_s: float = 600.0,
    ) -> None:
        self.known = KnownCommands()
        self._files = CommandFiles(run_dir / "control")
        self.audit = CommandAudit(audit)
        self.monitoring_acked_step: int | None = None
        """at_step of the last command that every live rank it means answered with `armed`."""
        self.problem = ""
        """Why a command could not be withdrawn; empty when none waits for that."""
        self.attempt = ANY_ATTEMPT
        """Attempt that commands written from now on are meant for."""
        self.num_foreign = 0
        """Files in the directory that are no commands."""
        self.expires_s = expires_s
        """Seconds after which a command that nobody answered is given up."""
        self._last_scan = float("-inf")

    # What a restart keeps: the daemon puts it into the journal.

    def dump(self) -> bytes:
        """Return all that is known of commands, as JSON."""
        return self.known.dump()

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
        known = self.known.find(key)
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
        known = self.known.find(key)
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
        known = self.known.find(key)
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

    def trace_tensors(
        self,
        *,
        at_step: int,
        now: float,
        kinds: tuple[str, ...] = ("activation",),
        targets: tuple[str, ...] = (),
        trace: Trace = AS_TILES,
        for_steps: int = 100,
        step_interval: int = 1,
        ranks: tuple[int, ...] = (),
        reason: str = "",
        source: str = "cli",
        key: str = "",
    ) -> TraceTensors:
        """Write an order to trace tensors from `at_step` on; the one already written when `key` was used before."""
        known = self.known.find(key)
        if known is not None and isinstance(known.command, TraceTensors):
            return known.command
        return self._write(
            lambda seq: TraceTensors(
                id=command_id(seq, at_step, key or repr(now)), seq=seq, at_step=at_step, kinds=kinds, targets=targets,
                trace=trace, for_steps=for_steps, step_interval=step_interval, ranks=ranks, reason=reason,
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

    def request(
        self,
        action: TrainerAction,
        *,
        at_step: int,
        now: float,
        num_batches: int = 0,
        for_s: float = 0.0,
        reason: str = "",
        source: str = "cli",
        key: str = "",
    ) -> RequestAction:
        """Write what the trainer is asked for from `at_step` on; the one already written when `key` was used before."""
        known = self.known.find(key)
        if known is not None and isinstance(known.command, RequestAction):
            return known.command
        return self._write(
            lambda seq: RequestAction(
                id=command_id(seq, at_step, key or repr(now)), seq=seq, at_step=at_step, action=action,
                num_batches=num_batches, for_s=for_s, reason=reason, attempt=self.attempt,
            ),
            source, key, now,
        )  # fmt: skip

    def withdraw(self, command: str, *, now: float, reason: str = "", source: str = "policy") -> WithdrawCommand:
        """Write that a command is to be forgotten."""
        return self._write(
            lambda seq: WithdrawCommand(
                id=command_id(seq, -1, command), seq=seq, withdraws=command, reason=reason
            ),
            source, f"withdraw:{command}", now,
        )  # fmt: skip

    # Following.

    def acknowledge(self, rank: int, ack: Ack, now: float, given: float | None = None) -> None:
        """Take a rank's answer. Answers may come twice, and for commands that nobody here remembers.

        given: when the rank gave it, by its clock, seconds since the epoch; None: now. What was read late ended before.
        """
        if self.known.get(ack.command) is None:
            self.scan(now)
        status = self.known.get(ack.command)
        if status is None or status.acks.get(rank) == ack.state:
            return
        status.acks[rank] = ack.state
        if ack.state == "ended":
            status.ended = max(status.ended, min(now, now if given is None else given))
        if ack.state in ("missed", "refused"):
            # Only these: thousands of ranks say `armed`, and the change of state that follows says it for all.
            self.audit.answered(rank, ack, now)

    def scan(self, now: float) -> None:
        """Find commands that others wrote (`sentinel enable` beside a daemon), and learn the next number."""
        self._last_scan = now
        for name, command in self._files.fresh():
            if command is None:
                self.num_foreign += 1
                self.audit.foreign(name, now)
            elif self.known.get(command.id) is None:
                self._enter(CommandStatus(command=command, source="cli", issued=now), now)

    def tick(self, ended: Mapping[int, int], now: float) -> list[CommandStatus]:
        """Move commands on; return those whose state changed. ended: live rank -> newest step whose end it has reported (-1:
        none). now: seconds since the epoch. Withdraws what came too late and is obeyed by nobody yet."""
        # Also when the clock was set back.
        if not 0 <= now - self._last_scan < SCAN_INTERVAL_S:
            self.scan(now)
        changed, self.problem = [], ""
        for status in self.known:
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
        self.known.forget()
        return changed

    def begin_attempt(self, now: float, attempt: int | None = None) -> None:
        """Withdraw what stands: a step number of one attempt means another moment in the next.

        attempt: the one that begins; what is ordered for it, or for any, stays. None: nothing stays.
        """
        for status in self.known.statuses():
            meant = getattr(status.command, "attempt", ANY_ATTEMPT)
            stays = attempt is not None and (meant == ANY_ATTEMPT or meant >= attempt)
            if not status.is_final and not stays:
                self.withdraw(status.command.id, now=now, reason="a new attempt began")

    # Inside.

    def _move(self, status: CommandStatus, ended: Mapping[int, int], now: float) -> None:
        while (move := next_move(status, ended, now, self.expires_s)) is not None:
            command = status.command
            assert not isinstance(command, WithdrawCommand)
            status.is_late = status.is_late or move.is_late
            if move.state == "armed":
                self.monitoring_acked_step = command.at_step
            if move.state == "ended" and isinstance(command, DisableMonitoring):
                self._end_disabled(command, now)
            if move.state != "withdrawn":
                self.audit.enter(status, move.state, now, move.reason)
            if move.is_withdrawn:
                self.withdraw(command.id, now=now, reason=move.reason)

    def _end_disabled(self, disable: DisableMonitoring, now: float) -> None:
        for status in self.known:
            command = status.command
            if (
                isinstance(command, (EnableMonitoring, DumpTensors, TraceTensors))
                and status.state in ("issued", "armed", "applied", "partial")
                and command.seq < disable.seq
                and (not disable.kinds or set(command.kinds) <= set(disable.kinds))
                and not disable.targets
                and (not disable.ranks or (command.ranks and set(command.ranks) <= set(disable.ranks)))
            ):
                self.audit.enter(status, "ended", now, f"disabled by {disable.id}")

    def _write(self, make: Callable[[int], CommandT], source: str, key: str, now: float) -> CommandT:
        self.scan(now)
        command = self._files.write(lambda seq: bounded(make(seq)))
        self._enter(CommandStatus(command=command, source=source, key=key, issued=now), now)
        return command

    def _enter(self, status: CommandStatus, now: float) -> None:
        self._remember(status)
        command = status.command
        self.audit.issued(status, now)
        if isinstance(command, WithdrawCommand):
            target = self.known.get(command.withdraws)
            if target is not None and not target.is_final:
                self.audit.enter(target, "withdrawn", now, command.reason)

    def _remember(self, status: CommandStatus) -> None:
        self.known.remember(status)
        self._files.note(status.command.seq)


def command_id(seq: int, at_step: int, what: str) -> str:
    """Return `c`, the number and 8 hex digits: a name for a command that no other run or attempt uses by chance."""
    return f"c{seq:06d}-" + hashlib.blake2b(f"{seq}\x1f{at_step}\x1f{what}".encode(), digest_size=4).hexdigest()
