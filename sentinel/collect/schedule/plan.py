"""What is measured in this step: what the config wants, and what code or commands have switched on for a while."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.collect.schedule.config_wishes import ConfigWishes
from sentinel.collect.schedule.due_kinds import DueKinds
from sentinel.collect.schedule.requests import Requests
from sentinel.collect.schedule.target_names import TargetNames
from sentinel.collect.schedule.wishes import Request, Wish
from sentinel.kinds import CARRIERS, MODULE_KINDS
from sentinel.monitor_config import Measurement
from sentinel.record import Kind
from sentinel.target import means


class Plan:
    """Answers what a step measures, from all wishes of now: the config's, due at their own steps, and requests, due at
    every step while they stand.

    `begin` decides for one step; hooks are changed only when it says so. rank: who we are, known only later.
    """

    def __init__(self, measurement: Measurement, text_hash: str = "", rank: Callable[[], int] = lambda: 0) -> None:
        self.config = ConfigWishes(measurement, text_hash)
        self.requests = Requests(self._renew)
        self.names = TargetNames()
        self.wishes: list[Wish] = []
        """The config's, and those of the requests that stand."""
        self.generation = 0
        """Changes with every change of what is wanted; not with the steps."""
        self.intervals: dict[Kind, int] = {}
        """Kind -> steps from one that measures it to the next, a power of two, where its cost lengthened it (pacing.py)."""
        self.is_fresh = False
        """Something is amiss on this rank: these intervals are not heeded for now."""
        self.left_out: frozenset[Kind] = frozenset()
        """Kinds that the running step does not measure because of them."""
        self.copying: Sequence[Request] = ()
        """Requests that take copies of tensors of the running step."""
        self._rank = rank
        self._step = 0
        """The running step, or the one that comes next."""
        self._taken_in: frozenset[Kind] = frozenset()
        """Kinds that the running step measures after all."""
        self._sums = DueKinds()
        self._due: frozenset[int] = frozenset()
        """Kinds of which the running step measures some tensors, or all."""
        self._whole: frozenset[int] = frozenset()
        """Kinds of which the running step measures all tensors."""
        self._renew()

    # -- changing what is wanted -------------------------------------------------------------------------------------

    def change(self, measurement: Measurement, text_hash: str) -> None:
        """Put another config in force from the next `begin` on; requests stand."""
        self.config.put_in_force(measurement, text_hash)
        self.intervals = {}
        self._renew()

    def disable(self, kinds: Iterable[Kind], targets: tuple[str, ...], from_code: bool) -> bool:
        """Switch kinds off (all of them when none is named); True when anything changed.

        What the config itself asks for is switched off only from code, until its file is edited.
        """
        gone = frozenset(kinds) or frozenset(Kind)
        was_on = from_code and not targets and self.config.switch_off(gone)
        has_changed = self.requests.take_out(gone, targets)
        self._renew()
        return was_on or has_changed

    def _renew(self) -> None:
        asked = [Wish(request.kinds, request.targets, None, request) for request in self.requests.all]
        for wish in asked:
            wish.is_open, wish.is_due = wish.decide(self._step, self._rank(), True)
        self.wishes = [*self.config.all, *asked]
        self.generation += 1
        self._sums.forget()
        self._sum_up()

    # -- deciding for a step -----------------------------------------------------------------------------------------

    def foresee(self, step: int) -> None:
        """Decide what hooks the first step will need: a compiled model must have them before it is called."""
        self._step = step
        for wish in self.wishes:
            wish.is_open, wish.is_due = wish.decide(step, self._rank(), self.config.measurement.enabled)
        self._sum_up()

    def begin(self, step: int) -> bool:
        """Decide what `step` measures, and count it; True when hooks must change."""
        self._step, self._taken_in = step, frozenset()
        former = [wish.is_open for wish in self.wishes]
        for wish in self.wishes:
            wish.begin(step, self._rank(), self.config.measurement.enabled)
        self._sum_up()
        return former != [wish.is_open for wish in self.wishes]

    def take_in(self, kinds: Collection[Kind]) -> bool:
        """Measure kinds in the running step after all that were left out of it; False: none of them was."""
        if self.left_out.isdisjoint(kinds):
            return False
        self._taken_in = frozenset(kinds)
        self._sum_up()
        return True

    def _sum_up(self) -> None:
        """Note what most tensors need not be asked one by one."""
        rare = [kind for kind, every in self.intervals.items() if self._step % every and kind not in self._taken_in]
        if self.is_fresh or self.requests.are_investigating:
            rare = []  # What a command looks into is looked at in whole steps.
        self._due, self._whole, self.left_out, self.copying = self._sums.of(self.wishes, self.config.gone, rare)

    # -- what the running step measures ------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the running step is measured, beyond the black box."""
        return bool(self._due) or any(wish.is_due and wish.schedule is None for wish in self.wishes)

    @property
    def per_micro_step(self) -> bool:
        """Whether rows of micro-steps stay apart now."""
        return self.config.measurement.per_micro_step or self.requests.per_micro_step

    def takes(self, kind: Kind) -> bool:
        """Whether anybody wants this kind anywhere in the running step."""
        return int(kind) in self._due

    def takes_whole(self, kind: Kind) -> bool:
        """Whether the running step measures every tensor of this kind."""
        return int(kind) in self._whole

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
            names = self.names.of(name, entry.chunk)
            wishes = entry.wishes[asked] = [wish for wish in self.wishes_of(Kind(asked)) if means(wish.targets, names, path)]
        return any(wish.is_due and wish.measures(entry.site_pos) for wish in wishes)

    def due(self, kind: Kind) -> list[Wish]:
        """Return the wishes for a kind that the running step fulfils."""
        return [wish for wish in self.wishes_of(kind) if wish.is_due] if self.takes(kind) else []

    # -- what hooks are needed for -----------------------------------------------------------------------------------

    def wishes_of(self, kind: Kind) -> list[Wish]:
        """Return all wishes for a kind, due now or not; good until `generation` changes."""
        return [wish for wish in self.wishes if kind in wish.kinds_without(self.config.gone)]

    def wants(self, kind: Kind) -> bool:
        """Whether anybody wants this kind anywhere, in this step or by itself in a later one: its hooks are needed."""
        is_gone = kind in self.config.gone and not self.requests.name(kind)
        return any(wish.is_open and kind in wish.kinds for wish in self.wishes) and not is_gone

    def wants_at(self, kind: Kind, name: str, chunk: int) -> bool:
        """Whether anybody wants this kind at a module or parameter, in this step or by itself in a later one."""
        names = self.names.of(name, chunk)
        return any(wish.is_open and means(wish.targets, names) for wish in self.wishes_of(kind))

    def wanted(self, module: str, chunk: int = 0) -> frozenset[Kind]:
        """Return the module kinds to take at a module of a chunk, known by its local name."""
        names = self.names.of(module, chunk)
        found: set[Kind] = set()
        for wish in self.wishes:
            if wish.is_open and means(wish.targets, names):
                kinds = wish.kinds_without(self.config.gone)
                found |= kinds.union(*(CARRIERS.get(kind, ()) for kind in kinds))
        return frozenset(found.intersection(MODULE_KINDS))
