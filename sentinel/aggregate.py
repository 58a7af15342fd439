"""Aggregates: groups of tensors by glob (a layer, all attention outputs, one expert across layers, the model), merged."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.errors import ConfigError
from sentinel.kinds import is_of_kind
from sentinel.native import merge_rows

if TYPE_CHECKING:
    from sentinel.step_view import LogicalTensor

CAPTURE = "{}"
"""In a glob: one part of a name, up to the next `.` or `:`; each value it takes makes a group of its own."""
MAX_GLOB = 256
"""Characters of a glob. Globs come from the network too."""
MAX_CAPTURES = 4
MAX_TABLES = 4
"""Passes over the tensors of a step that merging groups that overlap may take; past it rows are copied together."""


class Aggregate(msgspec.Struct, frozen=True, kw_only=True):
    """A group of tensors by name, or with `{}` in its globs one group for each value that `{}` takes."""

    name: str
    """What the group is called. `{}` stands for the value; a name without any has the values put behind it."""
    globs: tuple[str, ...]
    """Any of which must match the whole of a canonical name; `*` crosses dots: `layers.*.mlp.*`."""

    def __post_init__(self) -> None:
        where = f'aggregate "{self.name}"'
        if not self.name or not self.globs or not all(self.globs):
            raise ConfigError(f"{where}: expected NAME=GLOB,GLOB or GLOB, got an empty part")
        for glob in self.globs:
            if len(glob) > MAX_GLOB or glob.count(CAPTURE) > MAX_CAPTURES:
                raise ConfigError(
                    f'{where}: expected at most {MAX_GLOB} characters and {MAX_CAPTURES} "{{}}", got "{glob[:80]}"'
                )
            if re.search(r"\{\}[*?{]|[*?}]\{\}", glob):
                raise ConfigError(
                    f'{where}: "{{}}" beside a wildcard has no bounds in "{glob}"; put a dot between: "layers.{{}}.*"'
                )
        counts = {glob.count(CAPTURE) for glob in self.globs}
        if len(counts) > 1:
            raise ConfigError(f'{where}: its globs must have equally many "{{}}", got {", ".join(self.globs)}')
        if self.name.count(CAPTURE) not in (0, *counts):
            raise ConfigError(
                f'{where}: expected as many "{{}}" as in its globs, {counts.pop()}, got {self.name.count(CAPTURE)}'
            )

    @classmethod
    def parse(cls, text: str) -> Aggregate:
        """Return the aggregate that `NAME=GLOB,GLOB` or `GLOB` says; without a name it is called as its globs are."""
        name, equals, globs = text.rpartition("=")
        found = tuple(glob.strip() for glob in globs.split(","))
        return cls(name=name.strip() if equals else ",".join(found), globs=found)

    @property
    def definition(self) -> str:
        """What must be equal for two aggregates to mean the same: `NAME=GLOB,GLOB`."""
        return f"{self.name}={','.join(self.globs)}"

    def groups_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the groups that a tensor of these names (its own, and those it is known by besides) belongs to."""
        found: dict[str, None] = {}
        for name in names:
            for glob in self.globs:
                match = _compiled(glob).match(name)
                if match is not None:
                    found[self._called(match.groups())] = None
                    break
        return tuple(found)

    def _called(self, values: Sequence[str]) -> str:
        if not values:
            return self.name
        if CAPTURE not in self.name:
            return ".".join((self.name, *values))
        parts = self.name.split(CAPTURE)
        return "".join(part + value for part, value in zip(parts, (*values, ""), strict=True))


@dataclass(frozen=True)
class Group:
    """One group of one layout and kind: the series it makes, and the logical tensors in it."""

    name: str
    kind: str
    definition: str
    members: npt.NDArray[np.int64]
    """Indices of logical tensors, rising: each once, however many names it has."""
    num_excluded: int
    """Series of matching tensors that each rank keeps for itself (unknown or partial placements): nobody may merge them."""


class Groups:
    """The groups that aggregates make of the logical tensors of one layout; made once a layout, used every step."""

    def __init__(
        self,
        tensors: Sequence[LogicalTensor],
        aggregates: Iterable[Aggregate],
        *,
        kinds: Iterable[str] | None = None,
        names: Sequence[str] = ("*",),
    ) -> None:
        """kinds: those wanted, each makes groups of its own; None: all. names: globs that members must match besides."""
        wanted = None if kinds is None else frozenset(kinds)
        self.num_tensors = len(tensors)
        found: dict[tuple[str, str, str], tuple[list[int], list[int]]] = {}
        for aggregate in aggregates:
            of_names: dict[tuple[str, ...], tuple[str, ...]] = {}
            for tensor in tensors:
                if tensor.is_part or (wanted is not None and not is_of_kind(tensor.kind, tensor.border, wanted)):
                    continue
                called = (tensor.name, *tensor.also)
                if called not in of_names:
                    is_taken = any(matches(glob, name) for glob in names for name in called)
                    of_names[called] = aggregate.groups_of(called) if is_taken else ()
                for name in of_names[called]:
                    key = (name, tensor.kind, aggregate.definition)
                    members, excluded = found.setdefault(key, ([], []))
                    (excluded if tensor.place or tensor.is_partial else members).append(tensor.index)
        self.groups: list[Group] = [
            Group(name, kind, definition, np.array(members, np.int64), len(excluded))
            for (name, kind, definition), (members, excluded) in found.items()
        ]

    def __len__(self) -> int:
        return len(self.groups)

    @cached_property
    def index(self) -> npt.NDArray[np.int64]:
        """[memberships] logical tensors, the groups one behind the other."""
        return np.concatenate([np.empty(0, np.int64), *(group.members for group in self.groups)])

    @cached_property
    def of(self) -> npt.NDArray[np.int32]:
        """[memberships] the group of each."""
        sizes = [len(group.members) for group in self.groups]
        return np.repeat(np.arange(len(self.groups), dtype=np.int32), sizes)

    @cached_property
    def _tables(self) -> list[tuple[npt.NDArray[np.int32], list[int]]]:
        """([num_tensors] the group of each tensor and -1 for none, its groups), as few as tell apart those that overlap.

        Empty where that takes too many.
        """
        tables: list[tuple[npt.NDArray[np.int32], list[int]]] = []
        for at, group in enumerate(self.groups):
            found = next((one for one in tables if (one[0][group.members] < 0).all()), None)
            if found is None:
                if len(tables) == MAX_TABLES:
                    return []
                found = (np.full(self.num_tensors, -1, np.int32), [])
                tables.append(found)
            found[0][group.members] = at
            found[1].append(at)
        return tables

    def merge(self, stats: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Return the statistics of each group: [num_groups] STATS_DTYPE, moments merged exactly.

        stats: [num_tensors] STATS_DTYPE of the logical tensors; an empty row (an absent tensor) changes nothing. One pass
        over them where no two groups share a tensor, a few where some do.
        """
        if not self._tables:
            return merge_rows(rows_at(stats, self.index), self.of, len(self.groups))
        (first, _), *others = self._tables
        merged: npt.NDArray[np.void] = merge_rows(stats, first, len(self.groups))
        for table, groups in others:
            merged[groups] = merge_rows(stats, table, len(self.groups))[groups]
        return merged

    def count(self, where: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return how many members of each group are marked: [num_groups]. where: [num_tensors]."""
        return np.bincount(self.of[where[self.index]], minlength=len(self.groups))


def rows_at(stats: npt.NDArray[np.void], index: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.void]:
    """Return `stats[index]`, as words: numpy copies records field by field, which takes ten times as long."""
    words = np.ascontiguousarray(stats).view(np.uint64).reshape(len(stats), stats.dtype.itemsize // 8)
    found: npt.NDArray[np.void] = words[index].view(stats.dtype).reshape(-1)
    return found


def matches(glob: str, name: str) -> bool:
    """Return whether a glob matches the whole of a name: `layers.1.*` takes `layers.1.mlp`, never `layers.10.mlp`."""
    return _compiled(glob).match(name) is not None


def nearest_names(globs: Iterable[str], names: Iterable[str], most: int = 5) -> list[str]:
    """Return the names that are most like what the globs say, the nearest first: for an error that says nothing matches."""
    known = sorted(set(names))
    numbered = {_numberless(name): name for name in reversed(known)}
    found: dict[str, None] = {}
    for glob in globs:
        wanted = _numberless(glob.replace(CAPTURE, "0").replace("*", "0"))
        for near in difflib.get_close_matches(wanted, list(numbered), n=most, cutoff=0.3):
            found[numbered[near]] = None
    return list(found)[:most] or known[:most]


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "0", name)


@lru_cache(maxsize=4096)
def _compiled(glob: str) -> re.Pattern[str]:
    """Return the expression of a glob. Each `*` takes as little as lets the part behind it fit, and never gives back, so
    that no glob, wherever it comes from, makes matching slower than linear in stars and name.
    """
    first, *others = _split(glob)
    if not others:
        return re.compile(f"(?s:{first})\\Z")
    *middle, last = others
    body = "".join(f"(?>.*?{part})" for part in middle if part)
    return re.compile(f"(?s:{first}{body}.*{last})\\Z")


def _split(glob: str) -> list[str]:
    """Return the expressions of the parts between the stars of a glob."""
    parts, at = [""], 0
    while at < len(glob):
        if glob.startswith(CAPTURE, at):
            parts[-1] += "([^.:]+)"
            at += len(CAPTURE)
            continue
        end = at + 1
        if glob[at] == "[":
            close = glob.find("]", at + (3 if glob[at + 1 : at + 2] == "!" else 2))
            end = close + 1 if close > 0 else end
        if glob[at] == "*":
            parts.append("")
        else:
            one = fnmatch.translate(glob[at:end])
            parts[-1] += one[one.index("(?s:") + 4 : one.rindex(")")]
        at = end
    return parts
