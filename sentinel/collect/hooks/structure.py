"""The structure of a model chunk: names of its modules, its repeated blocks, and the borders of the black box."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence

import msgspec
from torch import nn

from sentinel.place import strip_wrappers

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
SMALL_SHARE = 0.2
"""A container with less than this share of the largest one's parameters is no stack of blocks. Too small: lists of heads
count as stacks; too large: an encoder beside a larger decoder does not."""


class Border(msgspec.Struct, frozen=True):
    """One border of the black box: the input or output of a module."""

    module: str
    is_input: bool
    label: str
    """chunk_input, block_input, block_output or chunk_output."""
    index: int
    """Position in forward order, 0-based."""


class Structure(msgspec.Struct, frozen=True):
    """How one chunk is built; all names local, wrapper prefixes stripped."""

    modules: dict[str, nn.Module]
    """Name to module, in order of registration; the chunk itself is `""`."""
    blocks: tuple[str, ...]
    segments: tuple[str, ...]
    """Segment i lies between border i and border i + 1."""
    borders: tuple[Border, ...]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DDP, FSDP1 and DataParallel wrappers; a compiled module is kept as it is."""
    while True:
        inner = module.__dict__.get("_modules", {})
        if isinstance(inner.get("_orig_mod"), _wrappers()):  # A wrapper that was compiled as a whole.
            module = inner["_orig_mod"]
            continue
        name = next((n for n in ("module", "_fsdp_wrapped_module") if set(inner) == {n}), None)
        if name is None or not isinstance(module, _wrappers()):
            return module
        child = inner[name]
        if not isinstance(child, nn.Module):
            return module
        module = child


def _wrappers() -> tuple[type[nn.Module], ...]:
    found: list[type[nn.Module]] = [nn.DataParallel, nn.parallel.DistributedDataParallel]
    try:
        from torch.distributed.fsdp import FullyShardedDataParallel

        found.append(FullyShardedDataParallel)
    except ImportError:
        pass
    return tuple(found)


def read_structure(root: nn.Module, block_globs: Sequence[str] = ()) -> Structure:
    """Return names, blocks, segments and borders of a chunk whose root is already unwrapped."""
    modules: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        modules.setdefault(strip_wrappers(name) if name else "", module)
    if block_globs:
        groups = [[n for n in modules if n and any(fnmatch.fnmatchcase(n, g) for g in block_globs)]]
        groups = [group for group in groups if group]
    else:
        groups = find_blocks(root)
    borders = [Border("", True, "chunk_input", 0)]
    segments: list[str] = []
    for group in groups:
        container = group[0].rpartition(".")[0]
        segments.append("stem" if not segments else f"{container}.stem")
        borders.append(Border(group[0], True, "block_input", len(borders)))
        for name in group:
            segments.append(name)
            borders.append(Border(name, False, "block_output", len(borders)))
    segments.append("head" if groups else "")
    borders.append(Border("", False, "chunk_output", len(borders)))
    return Structure(modules, tuple(n for group in groups for n in group), tuple(segments), tuple(borders))


def find_blocks(root: nn.Module) -> list[list[str]]:
    """Return the stacks of repeated layers, each a list of local names in order of registration; [] when there is none.

    First the outermost lists of modules (ModuleList, a ModuleDict of one class); else siblings of one class that have
    children of their own; else siblings that are plain layers.
    """
    stacks: list[tuple[int, list[str]]] = []
    _visit_containers(root, "", stacks)
    if not stacks:
        _visit_siblings(root, "", stacks, leaves=False)
    if not stacks:
        _visit_siblings(root, "", stacks, leaves=True)
    largest = max((size for size, _ in stacks), default=0)
    return [names for size, names in stacks if size >= SMALL_SHARE * largest]


def _children(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module, int]]:
    """(stripped name, child, number of parameters) of the children that hold parameters."""
    found = []
    for name, child in module.named_children():
        full = strip_wrappers(f"{prefix}.{name}" if prefix else name)
        # A parameter that ZeRO-3 cut up is empty here, and says how large it is.
        size = sum(int(getattr(p, "ds_numel", p.numel())) for p in child.parameters())
        if size:
            found.append((full, child, size))
    return found


def _is_stack(module: nn.Module, kids: list[tuple[str, nn.Module, int]]) -> bool:
    if not kids or any(isinstance(child, CONTAINERS) for _, child, _ in kids):
        return False
    if isinstance(module, nn.ModuleList):
        return True
    return isinstance(module, nn.ModuleDict) and len({type(child) for _, child, _ in kids}) == 1


def _visit_containers(module: nn.Module, prefix: str, stacks: list[tuple[int, list[str]]]) -> None:
    kids = _children(module, prefix)
    if _is_stack(module, kids):
        stacks.append((sum(size for _, _, size in kids), [name for name, _, _ in kids]))
        return
    for name, child, _ in kids:
        _visit_containers(child, name, stacks)


def _visit_siblings(module: nn.Module, prefix: str, stacks: list[tuple[int, list[str]]], leaves: bool) -> None:
    kids = _children(module, prefix)
    inner = [kid for kid in kids if bool(list(kid[1].children())) != leaves and not isinstance(kid[1], nn.Embedding)]
    if not leaves:
        inner = [kid for kid in inner if not isinstance(kid[1], nn.Sequential)]
    kind, times = Counter(type(child) for _, child, _ in inner).most_common(1)[0] if inner else (None, 0)
    if times >= 2:
        group = [kid for kid in inner if type(kid[1]) is kind]
        stacks.append((sum(size for _, _, size in group), [name for name, _, _ in group]))
        return
    for name, child, _ in kids:
        _visit_siblings(child, name, stacks, leaves)
