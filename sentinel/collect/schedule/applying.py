"""Carries the plan out: hooks follow what is wanted, and targets that mean nothing are said."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.sites import Sites
from sentinel.collect.parallel.rank_place import RankPlace
from sentinel.collect.probes import Events
from sentinel.collect.rows.recording import Recording
from sentinel.collect.schedule.command_inbox import CommandInbox
from sentinel.collect.schedule.pacing import Pacing
from sentinel.collect.schedule.plan import Plan
from sentinel.collect.schedule.wishes import parse_kinds, parse_targets, unmatched
from sentinel.errors import ConfigError
from sentinel.place import strip_wrappers
from sentinel.record import Kind
from sentinel.target import resolve

ATTACH_S = 5.0
"""Seconds that looking up targets of the config, or of the trainer's own code, may take; a bound on time before training,
five times that of a command."""


class Planning:
    """Puts hooks on and takes them off, between steps or at the word of code."""

    def __init__(
        self,
        plan: Plan,
        inbox: CommandInbox,
        pacing: Pacing,
        sites: Sites,
        recording: Recording,
        chunks: list[Chunk],
        events: Events,
        place: RankPlace,
    ) -> None:
        """chunks: filled while the monitor is installed."""
        self.plan = plan
        self.inbox = inbox
        self._pacing = pacing
        self._sites = sites
        self._table = recording.table
        self._costs = recording.costs
        self._chunks = chunks
        self._events = events
        self._place = place
        self._report = recording.report
        inbox.names = self.names

    def names(self) -> set[str]:
        """Return the names that targets may mean: of modules and parameters, and of elements of what modules put out."""
        modules = (name for chunk in self._chunks for name in chunk.structure.modules)
        return {*modules, *[entry.name for entry in list(self._table.entries)]}

    def foresee(self, step: int) -> None:
        """Put on what the first step will need; ConfigError for a target that means nothing."""
        resolve(self.plan.config.measurement.all_targets(), self.names(), ATTACH_S)
        self._refuse_unmatched()
        self.plan.foresee(step)
        self.renew()

    def begin(self, step: int) -> bool:
        """Obey what is due and decide what `step` measures; True when hooks were changed for it."""
        self._pacing.begin(step, self._costs.clock())
        has_changed = bool(self.plan.requests.expire(step))
        has_changed |= self.inbox.apply(step)
        has_changed |= self.plan.begin(step)
        self._sites.begin_step()
        if has_changed:
            self.renew()
        return has_changed

    def step_ended(self) -> None:
        """Take in what the step that has ended has cost."""
        self._pacing.note(self._costs)

    def enable(
        self,
        kinds: Iterable[str] | str,
        targets: Iterable[str] | str | None,
        *,
        per_micro_step: bool,
        for_steps: int | None,
        first_step: int,
    ) -> None:
        """Measure more, at the word of code; ConfigError on unknown kinds, and on targets that mean nothing."""
        resolve(parse_targets(targets), self.names(), ATTACH_S)
        request = self.plan.requests.enable(
            kinds, targets, per_micro_step=per_micro_step, for_steps=for_steps, first_step=first_step
        )
        try:
            self._refuse_unmatched()
        except ConfigError:
            self.plan.requests.withdraw(request)
            raise
        self.renew()

    def disable(self, kinds: Iterable[str] | str | None, targets: Iterable[str] | str | None) -> None:
        """Measure less, at the word of code; None: everything but the black box goes."""
        gone = parse_kinds(kinds) if kinds is not None else frozenset(Kind)
        self.plan.disable(gone, parse_targets(targets), from_code=True)
        self.renew()

    def renew(self) -> None:
        """Make the hooks those that the plan asks for."""
        self._name_models()
        has_borders = self.plan.config.measurement.black_box or self.plan.wants(Kind.RESIDUAL)
        for chunk in self._chunks:
            chunk.plan(self._wanted_in(chunk), has_borders)
        self._sites.begin_step()
        self._events.planned()
        self._events.widen()
        self._table.is_changed = True  # Sites get new places in the next forward.

    def _name_models(self) -> None:
        self.plan.names.models = {chunk.vpp_stage: chunk.model for chunk in self._chunks if chunk.model}

    def _wanted_in(self, chunk: Chunk) -> Callable[[str], frozenset[Kind]]:
        return lambda name: self.plan.wanted(name, chunk.vpp_stage)

    def _refuse_unmatched(self) -> None:
        """Raise ConfigError for a target that means nothing in the model; on one stage of a pipeline it is only reported."""
        self._name_models()
        modules: set[str] = set()
        parameters: set[str] = set()
        for chunk in self._chunks:
            for name in chunk.structure.modules:
                modules.update(self.plan.names.of(name, chunk.vpp_stage))
            for name, _ in chunk.root.named_parameters():
                parameters.update(self.plan.names.of(strip_wrappers(name), chunk.vpp_stage))
        problems = unmatched(self.plan.wishes, modules, parameters)
        if problems and self._place.place.pp_size == 1:
            raise ConfigError("; ".join(problems))
        for problem in problems:
            self._report("no_target", f"{problem}; another stage may hold it", problem[:80])
