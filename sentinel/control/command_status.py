"""What became of a command: the states that it passes, and who answered what."""

from __future__ import annotations

import msgspec

from sentinel.command import Command, WithdrawCommand

STATES: tuple[str, ...] = (
    "issued", "armed", "applied", "partial", "ended", "withdrawn", "refused", "expired", "dry_run",
)  # fmt: skip
"""issued: written. armed: every live rank it means will obey. applied: every one does. partial: some do, some came too
late or refused. ended: over, as ordered. withdrawn: not every rank could obey in time. refused: every rank refused.
expired: not answered in time. dry_run: only written down."""
FINAL_STATES = frozenset({"ended", "withdrawn", "refused", "expired", "dry_run"})


class CommandStatus(msgspec.Struct, kw_only=True):
    """A command and what became of it."""

    command: Command
    state: str = "issued"
    source: str = "cli"
    """`policy`, `cli`, `http`, `config` (an edit of the trainer's config file)."""
    key: str = ""
    """What it follows from; the same key is issued once."""
    issued: float = 0.0
    """Seconds since the epoch."""
    acks: dict[int, str] = {}
    """Rank -> its newest answer."""
    reason: str = ""
    """Why it is in this state, for people."""
    is_late: bool = False
    """A rank had passed its step before reading it: it was withdrawn, or some ranks alone obey."""
    overdue_since: float | None = None
    """When the first rank was seen past its step while another had not answered."""

    ended: float = 0.0
    """When the last rank said that it was over, seconds since the epoch; 0: none did."""

    @property
    def is_final(self) -> bool:
        """Nothing more will become of it."""
        return self.state in FINAL_STATES or isinstance(self.command, WithdrawCommand)
