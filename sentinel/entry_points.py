"""Parts of other packages: found by entry point, imported when one is asked for; one that cannot be loaded is named."""

from __future__ import annotations

import functools
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

from sentinel.errors import ConfigError
from sentinel.exception_words import described
from sentinel.known_words import near


class OutsidePart:
    """One entry point of a group, not imported yet."""

    def __init__(self, group: str, point: EntryPoint, rivals: Sequence[EntryPoint] = ()) -> None:
        """rivals: of other packages, under the same name; with any of them nobody knows which one is meant."""
        self._point = point
        self._rivals = rivals
        self.name = point.name
        package = _package(point)
        self.where = f'entry point "{point.name}" of {group} ({point.value}{package})'
        """What messages call it: the package is in it, where that is known."""

    def load(self) -> Any:
        """Import the package, and return what the entry point names; ConfigError says in words why that fails."""
        if self._rivals:
            raise ConfigError(self._ambiguity)
        try:
            return self._point.load()
        except (Exception, SystemExit) as error:  # another package's import may fail in any way
            raise ConfigError(f"cannot be loaded: {described(error)}") from error

    def load_tried(self) -> Any:
        """Do as `load` does, where an import that ends its process or never ends is no more than a ConfigError.

        For processes that others count on, as the daemon is. What this process has not imported yet another one imports
        first, which takes as long again.
        """
        if problem := self.problem():
            raise ConfigError(problem)
        return self.load()

    def problem(self) -> str:
        """Return in words why it cannot be loaded; empty: it can. Nothing is imported into this process."""
        if self._rivals:
            return self._ambiguity
        if self._point.module in sys.modules:
            return ""
        from sentinel.import_trial import import_problem

        problem = import_problem(self._point.value)
        return f"cannot be loaded: {problem}" if problem else ""

    @property
    def _ambiguity(self) -> str:
        others = " and ".join(f"{one.value}{_package(one)}" for one in self._rivals)
        return f"is offered a second time, by {others}: uninstall all packages but one"


def _package(point: EntryPoint) -> str:
    return f', package "{point.dist.name}"' if point.dist is not None else ""


def named_parts(group: str, names: Iterable[str], what: str) -> list[OutsidePart | str]:
    """Return the part of each name, in that order; in words, where no installed package offers it. what: `probe`."""
    offered = {part.name: part for part in outside_parts(group)}
    known = f"offered: {', '.join(sorted(offered))}" if offered else "no installed package offers one"
    return [
        offered.get(name) or f"no {what} {name!r} among the entry points of {group}{near(name, offered)}; {known}"
        for name in names
    ]


def outside_parts(group: str, taken: Container[str] = ()) -> Iterator[OutsidePart]:
    """Yield what other packages offer in a group. taken: names of Sentinel's own, which are left out."""
    points = [point for point in installed(group) if point.name not in taken]
    for point in points:
        yield OutsidePart(group, point, [one for one in points if one.name == point.name and one is not point])


def installed(group: str) -> EntryPoints:
    """Return the entry points of a group that all installed packages offer."""
    return _read(group, tuple((folder, _changed_ns(folder)) for folder in sys.path))


@functools.lru_cache(maxsize=16)
def _read(group: str, _: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Read them once for each state of the search path, which takes half as long as loading a rule pack.

    The state is each folder with the time, in ns, at which something was last added to it or removed.
    """
    return entry_points(group=group)


def _changed_ns(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0
