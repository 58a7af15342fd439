"""CommandAudit: writes down and counts what becomes of commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from sentinel.control.command_status import STATES, CommandStatus
from sentinel.messages import Ack

WriteDown: TypeAlias = Callable[[float, str, str, dict[str, Any]], None]
"""Called with (time in seconds since the epoch, actor, action, details)."""


class CommandAudit:
    """Of the commands of one run. Whatever enters a state does it here, so that none does unseen."""

    def __init__(self, write: WriteDown) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        """State -> commands that ever entered it."""
        self._write = write

    def issued(self, status: CommandStatus, now: float) -> None:
        """Note that a command was written."""
        self.counts["issued"] += 1
        self._write(now, status.source, "command.issued", {"command": msgspec.to_builtins(status.command)})

    def enter(self, status: CommandStatus, state: str, now: float, reason: str = "") -> None:
        """Move a command to a state, and note it with the answers so far."""
        status.state, status.reason = state, reason
        self.counts[state] += 1
        answers = dict(Counter(status.acks.values()))
        details = {"command": status.command.id, "reason": reason, "answers": answers}
        self._write(now, "commands", f"command.{state}", details)

    def answered(self, rank: int, ack: Ack, now: float) -> None:
        """Note what a rank answered."""
        details = {"command": ack.command, "state": ack.state, "step": ack.step, "reason": ack.reason}
        self._write(now, f"rank {rank}", "ack", details)

    def foreign(self, file: str, now: float) -> None:
        """Note a file that is no command."""
        self._write(now, "cli", "command.foreign", {"file": file})

    def dry_run(self, details: dict[str, Any], now: float) -> None:
        """Note what a dry run would have ordered."""
        self.counts["dry_run"] += 1
        self._write(now, "policy", "command.dry_run", details)
