"""What a probe is given: the instruments of the monitor, and the moments of a step at which it may work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.collect.attempt import RankAttempt
from sentinel.collect.hooks.backwards import in_backward
from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.failures import Guard
from sentinel.collect.hooks.parameters import WatchedParameters
from sentinel.collect.hooks.pickle_stub import stub_hook
from sentinel.collect.hooks.sites import Sites
from sentinel.collect.rows.recording import Look, Observer, Recording
from sentinel.collect.rows.tensor_table import TensorTable
from sentinel.collect.schedule.costs import OWN, Costs, kinds_of_probe
from sentinel.collect.schedule.plan import Plan
from sentinel.messages import Descriptor
from sentinel.monitor_config import MonitorConfig
from sentinel.place import Place
from sentinel.record import Kind

P = ParamSpec("P")


class Event(Generic[P]):
    """One moment of a step: calls its subscribers in order.

    An exception of one ends at the guard, under its probe's name.
    """

    def __init__(self, guard: Guard, costs: Costs) -> None:
        self._guard = guard
        self._costs = costs
        self._calls: list[tuple[str, Callable[P, None]]] = []
        self._all = self._calls

    def subscribe(self, name: str, call: Callable[P, None]) -> None:
        """Call `call` from now on. name: of the probe, for people."""
        self._all.append((name, call))

    def narrow(self, is_wanted: Callable[[str], bool]) -> None:
        """Call only the probes whose name `is_wanted` accepts, until `widen`."""
        self._calls = [one for one in self._all if is_wanted(one[0])]

    def widen(self) -> None:
        """Call every probe again."""
        self._calls = self._all

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        costs = self._costs
        former = costs.turn_to(OWN)
        for name, call in self._calls:
            if costs.is_on:
                costs.turn_to_probe(name)
            try:
                call(*args, **kwargs)
            except Exception as error:
                self._guard(name, error, probe=name)
        costs.turn_to(former)


class Events:
    """The moments at which probes are called, all on the training thread."""

    def __init__(self, guard: Guard, costs: Costs) -> None:
        self.planned: Event[[]] = Event(guard, costs)
        """The plan has changed: put hooks on or take them off (`Plan.wants`, `Plan.wants_at`). Between steps."""
        self.begun: Event[[]] = Event(guard, costs)
        """A step has begun and its parameters are measured; `Plan.takes` returns what is due in it."""
        self.updating: Event[[Any]] = Event(guard, costs)
        """An optimizer is about to step: gradients are read, and clipped. Not for one that is given a closure."""
        self.updated: Event[[Any]] = Event(guard, costs)
        """An optimizer has stepped."""
        self.ending: Event[[]] = Event(guard, costs)
        """The step is over: the last moment for rows of it."""
        self.rewound: Event[[Chunk]] = Event(guard, costs)
        """A training forward of the chunk raised: its rows are forgotten, and it may be tried again."""
        self.removed: Event[[]] = Event(guard, costs)
        """The monitor leaves: take off every hook."""
        self.is_wide = True
        """Pass every event to every probe again: the wanted kinds have changed."""

    @property
    def _of_steps(self) -> tuple[Event[[]], Event[[Any]], Event[[Any]], Event[[]], Event[[Chunk]]]:
        return self.begun, self.updating, self.updated, self.ending, self.rewound

    def widen(self) -> None:
        """Call every probe at every event, until the next step begins."""
        self.is_wide = True
        for event in self._of_steps:
            event.widen()

    def narrow(self, is_wanted: Callable[[Kind], bool]) -> None:
        """Call at the events of steps only probes with a kind that is wanted now, or may be in a later step by its
        schedule."""
        self.is_wide = False

        def works(name: str) -> bool:
            kinds = kinds_of_probe(name)
            return not kinds or any(is_wanted(kind) for kind in kinds)

        for event in self._of_steps:
            event.narrow(works)


@dataclasses.dataclass(frozen=True)
class ProbeContext:
    """The instruments. A probe decides by `plan`, describes tensors in `table`, and measures with `recording`."""

    recording: Recording
    """Measures tensors into rows of the running step."""
    table: TensorTable
    """Describes each tensor that may have rows, once; of Sentinel's own kinds."""
    sites: Sites
    """The tensors that pass the hooks of modules."""
    plan: Plan
    """Which kinds are due in this step, and which of them at which modules."""
    parameters: WatchedParameters
    """The parameters that are watched, with their optimizers."""
    chunks: list[Chunk]
    """The models of this rank, one for each virtual pipeline stage; one where there is no pipeline."""
    events: Events
    """The moments of a step: a probe subscribes to those at which it works."""
    guard: Guard
    """Where an exception ends that a probe catches itself; those that it raises end there by themselves."""
    place: Callable[[], Place]
    """Where this rank stands: its coordinate along each axis of parallelism."""
    step: Callable[[], int]
    """The number of the running step."""
    is_measuring: Callable[[], bool]
    """Whether a step runs that may be measured; tensors seen outside of one belong to no row."""
    log: Callable[[str, Any], None]
    """Note a scalar of the running step under a name: a number, or a 0-dim tensor, which is not waited for. Rules match it
    as `kind: scalar`; what the trainer logs under that name wins."""
    count: Callable[[dict[str, int]], None]
    """Count the tensors measured in this step: kind -> number (`EndStep.due`)."""
    config: MonitorConfig
    """As it was at attach; what may change while training is in the plan."""
    attempt: RankAttempt
    """The run, its directory, and the attempt."""
    descriptor: Callable[[], Descriptor]
    """Returns the descriptor of this rank, made anew: too slow for every step."""

    def modules(self) -> Iterator[tuple[Chunk, str, nn.Module]]:
        """Yield (chunk, name, module) of each module of this rank, outer ones first: what `watch` takes.

        Names are the trainer's own without those of wrappers; `""` is the chunk itself. On a pipeline each stage counts its
        layers from 0. To be asked when `events.planned` says so.
        """
        for chunk in self.chunks:
            for name, module in chunk.structure.modules.items():
                yield chunk, name, module

    def look_while(self, name: str, is_wanted: Callable[[], bool], look: Look) -> None:
        """Call `look` with every tensor that is measured, or passes a site, while it is wanted.

        name: of the probe. is_wanted: asked whenever the plan changes.
        """
        observers, mine = self.recording.observers, Observer(name, look)

        def leave() -> None:
            if mine in observers:
                observers.remove(mine)

        def planned() -> None:
            if not is_wanted():
                leave()
            elif mine not in observers:
                observers.append(mine)

        self.events.planned.subscribe(name, planned)
        self.events.removed.subscribe(name, leave)

    def watch(self, probe: str, chunk: Chunk, name: str, module: nn.Module, call: ForwardCall) -> RemovableHandle:
        """Call `call(args, kwargs, output, micro_step)` after each counted training forward of a module, without gradients.

        probe: its name, for people. `remove()` of what is returned ends it. Not in compiled graphs; not for recomputes,
        evaluation, shape inference, copies of the model; what it raises ends at the guard, under the probe's name.
        """
        watch = ForwardWatch(self, probe, chunk, name, module, call)
        # The chunk's own hook ends its forward: whoever watches the whole model comes before it.
        return module.register_forward_hook(watch, with_kwargs=True, prepend=module is chunk.root)


ForwardCall = Callable[[tuple[Any, ...], dict[str, Any], Any, int], None]


class ForwardWatch:
    """One forward hook of a probe. A copy of the module carries one that does nothing."""

    def __init__(
        self, context: ProbeContext, probe: str, chunk: Chunk, name: str, module: nn.Module, call: ForwardCall
    ) -> None:
        self._context = context
        self._probe = probe
        self._chunk = chunk
        self._name = name
        self._module = module
        self._call = call

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardWatch:
        return self

    def __reduce__(self) -> Any:
        return stub_hook()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        chunk = self._chunk
        if module is not self._module or not chunk.recorder.is_alive or torch.compiler.is_compiling():
            return
        if not chunk.in_forward or in_backward():
            return
        costs = self._context.recording.costs
        former = costs.turn_to_probe(self._probe)
        try:
            with torch.no_grad():
                self._call(args, kwargs, output, chunk.micro_step)
        except Exception as error:
            self._context.guard(self._name, error, probe=self._probe, given=(args, kwargs, output))
        finally:
            costs.turn_to(former)


Probe = Callable[[ProbeContext], object]
"""A class, as a rule, that is constructed with a ProbeContext and subscribes to the events that it needs."""
