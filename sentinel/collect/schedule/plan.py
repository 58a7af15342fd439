"""What is measured in this step: what the config wants, and what code or commands have switched on for a while."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

import msgspec

from sentinel import known_words
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.errors import ConfigError
from sentinel.kinds import CARRIERS, MODULE_KINDS, PARAMETER_KINDS
from sentinel.monitor_config import MEASURED_LABELS, Measurement, ProbeSchedule
from sentinel.record import Kind
from sentinel.target import Target, means, nearest

NOT_ADJUSTABLE = frozenset({Kind.RESIDUAL, Kind.COMM})
"""Kinds that are measured as their schedule says whatever they cost: rows of the black box, and calls whose two ends are
compared."""

_Sum: TypeAlias = tuple[frozenset[int], frozenset[int], frozenset[Kind], list["Request"]]
"""Kinds that are due, those of which every tensor is, those left out, and requests for a dump."""
MAX_SUMS = 64
"""Sums that are kept (chosen)."""

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
    dump: Dump | None = None
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
            if self.request is None or self.request.dump is None:
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

    def measures(self, site_pos: int) -> bool:
        """Return whether it is this tensor's turn: alike on all ranks that hold a piece of it."""
        return self.stagger == 1 or ((site_pos * _GOLDEN & 0xFFFFFFFF) * self.stagger >> 32) == self.turn


class Plan:
    """All wishes of now: the config's, due at their own steps, and requests, due at every step while they stand.

    `begin` decides for one step; hooks are changed only when it says so. rank: who we are, known only later.
    """

    def __init__(self, measurement: Measurement, text_hash: str = "", rank: Callable[[], int] = lambda: 0) -> None:
        self.requests: list[Request] = []
        self._rank = rank
        self._gone: frozenset[Kind] = frozenset()
        """Kinds of the config that code has switched off."""
        self._config: list[Wish] = []
        self._wishes: list[Wish] = []
        self._step = 0
        """The running step, or the one that comes next."""
        self._dumping: list[Request] = []
        self._sums: dict[tuple[int, ...], _Sum] = {}
        """Which wishes are due, and what is left out -> what `_sum_up` found then: there are few such sets of steps."""
        self.models: dict[int, str] = {}
        """Number of a chunk -> which of several models it belongs to."""
        self._due: frozenset[int] = frozenset()
        """Kinds of which the running step measures some tensors, or all."""
        self._whole: frozenset[int] = frozenset()
        """Kinds of which the running step measures all tensors."""
        self.intervals: dict[Kind, int] = {}
        """Kind -> steps from one that measures it to the next, a power of two, where its cost lengthened it (pacing.py)."""
        self.is_fresh = False
        """Something is amiss on this rank: these intervals are not heeded for now."""
        self._taken_in: frozenset[Kind] = frozenset()
        self.left_out: frozenset[Kind] = frozenset()
        """Kinds that the running step does not measure because of them."""
        self.generation = 0
        """Changes with every change of what is wanted; not with the steps."""
        self.change(measurement, text_hash)

    def change(self, measurement: Measurement, text_hash: str) -> None:
        """Put another config in force from the next `begin` on: measured steps are counted anew, requests stand.

        An edit is the newest wish: what code had switched off of the former config is on again where this one asks for it.
        """
        self.measurement = measurement
        self.text_hash = text_hash
        self._gone = frozenset()
        schedules: dict[tuple[ProbeSchedule, bool, bool], set[Kind]] = {}
        for label in dict.fromkeys((*measurement.kinds, *measurement.probes)):
            schedule, kind = measurement.schedule_of(label), Kind.of(label)
            is_free = measurement.is_interval_free(label) and kind not in NOT_ADJUSTABLE
            schedules.setdefault((schedule, label in measurement.probes, is_free), set()).add(kind)
        self._config = [
            Wish(frozenset(kinds), one.targets or (), one, is_adjustable=is_free)
            for (one, _, is_free), kinds in schedules.items()
        ]
        self.intervals = {}
        self._renew()

    def _renew(self) -> None:
        asked = [Wish(r.kinds, r.targets, None, r) for r in self.requests]
        for wish in asked:
            wish.is_open, wish.is_due = wish.decide(self._step, self._rank(), True)
        self._wishes = [*self._config, *asked]
        self.generation += 1
        self._sums = {}
        self._sum_up()

    def _sum_up(self) -> None:
        """Note what most tensors need not be asked one by one."""
        rare = [kind for kind, every in self.intervals.items() if self._step % every and kind not in self._taken_in]
        if self.is_fresh or any(request.command and request.kinds for request in self.requests):
            rare = []  # What a command looks into is looked at in whole steps.
        key = (*(wish.is_due for wish in self._wishes), *rare)
        if key not in self._sums:
            if len(self._sums) >= MAX_SUMS:
                self._sums = {}
            self._sums[key] = self._sum_of(rare)
        self._due, self._whole, self.left_out, self._dumping = self._sums[key]

    def _sum_of(self, rare: list[Kind]) -> _Sum:
        due: set[Kind] = set()
        whole: set[Kind] = set()
        left_out: set[Kind] = set()
        for wish in self._wishes:
            if wish.is_due:
                kinds = wish.kinds if wish.schedule is None else wish.kinds - self._gone
                if wish.is_adjustable and rare:
                    left_out |= kinds.intersection(rare)
                    kinds = kinds.difference(rare)
                due |= kinds
                whole |= kinds if wish.stagger == 1 and not wish.targets else frozenset()
        asked = [wish.request for wish in self._wishes if wish.is_due and wish.request is not None]
        dumping = [request for request in asked if request.dump is not None]
        return frozenset(map(int, due)), frozenset(map(int, whole)), frozenset(left_out - due), dumping

    @property
    def is_due(self) -> bool:
        """Whether the running step is measured, beyond the black box."""
        return bool(self._due) or any(wish.is_due and wish.schedule is None for wish in self._wishes)

    @property
    def adjustable(self) -> list[Kind]:
        """Kinds of the config whose interval nobody set."""
        return [kind for wish in self._config if wish.is_adjustable and wish.is_open for kind in wish.kinds - self._gone]

    @property
    def is_default(self) -> bool:
        """Whether the config leaves it to Sentinel what is measured."""
        return self.measurement.kinds == Measurement().kinds and not self.measurement.probes

    def take_in(self, kinds: Collection[Kind]) -> bool:
        """Measure kinds in the running step after all that were left out of it; False: none of them was."""
        if self.left_out.isdisjoint(kinds):
            return False
        self._taken_in = frozenset(kinds)
        self._sum_up()
        return True

    @property
    def is_exhausted(self) -> bool:
        """Whether the `collect_times` of everything that the config names are over."""
        return bool(self._config) and all(
            wish.schedule is not None
            and wish.schedule.collect_times is not None
            and wish.num_collected >= wish.schedule.collect_times
            for wish in self._config
        )

    @property
    def num_collected(self) -> int:
        """Measured steps since the config came in force, of the kind that has most."""
        return max((wish.num_collected for wish in self._config), default=0)

    @property
    def per_micro_step(self) -> bool:
        """Whether rows of micro-steps stay apart now."""
        return self.measurement.per_micro_step or any(request.per_micro_step for request in self.requests)

    def schedule_of(self, kind: Kind) -> ProbeSchedule:
        """Return what the config says of a kind."""
        return self.measurement.schedule_of(kind.label)

    def foresee(self, step: int) -> None:
        """Decide what hooks the first step will need: a compiled model must have them before it is called."""
        self._step = step
        for wish in self._wishes:
            wish.is_open, wish.is_due = wish.decide(step, self._rank(), self.measurement.enabled)
        self._sum_up()

    def begin(self, step: int) -> bool:
        """Decide what `step` measures, and count it; True when hooks must change."""
        self._step, self._taken_in = step, frozenset()
        former = [wish.is_open for wish in self._wishes]
        for wish in self._wishes:
            wish.begin(step, self._rank(), self.measurement.enabled)
        self._sum_up()
        return former != [wish.is_open for wish in self._wishes]

    def takes(self, kind: Kind) -> bool:
        """Whether anybody wants this kind anywhere in the running step."""
        return int(kind) in self._due

    def takes_whole(self, kind: Kind) -> bool:
        """Whether the running step measures every tensor of this kind."""
        return int(kind) in self._whole

    def wants(self, kind: Kind) -> bool:
        """Whether anybody wants this kind anywhere, in this step or by itself in a later one: its hooks are needed."""
        return any(wish.is_open and kind in wish.kinds for wish in self._wishes) and not self._is_gone(kind)

    def wants_at(self, kind: Kind, name: str, chunk: int) -> bool:
        """Whether anybody wants this kind at a module or parameter, in this step or by itself in a later one."""
        names = self.names_of(name, chunk)
        return any(wish.is_open and kind in wish.kinds and means(wish.targets, names) for wish in self._of(kind))

    def measures(self, entry: TensorEntry, kind: Kind | None = None) -> bool:
        """Whether the running step measures this tensor, as what it is, or as `kind`."""
        asked = entry.kind if kind is None else int(kind)
        if asked in self._whole or asked not in self._due:
            return asked in self._whole
        if entry.plan_generation != self.generation:
            entry.plan_generation, entry.wishes = self.generation, {}
        wishes: list[Wish] | None = entry.wishes.get(asked)
        if wishes is None:
            name, _, path = entry.name.partition(":")
            names = self.names_of(name, entry.chunk)
            wishes = entry.wishes[asked] = [
                wish for wish in self._of(Kind(asked)) if asked in wish.kinds and means(wish.targets, names, path)
            ]
        return any(wish.is_due and wish.measures(entry.site_pos) for wish in wishes)

    def names_of(self, name: str, chunk: int) -> tuple[str, ...]:
        """Return how targets may name a module or parameter of a chunk: of several models also with the model's name."""
        model = self.models.get(chunk)
        return (name, f"{model}.{name}" if name else model) if model else (name,)

    def wanted(self, module: str, chunk: int = 0) -> frozenset[Kind]:
        """Return the module kinds to take at a module of a chunk, known by its local name."""
        names = self.names_of(module, chunk)
        found: set[Kind] = set()
        for wish in self._wishes:
            if wish.is_open and means(wish.targets, names):
                kinds = wish.kinds if wish.schedule is None else wish.kinds - self._gone
                found |= kinds.union(*(CARRIERS.get(kind, ()) for kind in kinds))
        return frozenset(found.intersection(MODULE_KINDS))

    def _is_gone(self, kind: Kind) -> bool:
        return kind in self._gone and not any(kind in request.kinds for request in self.requests)

    def _of(self, kind: Kind) -> list[Wish]:
        """Return the wishes that still count for a kind."""
        return [wish for wish in self._wishes if wish.schedule is None or kind not in self._gone]

    def wishes_of(self, kind: Kind) -> list[Wish]:
        """Return all wishes for a kind, due now or not; good until `generation` changes."""
        return [wish for wish in self._of(kind) if kind in wish.kinds]

    def due(self, kind: Kind) -> list[Wish]:
        """Return the wishes for a kind that the running step fulfils."""
        return [wish for wish in self.wishes_of(kind) if wish.is_due] if self.takes(kind) else []

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
        dump: Dump | None = None,
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
            dump=dump,
        )
        self.requests.append(request)
        self._renew()
        return request

    def describe_structure(self, step: int | None, command: str = "") -> None:
        """Ask for the structure of the model as the forward of `step` shows it; None: as the next one does."""
        ends = None if step is None else step + 1
        self.requests.append(Request(kinds=frozenset(), ends_before=ends, command=command, is_structure=True))
        self._renew()

    def forget_structure(self) -> None:
        """The structure is known."""
        self._keep([request for request in self.requests if not request.is_structure])

    @property
    def asks_for_structure(self) -> bool:
        """Whether somebody wants the structure of the model from the running step, or the next."""
        return any(request.is_structure for request in self.requests)

    def dumps(self, entry: TensorEntry) -> list[Request]:
        """Return the requests that want this tensor as it is, in the running step."""
        if not self.is_dumping:
            return []
        name, _, path = entry.name.partition(":")
        return [
            wish.request
            for wish in self._wishes
            if wish.is_due
            and wish.request is not None
            and wish.request.dump is not None
            and entry.kind in wish.kinds
            and means(wish.targets, self.names_of(name, entry.chunk), path)
        ]

    @property
    def is_dumping(self) -> bool:
        """Whether the running step dumps anything."""
        return bool(self._dumping)

    def dumping(self) -> list[Request]:
        """Return the requests that dump in the running step."""
        return self._dumping

    @property
    def may_dump(self) -> bool:
        """Whether a dump is asked for, in this step or by itself in a later one: tensors must be shown."""
        return any(wish.is_open and wish.request is not None and wish.request.dump is not None for wish in self._wishes)

    def withdraw(self, request: Request) -> None:
        """Forget one request."""
        self._keep([one for one in self.requests if one is not request])

    def drop(self, command: str) -> bool:
        """Forget what a command asked for; True when there was something."""
        return self._keep([request for request in self.requests if request.command != command])

    def disable(self, kinds: Iterable[Kind], targets: tuple[str, ...], from_code: bool) -> bool:
        """Switch kinds off (all of them when none is named); True when anything changed.

        What the config itself asks for is switched off only from code, until its file is edited.
        """
        gone = frozenset(kinds) or frozenset(Kind)
        before = (self._gone, self.requests)
        left = [
            msgspec.structs.replace(r, kinds=r.kinds - gone) if not targets or targets == r.targets else r
            for r in self.requests
        ]
        if from_code and not targets:
            self._gone |= gone
        self._keep([request for request in left if request.kinds or request.is_structure])
        self._renew()
        return before != (self._gone, self.requests)

    def expire(self, step: int) -> list[Request]:
        """Drop and return the requests that end before `step`."""
        ended = [r for r in self.requests if r.ends_before is not None and step >= r.ends_before]
        self._keep([request for request in self.requests if request not in ended])
        return ended

    def _keep(self, requests: list[Request]) -> bool:
        if requests == self.requests:
            return False
        self.requests = requests
        self._renew()
        return True

    def unmatched(self, modules: Collection[str], parameters: Collection[str]) -> list[str]:
        """Return, for each target that means nothing here, a sentence that says so, with the nearest names."""
        found = []
        for wish in self._wishes:
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
