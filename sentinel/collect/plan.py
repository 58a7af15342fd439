"""What is measured in this step: what the config wants, and what code or commands have switched on for a while."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence

import msgspec

from sentinel.errors import ConfigError
from sentinel.monitor_config import MEASURED_LABELS, MODULE_KINDS, Measurement, near
from sentinel.record import Kind


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One wish to measure more, in every step while it stands."""

    kinds: frozenset[Kind]
    targets: tuple[str, ...] = ()
    """Globs of module names; empty: all."""
    per_micro_step: bool = False
    ends_before: int | None = None
    """First step that no longer belongs to it."""
    command: str = ""
    """Id of the command it came from; empty: from code."""


class Plan:
    """All wishes of now: the config's, due at its own steps, and requests, due at every step while they stand.

    `begin` decides for one step; hooks are changed only when it says so. rank: who we are, known only later.
    """

    def __init__(self, measurement: Measurement, text_hash: str = "", rank: Callable[[], int] = lambda: 0) -> None:
        self.requests: list[Request] = []
        self._rank = rank
        self._is_due = False
        """The running step is one of the config's."""
        self._takes_base = False
        """Hooks of the config's kinds are to be installed."""
        self.change(measurement, text_hash)

    def change(self, measurement: Measurement, text_hash: str) -> None:
        """Put another config in force from the next `begin` on: measured steps are counted anew, requests stand.

        An edit is the newest wish: what code had switched off of the former config is on again where this one asks for it.
        """
        self.measurement = measurement
        self.text_hash = text_hash
        self.num_collected = 0
        """Measured steps since this config came in force."""
        self._base = Request(
            kinds=frozenset(Kind.of(kind) for kind in measurement.kinds),
            targets=measurement.targets,
            per_micro_step=measurement.per_micro_step,
        )

    @property
    def is_due(self) -> bool:
        """Whether the running step is measured, beyond the black box."""
        return self._is_due or bool(self.requests)

    @property
    def is_exhausted(self) -> bool:
        """Whether the config's `collect_times` are over."""
        wanted = self.measurement.collect_times
        return wanted is not None and self.num_collected >= wanted

    @property
    def per_micro_step(self) -> bool:
        """Whether rows of micro-steps stay apart now."""
        return self._base.per_micro_step or any(request.per_micro_step for request in self.requests)

    def foresee(self, step: int) -> None:
        """Decide what hooks the first step will need: a compiled model must have them before it is called."""
        self._takes_base, self._is_due = self._decide(step)

    def begin(self, step: int) -> bool:
        """Decide what `step` measures, and count it; True when hooks must change."""
        former = self._takes_base
        self._takes_base, self._is_due = self._decide(step)
        self.num_collected += self._is_due
        return former != self._takes_base

    def _decide(self, step: int) -> tuple[bool, bool]:
        wish = self.measurement
        since = step - wish.start_step
        if since < 0 or self.is_exhausted or not wish.includes(self._rank()):
            return False, False
        is_due = since % wish.step_interval == 0
        # Hooks that wait for the config's next step stay where they are, unless a request measures the steps between.
        return is_due or not self.requests, is_due

    def takes(self, kind: Kind) -> bool:
        """Whether anybody wants this kind anywhere in the running step."""
        return (self._is_due and kind in self._base.kinds) or any(kind in request.kinds for request in self.requests)

    def wanted(self, module: str, names: Sequence[str] = ()) -> frozenset[Kind]:
        """Return the module kinds to take at a module, known by its local name (and canonical ones)."""
        found: set[Kind] = set()
        for request in (self._base, *self.requests) if self._takes_base else self.requests:
            if matches((module, *names), request.targets):
                found |= request.kinds
        return frozenset(found.intersection(MODULE_KINDS))

    def enable(
        self,
        kinds: Iterable[str] | str,
        targets: Iterable[str] | str | None,
        *,
        per_micro_step: bool,
        for_steps: int | None,
        first_step: int,
        command: str = "",
    ) -> Request:
        """Measure more, beginning with `first_step`; ConfigError on unknown kinds and on less than one step."""
        if for_steps is not None and for_steps < 1:
            raise ConfigError(f"enable: for_steps must be at least 1, got {for_steps}")
        request = Request(
            kinds=parse_kinds(kinds),
            targets=(targets,) if isinstance(targets, str) else tuple(targets or ()),
            per_micro_step=per_micro_step,
            ends_before=None if for_steps is None else first_step + for_steps,
            command=command,
        )
        self.requests.append(request)
        self._takes_base &= self._is_due
        return request

    def drop(self, command: str) -> bool:
        """Forget what a command asked for; True when there was something."""
        before = len(self.requests)
        self.requests = [request for request in self.requests if request.command != command]
        return len(self.requests) < before

    def disable(self, kinds: Iterable[Kind], targets: tuple[str, ...], from_code: bool) -> bool:
        """Switch kinds off (all of them when none is named); True when anything changed.

        What the config itself asks for is switched off only from code, until its file is edited.
        """
        gone = frozenset(kinds) or frozenset(Kind)
        before = (self._base, list(self.requests))
        self.requests = [
            msgspec.structs.replace(r, kinds=r.kinds - gone) if not targets or targets == r.targets else r
            for r in self.requests
        ]
        self.requests = [request for request in self.requests if request.kinds]
        if from_code and not targets:
            self._base = msgspec.structs.replace(self._base, kinds=self._base.kinds - gone)
        return before != (self._base, self.requests)

    def expire(self, step: int) -> list[Request]:
        """Drop and return the requests that end before `step`."""
        ended = [r for r in self.requests if r.ends_before is not None and step >= r.ends_before]
        if ended:
            self.requests = [request for request in self.requests if request not in ended]
        return ended


def parse_kinds(kinds: Iterable[str] | str) -> frozenset[Kind]:
    """Return the kinds of these names; ConfigError with the nearest known name."""
    labels = [kinds] if isinstance(kinds, str) else list(kinds)
    for label in labels:
        if label not in MEASURED_LABELS:
            raise ConfigError(f"unknown kind {label!r}{near(label, MEASURED_LABELS)}; known: {', '.join(MEASURED_LABELS)}")
    return frozenset(Kind.of(label) for label in labels)


def matches(names: Sequence[str], targets: Sequence[str]) -> bool:
    """Whether one of a module's names is meant: by itself, by a glob, or as part of a named module.

    `layers.1` means layers.1 and all inside it, never layers.10.
    """
    if not targets:
        return True
    return any(
        fnmatch.fnmatchcase(name, target) or fnmatch.fnmatchcase(name, target + ".*") for name in names for target in targets
    )
