"""What is measured at modules: the config's own wish, and what code or commands have switched on for a while."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import msgspec

from sentinel.errors import ConfigError
from sentinel.monitor_config import MEASURED, MODULE_KINDS, MonitorConfig, near
from sentinel.record import Kind

MEASURED_LABELS = tuple(kind.label for kind in MEASURED)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One wish to measure more."""

    kinds: frozenset[Kind]
    targets: tuple[str, ...] = ()
    """Globs of module names; empty: all."""
    per_micro_step: bool = False
    ends_before: int | None = None
    """First step that no longer belongs to it."""
    command: str = ""
    """Id of the command it came from; empty: from code."""


class Plan:
    """All wishes of now."""

    def __init__(self, config: MonitorConfig) -> None:
        self._base = Request(
            kinds=frozenset(Kind.of(kind) for kind in config.kinds),
            targets=config.targets,
            per_micro_step=config.per_micro_step,
        )
        self.requests: list[Request] = []

    @property
    def per_micro_step(self) -> bool:
        """Whether rows of micro-steps stay apart now."""
        return self._base.per_micro_step or any(request.per_micro_step for request in self.requests)

    def takes(self, kind: Kind) -> bool:
        """Whether anybody wants this kind anywhere."""
        return kind in self._base.kinds or any(kind in request.kinds for request in self.requests)

    def wanted(self, module: str, names: Sequence[str] = ()) -> frozenset[Kind]:
        """Return the module kinds to take at a module, known by its local name (and canonical ones)."""
        found: set[Kind] = set()
        for request in (self._base, *self.requests):
            if matches((module, *names), request.targets):
                found |= request.kinds
        return frozenset(found.intersection(MODULE_KINDS))

    def add(self, request: Request) -> None:
        """Measure more."""
        self.requests.append(request)

    def drop(self, command: str) -> bool:
        """Forget what a command asked for; True when there was something."""
        before = len(self.requests)
        self.requests = [request for request in self.requests if request.command != command]
        return len(self.requests) < before

    def disable(self, kinds: Iterable[Kind], targets: tuple[str, ...], from_code: bool) -> bool:
        """Switch kinds off (all of them when none is named); True when anything changed.

        What the config itself asks for is switched off only from code.
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
