"""What code or commands have switched on for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from sentinel.collect.schedule.wishes import Dump, Request, parse_kinds, parse_targets
from sentinel.errors import ConfigError
from sentinel.record import Kind
from sentinel.trace import Trace


class Requests:
    """Keeps the requests that stand, in the order in which they came."""

    def __init__(self, on_changed: Callable[[], None]) -> None:
        """on_changed: called after each change."""
        self.all: list[Request] = []
        self._on_changed = on_changed

    @property
    def are_investigating(self) -> bool:
        """Whether a command looks into something: what it looks into is measured in whole steps. A trace only watches."""
        return any(one.command and one.kinds and not isinstance(one.copy, Trace) for one in self.all)

    @property
    def per_micro_step(self) -> bool:
        """Whether one asks that the rows of micro-steps stay apart."""
        return any(request.per_micro_step for request in self.all)

    @property
    def ask_for_structure(self) -> bool:
        """Whether one wants the structure of the model from the running step, or the next."""
        return any(request.is_structure for request in self.all)

    def name(self, kind: Kind) -> bool:
        """Whether one asks for this kind."""
        return any(kind in request.kinds for request in self.all)

    def enable(
        self,
        kinds: Iterable[str] | str,
        targets: Iterable[str] | str | None,
        *,
        per_micro_step: bool,
        for_steps: int | None,
        first_step: int,
        command: str = "",
        step_interval: int = 1,
        copy: Dump | Trace | None = None,
    ) -> Request:
        """Measure more, beginning with `first_step`; ConfigError on unknown kinds, broken targets, less than one step."""
        if for_steps is not None and for_steps < 1:
            raise ConfigError(f"enable: for_steps must be at least 1, got {for_steps}")
        request = Request(
            kinds=parse_kinds(kinds),
            targets=parse_targets(targets),
            per_micro_step=per_micro_step,
            ends_before=None if for_steps is None else first_step + for_steps,
            command=command,
            first_step=first_step,
            step_interval=step_interval,
            copy=copy,
        )
        self._keep([*self.all, request])
        return request

    def describe_structure(self, step: int | None, command: str = "") -> None:
        """Ask for the structure of the model as the forward of `step` shows it; None: as the next one does."""
        ends = None if step is None else step + 1
        self._keep([*self.all, Request(kinds=frozenset(), ends_before=ends, command=command, is_structure=True)])

    def forget_structure(self) -> None:
        """The structure is known."""
        self._keep([request for request in self.all if not request.is_structure])

    def withdraw(self, request: Request) -> None:
        """Forget one request."""
        self._keep([one for one in self.all if one is not request])

    def drop(self, command: str) -> bool:
        """Forget what a command asked for; True when there was something."""
        return self._keep([request for request in self.all if request.command != command])

    def take_out(self, kinds: frozenset[Kind], targets: tuple[str, ...]) -> bool:
        """Ask for these kinds no more; targets: only where a request has the same. True when anything changed."""
        left = [
            msgspec.structs.replace(one, kinds=one.kinds - kinds) if not targets or targets == one.targets else one
            for one in self.all
        ]
        return self._keep([request for request in left if request.kinds or request.is_structure])

    def expire(self, step: int) -> list[Request]:
        """Drop and return the requests that end before `step`."""
        ended = [one for one in self.all if one.ends_before is not None and step >= one.ends_before]
        self._keep([request for request in self.all if request not in ended])
        return ended

    def _keep(self, requests: list[Request]) -> bool:
        if requests == self.all:
            return False
        self.all = requests
        self._on_changed()
        return True
