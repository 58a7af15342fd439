"""What becomes of a command next, by what the ranks answered and how far they are. Pure: the same answers, the same move."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from sentinel.command import (
    ChangeConfig,
    DisableMonitoring,
    DumpTensors,
    EnableMonitoring,
    Obeyed,
    RequestAction,
    TraceTensors,
    WithdrawCommand,
)
from sentinel.control.command_status import CommandStatus
from sentinel.control.known_commands import is_over

GRACE_S = 2.0
"""Seconds after which a rank that has not answered, since another passed the command's step, counts as too late. Shorter: so
does a rank whose answer is on its way; longer: a command that failed is withdrawn later."""


class Move(NamedTuple):
    """The state that a command enters, and why."""

    state: str
    """`withdrawn` alone: it is entered when the withdrawal is written."""
    reason: str = ""
    is_withdrawn: bool = False
    """The ranks are to forget it."""
    is_late: bool = False
    """Because a rank had passed its step before reading it."""


def next_move(status: CommandStatus, ended: Mapping[int, int], now: float, expires_s: float) -> Move | None:
    """Return what becomes of a command now; None: nothing. Notes in `status` since when an answer is overdue.

    ended: live rank -> newest step whose end it has reported (-1: none). now: seconds since the epoch.
    """
    command = status.command
    assert not isinstance(command, WithdrawCommand)
    live = [rank for rank in ended if not command.ranks or rank in command.ranks]
    acks = {rank: status.acks.get(rank, "") for rank in live}
    if isinstance(command, RequestAction) and status.state in ("armed", "applied", "partial"):
        return _of_request(status, acks)
    obeying = [rank for rank, answer in acks.items() if answer in ("applied", "ended")]
    if not isinstance(command, RequestAction):
        obeying += [rank for rank, answer in acks.items() if answer == "armed" and ended[rank] >= command.at_step]
    if status.state == "issued":
        return _of_issued(status, command, ended, acks, obeying, now, expires_s)
    if status.state == "armed":
        failed = sorted(rank for rank, answer in acks.items() if answer in ("missed", "refused"))
        if failed:
            # A rank that was armed and yet missed its step: the others go on.
            has_missed = any(acks[rank] == "missed" for rank in failed)
            return Move("partial", f"too late on {_ranks(failed)}", is_late=has_missed)
        return Move("applied") if live and len(set(obeying)) == len(live) else None
    if status.state in ("applied", "partial") and live:
        if not isinstance(command, (EnableMonitoring, DumpTensors, TraceTensors)):
            return Move("ended")
        is_done = all(
            answer in ("ended", "missed", "refused") or is_over(command, ended[rank] + 1) for rank, answer in acks.items()
        )
        return Move("ended") if is_done else None
    return None


def _of_request(status: CommandStatus, acks: Mapping[int, str]) -> Move | None:
    """Return what becomes of a request that every rank holds ready; the trainer takes it up when it asks."""
    answers = set(acks.values())
    if not answers or not answers <= {"applied", "ended", "missed", "refused"}:
        return None
    if answers <= {"missed", "refused"}:
        # `refused` is its last state: the trainer's word, or that it never asked.
        return Move("refused", "refused by the trainer" if "refused" in answers else "the trainer did not ask for requests")
    if "applied" not in answers:
        return Move("ended")
    if status.state == "armed":
        unmet = sorted(rank for rank, answer in acks.items() if answer in ("missed", "refused"))
        return Move("partial", f"not taken up by {_ranks(unmet)}") if unmet else Move("applied")
    return None


def _of_issued(
    status: CommandStatus,
    command: Obeyed,
    ended: Mapping[int, int],
    acks: Mapping[int, str],
    obeying: Collection[int],
    now: float,
    expires_s: float,
) -> Move | None:
    silent = [rank for rank, answer in acks.items() if not answer]
    is_found = isinstance(command, ChangeConfig) and status.source != "config"
    if is_found and acks and all(not acks[rank] and ended[rank] >= command.at_step for rank in acks):
        # The journal was lost and its answers with it; to withdraw it would undo what the ranks measure by.
        return Move("ended", "found again after its step; the ranks say what is in force")
    refused = sorted(rank for rank, answer in acks.items() if answer == "refused")
    late = {rank for rank, answer in acks.items() if answer == "missed"}
    # A rank's answer lies in its spool before the end of the step in which it gave it.
    late.update(rank for rank in silent if ended[rank] >= command.at_step)
    if silent and any(ended[rank] >= command.at_step for rank in acks):
        status.overdue_since = now if status.overdue_since is None else min(status.overdue_since, now)
        if now - status.overdue_since >= GRACE_S:
            late.update(silent)
    if acks and not silent and not late and not refused:
        return Move("armed")
    if acks and len(refused) == len(acks):
        return Move("refused", "every rank refused")
    if late or refused:
        words = [f"too late on {_ranks(sorted(late))}"] if late else []
        words += [f"refused by {_ranks(refused)}"] if refused else []
        reason = ", ".join(words)
        # What is to stop is not kept running everywhere because one rank will stop later.
        if obeying or isinstance(command, DisableMonitoring):
            return Move("partial", reason, is_late=bool(late))
        return Move("withdrawn", reason, is_withdrawn=True, is_late=bool(late)) if late or not silent else None
    if abs(now - status.issued) > expires_s:
        return Move("expired", f"not answered within {expires_s:g} s", is_withdrawn=True)
    return None


def _ranks(ranks: Collection[int]) -> str:
    shown = ", ".join(map(str, list(ranks)[:16]))
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}" + (" and others" if len(ranks) > 16 else "") if ranks else ""
