"""What the daemon may ask of a trainer: small, dated, expiring."""

from __future__ import annotations

import msgspec


class EnableMonitoring(msgspec.Struct, frozen=True, kw_only=True, tag="EnableMonitoring"):
    """Measure more, from one step on, on every rank alike."""

    id: str
    seq: int
    """Number of the file `<run>/control/<seq>.json`; grows by one a command."""
    at_step: int
    kinds: tuple[str, ...] = ("activation", "activation_in", "dgrad", "dgrad_in")
    targets: tuple[str, ...] = ()
    """Globs of canonical or local module names; empty: all."""
    statistics: tuple[str, ...] | None = None
    per_micro_step: bool = True
    for_steps: int | None = None
    """Steps until the trainer switches off by itself; None: until told."""
    ranks: tuple[int, ...] = ()
    """Ranks that are meant; empty: all."""
    reason: str = ""


class DisableMonitoring(msgspec.Struct, frozen=True, kw_only=True, tag="DisableMonitoring"):
    """Stop measuring what was enabled, from one step on."""

    id: str
    seq: int
    at_step: int
    kinds: tuple[str, ...] = ()
    """Empty: all that commands enabled."""
    targets: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    reason: str = ""


class WithdrawCommand(msgspec.Struct, frozen=True, kw_only=True, tag="WithdrawCommand"):
    """Forget a command that not every rank could obey in time."""

    id: str
    seq: int
    withdraws: str
    """The id of the command to forget; what it enabled ends at once."""
    reason: str = ""


Command = EnableMonitoring | DisableMonitoring | WithdrawCommand
"""Told apart by the JSON field `type`."""
