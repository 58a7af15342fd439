"""What was ordered because of an incident, and what became of it, in words."""

from __future__ import annotations

from collections.abc import Iterable

from sentinel.command import DumpTensors, EnableMonitoring
from sentinel.control.command_status import CommandStatus
from sentinel.control.known_commands import is_over
from sentinel.incident import Incident

MAX_ORDERS = 3
"""Most orders that are told of; further ones are counted."""


def orders_in_words(statuses: Iterable[CommandStatus], incident: Incident) -> tuple[str, ...]:
    """Return a clause for each order that an incident led to, or that was in force when it opened; oldest first.

    statuses: of all commands of the run that are remembered.
    """
    found = []
    for status in statuses:
        command = status.command
        if not isinstance(command, (EnableMonitoring, DumpTensors)) or command.attempt not in (-1, incident.attempt):
            continue
        was_on = command.at_step <= incident.opened_step and not is_over(command, incident.opened_step)
        if (was_on or _follows(status, incident)) and (words := _in_words(status, command)):
            found.append(words)
    more = len(found) - MAX_ORDERS
    return (*found[:MAX_ORDERS], *([f"and {more} more orders"] if more > 0 else []))


def _follows(status: CommandStatus, incident: Incident) -> bool:
    """Return whether a command was given because of an anomaly of the steps that an incident spans."""
    # A proposal's key is run:attempt:step:anomaly, and behind it the action where that is not to escalate.
    parts = status.key.removeprefix(f"{incident.run}:").split(":")
    if status.source != "policy" or len(parts) < 3 or not (parts[0].isdigit() and parts[1].isdigit()):
        return False
    newest = max(incident.last_step, incident.active_step)
    return int(parts[0]) == incident.attempt and incident.opened_step <= int(parts[1]) <= newest


def _in_words(status: CommandStatus, command: EnableMonitoring | DumpTensors) -> str:
    is_dump = isinstance(command, DumpTensors)
    steps = f"step {command.at_step}"
    if command.for_steps is not None and command.for_steps > 1:
        steps = f"steps {command.at_step} to {command.at_step + command.for_steps - 1}"
    elif not is_dump:
        steps = f"from {steps} on"
    verb = {
        "issued": "asked of the trainer", "armed": "agreed to by the trainer", "applied": "dumped" if is_dump else "is on",
        "partial": "dumped by some ranks" if is_dump else "is on where ranks could obey",
        "ended": "dumped" if is_dump else "was on", "refused": "refused by the trainer",
        "expired": "asked of the trainer, and not every rank answered",
    }.get(status.state)  # fmt: skip
    if verb is None:
        return ""
    why = f": {status.reason}" if status.state == "refused" and status.reason else ""
    what = f"{'raw tensors' if is_dump else 'monitoring'} of {', '.join(command.kinds)}"
    return f"{what} {verb}, {steps}, {_ranks(command.ranks)}{why}"


def _ranks(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "all ranks"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more}"
