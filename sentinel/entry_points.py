"""Parts of other packages: found by entry point, imported when one is asked for; one that cannot be loaded is named."""

from __future__ import annotations

from collections.abc import Container, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sentinel.errors import ConfigError


class OutsidePart:
    """One entry point of a group, not imported yet."""

    def __init__(self, group: str, point: EntryPoint) -> None:
        self._point = point
        self.name = point.name
        package = f', package "{point.dist.name}"' if point.dist is not None else ""
        self.where = f'entry point "{point.name}" of {group} ({point.value}{package})'
        """What messages call it: the package is in it, where that is known."""

    def load(self) -> Any:
        """Import the package, and return what the entry point names; ConfigError says in words why that fails."""
        try:
            return self._point.load()
        except (Exception, SystemExit) as error:  # another package's import may fail in any way
            raise ConfigError(f"cannot be loaded: {type(error).__name__}: {error}") from error


def outside_parts(group: str, taken: Container[str] = ()) -> Iterator[OutsidePart]:
    """Yield what other packages offer in a group. taken: names of Sentinel's own, which are left out."""
    for point in entry_points(group=group):
        if point.name not in taken:
            yield OutsidePart(group, point)
