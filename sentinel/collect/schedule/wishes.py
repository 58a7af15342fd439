"""What may be wished for: a part of the config, or a request of code or of a command; and when each is due."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from sentinel import known_words
from sentinel.errors import ConfigError
from sentinel.kinds import PARAMETER_KINDS
from sentinel.monitor_config import MEASURED_LABELS, ProbeSchedule
from sentinel.record import Kind
from sentinel.target import Target, nearest
from sentinel.trace import Trace

_GOLDEN = 2654435769
"""2**32 over the golden ratio: neighbours in the forward get turns that lie far apart, and every turn as many."""


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """How the tensors that a request measures are written as they are, besides."""

    first_n: int | None = None
    """Only the first so many elements of each dimension; None: all."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One wish to measure more, in every step while it stands, or every so many."""

    kinds: frozenset[Kind]
    targets: tuple[str, ...] = ()
    """Targets (`target.Target`) of modules and parameters; empty: all."""
    per_micro_step: bool = False
    ends_before: int | None = None
    """First step that no longer belongs to it."""
    command: str = ""
    """Id of the command it came from; empty: from code."""
    first_step: int = 0
    step_interval: int = 1
    copy: Dump | Trace | None = None
    """How copies of the tensors are taken besides; None: none are."""
    is_structure: bool = False
    """It asks for the structure of the model, and for no kind."""


class Wish:
    """Kinds that share a schedule: a part of the config, or a request (which has none: it is due while it stands)."""

    def __init__(
        self,
        kinds: frozenset[Kind],
        targets: Sequence[str],
        schedule: ProbeSchedule | None,
        request: Request | None = None,
        *,
        is_adjustable: bool = False,
    ) -> None:
        self.kinds = kinds
        self.is_adjustable = is_adjustable
        """Nobody said how often: what costs too much may be measured more rarely."""
        self.targets = tuple(Target.parse(text) for text in targets)
        self.schedule = schedule
        self.request = request
        self.num_collected = 0
        """Measured steps since this config came in force."""
        self.is_due = schedule is None
        self.is_open = schedule is None
        """It is due now, or will be at a later step by itself: its hooks stay where they are."""
        self.turn = 0
        """Of a staggered wish: which n-th of its tensors is measured."""
        self.stagger = 1 if schedule is None or schedule.stagger is None else schedule.stagger

    def decide(self, step: int, rank: int, is_enabled: bool) -> tuple[bool, bool]:
        """Return (is open, is due) at `step`."""
        one = self.schedule
        if one is None:
            if self.request is None or self.request.copy is None:
                return True, True
            since = step - self.request.first_step
            return since >= 0, since >= 0 and since % self.request.step_interval == 0
        since = step - (one.start_step or 0)
        is_over = one.collect_times is not None and self.num_collected >= one.collect_times
        if since < 0 or is_over or not is_enabled or (one.ranks and rank not in one.ranks):
            return False, False
        return True, since % (one.step_interval or 1) == 0

    def begin(self, step: int, rank: int, is_enabled: bool) -> None:
        """Decide for `step`, and count it."""
        self.is_open, self.is_due = self.decide(step, rank, is_enabled)
        self.num_collected += self.is_due
        if self.schedule is not None and self.stagger > 1:
            since = step - (self.schedule.start_step or 0)
            self.turn = since // (self.schedule.step_interval or 1) % self.stagger

    def kinds_without(self, gone: Collection[Kind]) -> frozenset[Kind]:
        """Return its kinds that still count; gone: kinds of the config that code has switched off."""
        return self.kinds if self.schedule is None else self.kinds.difference(gone)

    def measures(self, site_pos: int) -> bool:
        """Return whether it is this tensor's turn: alike on all ranks that hold a piece of it."""
        return self.stagger == 1 or ((site_pos * _GOLDEN & 0xFFFFFFFF) * self.stagger >> 32) == self.turn


def unmatched(wishes: Sequence[Wish], modules: Collection[str], parameters: Collection[str]) -> list[str]:
    """Return, for each target that means nothing here, a sentence that says so, with the nearest names."""
    found = []
    for wish in wishes:
        names = {*modules, *parameters} if wish.kinds & {*PARAMETER_KINDS, Kind.PRECISION} else modules
        for target in wish.targets:
            if Kind.COMM not in wish.kinds and not any(target.means((name,)) for name in names):
                near_by = nearest(target, [name for name in names if name])
                hint = f"; nearest: {', '.join(near_by)}" if near_by else ""
                found.append(f'target "{target.text}" matches no module{" or parameter" * (names is not modules)}{hint}')
    return list(dict.fromkeys(found))


def parse_kinds(kinds: Iterable[str] | str) -> frozenset[Kind]:
    """Return the kinds of these names; ConfigError with the nearest known name."""
    labels = [kinds] if isinstance(kinds, str) else list(kinds)
    for label in labels:
        if label not in MEASURED_LABELS:
            raise ConfigError(f"unknown kind {label!r}{known_words.nearest(label, MEASURED_LABELS)}")
    return frozenset(Kind.of(label) for label in labels)


def parse_targets(targets: Iterable[str] | str | None) -> tuple[str, ...]:
    """Return targets as a tuple; ConfigError for what is none."""
    listed = (targets,) if isinstance(targets, str) else tuple(targets or ())
    for target in listed:
        try:
            Target.parse(target)
        except ValueError as error:
            raise ConfigError(f"target {target!r}: {error}") from error
    return listed
