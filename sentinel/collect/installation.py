"""Installs and removes the hooks of a monitor on models, optimizers and torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.parameters import WatchedParameters
from sentinel.collect.hooks.recorder import Recorder
from sentinel.collect.hooks.structure import read_structure, unwrap
from sentinel.collect.parallel.locator import Locator
from sentinel.collect.probes.context import Events
from sentinel.collect.schedule.applying import Planning
from sentinel.collect.step import Boundary
from sentinel.collect.training_passes import TrainingPasses


class TorchWatch(Protocol):
    """Something that is replaced in torch while a monitor lives."""

    def install(self) -> object: ...

    def remove(self) -> None: ...


class Installation:
    """All hooks of one monitor: first everything is put on, at the end everything is taken off."""

    def __init__(
        self,
        chunks: list[Chunk],
        recorder: Recorder,
        passes: TrainingPasses,
        locator: Locator,
        planning: Planning,
        parameters: WatchedParameters,
        boundary: Boundary,
        events: Events,
        watches: Sequence[TorchWatch],
        probes: Sequence[object],
    ) -> None:
        """chunks: filled here; the parts that look at them have the same list. probes: kept alive here."""
        self.chunks = chunks
        self.probes = probes
        self._recorder = recorder
        self._passes = passes
        self._locator = locator
        self._planning = planning
        self._parameters = parameters
        self._boundary = boundary
        self._events = events
        self._watches = watches

    def install(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any] | Mapping[str, Any], blocks: Sequence[str], step: int
    ) -> None:
        """Find the rank's place in the parallel layout, and put every hook on; after an exception `remove` takes them off.

        optimizers: may have names, for people. blocks: as `MonitorConfig.blocks`. step: the one that comes next. ConfigError
        for a target that means nothing.
        """
        self._locator.locate()
        for position, model in enumerate(models):
            root = unwrap(model)
            vpp_stage = self._locator.place.vpp_stage(model, position)
            chunk = Chunk(self._recorder, self._passes, root, read_structure(root, blocks), vpp_stage)
            self.chunks.append(chunk)
            chunk.install()
        self._locator.place.set_depths(self.chunks)
        self._planning.foresee(step)
        self._parameters.refresh(self.chunks)
        zeroed: dict[int, nn.Module] = {id(m): m for model in models for m in (model, unwrap(model))}
        self._boundary.watch(optimizers, list(zeroed.values()))
        if not optimizers:
            self._boundary.hooks.adopt(one.param for one in self._parameters.all)
        for watch in self._watches:
            watch.install()

    def remove(self) -> None:
        """Take every hook off: models, optimizers and torch are as before."""
        self._boundary.hooks.remove()
        self._events.removed()
        for watch in self._watches:
            watch.remove()
        for chunk in self.chunks:
            chunk.remove()
