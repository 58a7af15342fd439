"""KnownCommands: what is remembered of a run's commands, and what stands of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from sentinel.command import DumpTensors, EnableMonitoring, TraceTensors
from sentinel.control.command_status import CommandStatus

MAX_REMEMBERED = 1000
"""Most commands that are followed or remembered, a bound on memory and on the time of a look; older ones stay on disk."""


class KnownCommands:
    """Commands by id, and by what they follow from."""

    def __init__(self) -> None:
        self._statuses: dict[str, CommandStatus] = {}
        self._keys: dict[str, str] = {}

    def __iter__(self) -> Iterator[CommandStatus]:
        """All of them, as they became known; some may be added meanwhile."""
        return iter(list(self._statuses.values()))

    def get(self, command: str) -> CommandStatus | None:
        """Return the command of this id, or None."""
        return self._statuses.get(command)

    def dump(self) -> bytes:
        """Return all of it, as JSON."""
        return msgspec.json.encode([*self._statuses.values()])

    def remember(self, status: CommandStatus) -> None:
        """Take in a command."""
        self._statuses[status.command.id] = status
        if status.key:
            self._keys[status.key] = status.command.id

    def forget(self) -> None:
        """Lay off the oldest of those that are over, where too many are remembered."""
        for status in self.statuses()[: max(len(self._statuses) - MAX_REMEMBERED, 0)]:
            if status.is_final:
                del self._statuses[status.command.id]
                self._keys.pop(status.key, None)

    def find(self, key: str) -> CommandStatus | None:
        """Return the command that follows from `key`, or None."""
        return self._statuses.get(self._keys.get(key, "")) if key else None

    def statuses(self) -> list[CommandStatus]:
        """Return all that is remembered, in order of their numbers."""
        return sorted(self._statuses.values(), key=lambda status: status.command.seq)

    def covers(
        self, kinds: Collection[str], ranks: Collection[int], newest_step: int, targets: Collection[str] = ()
    ) -> bool:
        """Return whether an order stands that measures `kinds` of `targets` on `ranks` (both empty: all) behind
        `newest_step`."""
        return any(
            set(kinds) <= set(command.kinds)
            and (not command.targets or (bool(targets) and set(targets) <= set(command.targets)))
            and (not command.ranks or (bool(ranks) and set(ranks) <= set(command.ranks)))
            and not is_over(command, newest_step + 1)
            for command in self._enabling(("issued", "armed", "applied", "partial"))
        )

    def is_on(self, newest_step: int) -> bool:
        """Return whether some rank obeys an order to measure more at `newest_step`."""
        return any(
            command.at_step <= newest_step and not is_over(command, newest_step)
            for command in self._enabling(("applied", "partial"))
        )

    def _enabling(self, states: Collection[str]) -> list[EnableMonitoring]:
        return [
            status.command
            for status in self._statuses.values()
            if isinstance(status.command, EnableMonitoring) and status.state in states
        ]


def is_over(command: EnableMonitoring | DumpTensors | TraceTensors, step: int) -> bool:
    """Return whether an order ended before a step by itself."""
    return command.for_steps is not None and step >= command.at_step + command.for_steps
