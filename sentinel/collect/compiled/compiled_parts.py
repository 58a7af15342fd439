"""Finds the parts of a chunk that are to be compiled, before a graph is traced through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import nn

from sentinel.collect.compiled.capability import why_unusable
from sentinel.collect.compiled.graphs import CUDA_GRAPHS, TOO_LATE, compiled_parts, gate, is_inside

MAX_LOOKS = 4
"""Forwards, after each change of the taps, in which compiled parts are looked for; a bound on time. Too small: parts that
compile after the first forwards are missed."""


class PartTap(Protocol):
    """A tap inside a compiled part."""

    @property
    def is_asking(self) -> bool:
        """Whether any tensor of its module is measured."""
        ...

    has_passed: bool
    """Whether a call of its module was seen by its hooks."""


class CompiledParts:
    """Decides which modules keep their hooks for good, and reports parts that were compiled before they had any."""

    def __init__(self, modules: Mapping[str, nn.Module], blind: Callable[[str, str], None]) -> None:
        """modules: of the chunk, by name. blind: called with (code, message) of parts that are not measured."""
        self.names: list[str] = []
        """Of the outermost compiled modules; `""` is the whole chunk."""
        self._modules = modules
        self._report_blind = blind
        self._num_looks = 0
        """Forwards in which parts were looked for since the taps were changed."""

    def hold(self, name: str) -> bool:
        """Return whether a module is a compiled part or inside one."""
        return any(is_inside(name, part) for part in self.names)

    def look_again(self) -> None:
        """Look for compiled parts again in the next MAX_LOOKS forwards; called when the taps were changed."""
        self._num_looks = 0

    def forget(self) -> None:
        """Drop all parts: their hooks were removed."""
        self.names = []

    def find(self, *, is_whole: bool = False) -> list[str]:
        """Return the names of modules in compiled parts that were not known before; their hooks are to stay.

        is_whole: the chunk itself is being compiled; else [] after MAX_LOOKS looks.
        """
        if not is_whole and self._num_looks >= MAX_LOOKS:
            return []
        self._num_looks += 1
        parts = [""] if is_whole else compiled_parts(self._modules)
        fresh = [part for part in parts if not any(is_inside(part, known) for known in self.names)]
        if not fresh:
            return []
        problem = why_unusable()
        if gate.is_usable == bool(problem):
            gate.is_usable = not problem
        if problem:
            self._report_blind("compiled", f"{problem}: the inside of compiled modules is not measured")
            return []
        self.names += fresh
        return [name for name in self._modules if any(is_inside(name, part) for part in fresh)]

    def report_late_attach(self, taps: Mapping[str, PartTap]) -> None:
        """Report, after a whole forward, the parts compiled before attach: the module was called and no hook inside it
        ran."""
        blind = []
        for part in self.names:
            inner = [tap for name, tap in taps.items() if name != part and is_inside(name, part)]
            top = taps.get(part)
            was_called = not part or top is None or top.has_passed
            if any(tap.is_asking for tap in inner) and was_called and not any(tap.has_passed for tap in inner):
                blind.append(part or "the model")
        if blind:
            named = ", ".join(blind[:3]) + (f" and {len(blind) - 3} more" if len(blind) > 3 else "")
            self._report_blind("compiled_before_attach", TOO_LATE.format(named))

    def traced_for_cuda(self) -> None:
        """Report a graph that is traced to be replayed as a CUDA graph: replays call no hook and no op."""
        self._report_blind("cuda_graphs", CUDA_GRAPHS)
