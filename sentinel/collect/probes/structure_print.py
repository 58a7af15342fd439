"""The structure of the model as one training forward shows it: what each module takes and gives, and who calls it.

Hooks on every module for the forwards of one step, then none. Shapes are read, values are not; a thread writes the file.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.parallel.placements import is_dtensor, local_of
from sentinel.collect.probes.call_sites import CallSites
from sentinel.collect.probes.context import ProbeContext
from sentinel.place import strip_wrappers
from sentinel.structure_file import ChunkShown, ModuleShown, Shown, StructureFile, structure_path, write_structure

MAX_FRAMES = 24
"""Most frames of a call stack; a bound on the size of the file, which has a stack for each module."""
MAX_ITEMS = 64
"""Most elements of a list or mapping that are shown; a bound on the size of the file."""
MAX_NESTING = 6
"""Deepest nesting of inputs and outputs that is shown; a bound on the size of the file and on recursion."""


class StructurePrint:
    """Records the structure during one step when the plan asks for it, and writes it to a file."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._plan = context.plan
        self._sites = CallSites()
        self._handles: list[RemovableHandle] = []
        self._shown: dict[int, dict[str, ModuleShown]] = {}
        """Position of a chunk -> name of a module -> what its first call showed."""
        self._calls: dict[tuple[int, str], int] = {}
        self._writers: list[threading.Thread] = []
        if context.config.struct:
            self._plan.requests.describe_structure(None)
        events = context.events
        events.planned.subscribe("structure", self._planned)
        events.ending.subscribe("structure", self._end)
        events.rewound.subscribe("structure", self._rewind)
        events.removed.subscribe("structure", self._remove)

    def _planned(self) -> None:
        if self._plan.requests.ask_for_structure and not self._handles:
            for at, chunk in enumerate(self._context.chunks):
                for name, module in chunk.structure.modules.items():
                    look = functools.partial(self._look, at, name, weakref.ref(module))
                    self._handles.append(self._context.watch("structure", chunk, name, module, look))
        elif not self._plan.requests.ask_for_structure:
            self._off()

    def _off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._shown, self._calls = [], {}, {}

    def _remove(self) -> None:
        self._off()
        for thread in self._writers:
            thread.join(2.0)

    def _rewind(self, chunk: Chunk) -> None:
        """A forward raised: the next one shows the structure."""
        at = next((at for at, one in enumerate(self._context.chunks) if one is chunk), -1)
        self._shown.pop(at, None)
        self._calls = {key: number for key, number in self._calls.items() if key[0] != at}

    def _look(
        self, at: int, name: str, ref: weakref.ref[nn.Module], args: Any, kwargs: Any, output: Any, micro_step: int
    ) -> None:
        number = self._calls.get((at, name), 0)
        self._calls[at, name] = number + 1
        module = ref()
        if number or module is None:
            return
        self._shown.setdefault(at, {})[name] = ModuleShown(
            name=name, kind=_class_of(module), inputs=tuple(_shown(one) for one in args),
            keywords={key: _shown(one) for key, one in kwargs.items()}, output=_shown(output),
            called_from=tuple(f"{site} {site.function}" for site in self._sites.stack(MAX_FRAMES)),
            place_in_forward=sum(len(shown) for shown in self._shown.values()),
        )  # fmt: skip

    def _end(self) -> None:
        """Write what the step has shown, once; a step without a forward is waited out."""
        if not self._handles or not self._shown:
            return
        context, chunks = self._context, []
        for at, chunk in enumerate(context.chunks):
            shown = self._shown.get(at, {})
            modules = []
            for name, module in chunk.structure.modules.items():
                # A module that was not called (inside a compiled graph, of another branch) is there without shapes.
                one = shown.get(name) or ModuleShown(name=name, kind=_class_of(module))
                calls = self._calls.get((at, name), 0)
                modules.append(msgspec.structs.replace(one, num_calls=calls, parameters=_parameters_of(module)))
            chunks.append(ChunkShown(vpp_stage=chunk.vpp_stage, depth=chunk.depth, modules=tuple(modules)))
        place, attempt = context.place(), context.attempt
        file = StructureFile(
            run=attempt.run, attempt=attempt.attempt, rank=place.rank, step=context.step(), place=place, chunks=tuple(chunks)
        )
        self._plan.requests.forget_structure()
        self._off()
        path = structure_path(attempt.directory, place.rank)
        thread = threading.Thread(target=self._write, args=(path, file), name="sentinel-struct", daemon=True)
        self._writers = [one for one in self._writers if one.is_alive()] + [thread]
        thread.start()

    def _write(self, path: Any, file: StructureFile) -> None:
        try:
            write_structure(path, file)
        except OSError as error:
            self._context.recording.report("structure_failed", f"{path}: {error.strerror or error}", "structure")


def _class_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _parameters_of(module: nn.Module) -> dict[str, Shown]:
    """Return a module's own parameters and buffers, by name."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {strip_wrappers(name): _shown(tensor) for name, tensor in own}


def _shown(value: Any, nesting: int = 0) -> Shown:
    """Return the shape, dtype or type of a value, without reading a tensor: no wait, no copy, and no text of the data."""
    if isinstance(value, torch.Tensor):
        return _tensor_shown(value)
    kind = type(value).__qualname__
    if value is None or isinstance(value, (bool, int, float)):
        return Shown(kind=kind, value=repr(value)[:40])
    items: list[tuple[str, Any]] | None = None
    if isinstance(value, Mapping):
        items = [(str(key)[:64], one) for key, one in value.items()]
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None) or range(len(value))
        items = [(str(name), one) for name, one in zip(names, value, strict=True)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if items is None or nesting >= MAX_NESTING:
        return Shown(kind=kind)
    return Shown(kind=kind, num_items=len(items), items={name: _shown(one, nesting + 1) for name, one in items[:MAX_ITEMS]})


def _tensor_shown(tensor: torch.Tensor) -> Shown:
    local = local_of(tensor)
    placed = is_dtensor(tensor)
    return Shown(
        kind=type(tensor).__name__, shape=tuple(int(size) for size in tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."), device=str(tensor.device), requires_grad=tensor.requires_grad,
        local_shape=tuple(int(size) for size in local.shape) if placed else None,
        placements=tuple(str(one) for one in tensor.placements) if placed else (),  # type: ignore[attr-defined]
    )  # fmt: skip
