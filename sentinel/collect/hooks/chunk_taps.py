"""The taps of a chunk's modules: put on where something is wanted, and taken off where nothing is any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sentinel.collect.compiled.compiled_parts import CompiledParts
from sentinel.collect.compiled.graphs import set_gate
from sentinel.collect.hooks.module_tap import ModuleTap
from sentinel.collect.hooks.structure import Border
from sentinel.record import Kind

if TYPE_CHECKING:
    from sentinel.collect.hooks.chunk import Chunk


class ChunkTaps:
    """Decides which modules of a chunk have a tap, and what the graphs of compiled parts are to hold."""

    def __init__(self, chunk: Chunk, compiled: CompiledParts) -> None:
        self.by_name: dict[str, ModuleTap] = {}
        self.own = ModuleTap(chunk, "", chunk.root)
        """The tap of the chunk itself, which its own hooks call."""
        self.wants_borders = self.wants_sites = False
        """What the graphs of compiled parts are to hold."""
        self._chunk = chunk
        self._compiled = compiled

    @property
    def has_own(self) -> bool:
        """Whether inputs or outputs of the chunk itself are measured."""
        return "" in self.by_name

    def plan(self, wanted: Callable[[str], frozenset[Kind]], black_box: bool) -> None:
        """Install, change or remove the taps of all modules.

        wanted: local name of a module -> kinds to measure there. black_box: whether borders are measured beside them.
        """
        borders: dict[str, list[Border]] = {}
        if black_box:
            for border in self._chunk.structure.borders:
                borders.setdefault(border.module, []).append(border)
        wants_sites = False
        self.wants_borders = black_box
        for name in self._chunk.structure.modules:
            kinds, mine = wanted(name), borders.get(name, [])
            tap = self.by_name.get(name)
            if tap is None:
                if not kinds and not mine and not self._compiled.hold(name):
                    continue
                tap = self._add(name)
            if not kinds and not mine and not tap.stays:
                self._remove(name)
                continue
            tap.configure(kinds, mine)
            wants_sites |= bool(kinds)
        self.wants_sites = wants_sites
        set_gate(self)

    def keep_hooks(self, names: Iterable[str]) -> None:
        """Put hooks on modules of compiled parts, for good: also while nothing of them is measured."""
        for name in names:
            tap = self.by_name.get(name) or self._add(name)
            tap.keep_hooks()

    def move_last(self) -> None:
        """Move all hooks behind those that users added later, which may replace inputs and outputs."""
        for tap in self.by_name.values():
            if tap.hooks is not None:
                tap.hooks.move_last()

    def after_whole_forward(self) -> None:
        """Called after the first whole forward of a plan: note which taps steps with the black box alone do not need."""
        for tap in self.by_name.values():
            tap.after_whole_forward()

    def flows(self) -> set[str]:
        """Return the names of modules without parameters, outside of blocks, whose outputs carry a gradient."""
        blocks = tuple(f"{block}." for block in self._chunk.structure.blocks)
        return {
            name
            for name, tap in self.by_name.items()
            if tap.has_gradient and not f"{name}.".startswith(blocks) and next(tap.module.parameters(), None) is None
        }

    def remove(self) -> None:
        """Take off the hooks of all modules."""
        for name in list(self.by_name):
            self._remove(name)
        self._compiled.forget()
        self.wants_borders = self.wants_sites = False
        set_gate()

    def _add(self, name: str) -> ModuleTap:
        module = self._chunk.structure.modules[name]
        stays = self._compiled.hold(name)
        tap = self.own if module is self._chunk.root else ModuleTap(self._chunk, name, module)
        tap.stays = stays
        self.by_name[name] = tap
        return tap

    def _remove(self, name: str) -> None:
        tap = self.by_name.pop(name)
        if tap.hooks is not None:
            tap.hooks.remove()
