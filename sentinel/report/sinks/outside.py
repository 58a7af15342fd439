"""Sinks of other packages: found by entry point, imported where a configuration names one, and then alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from sentinel.errors import ConfigError

ENTRY_POINTS = "sentinel.sinks"
"""Group of entry points: the `type` of a sink -> its configuration, a struct that keeps `delivery.SinkSettings`."""
NEEDED = ("name", "route")
"""Fields that the configuration of every sink has."""


class OutsideSinks(Mapping[str, type[msgspec.Struct]]):
    """The `type` of a sink -> the struct that configures it. Asking for one imports its package, or is a ConfigError."""

    def __init__(self, taken: Mapping[str, Any]) -> None:
        """taken: types that are Sentinel's own, which no package takes."""
        self._points = {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in taken}

    def __getitem__(self, name: str) -> type[msgspec.Struct]:
        return _loaded(self._points[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)


def _loaded(point: EntryPoint) -> type[msgspec.Struct]:
    package = f', package "{point.dist.name}"' if point.dist is not None else ""
    where = f'entry point "{point.name}" of {ENTRY_POINTS} ({point.value}{package})'
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # another package's import may fail in any way
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, msgspec.Struct):
        raise ConfigError(f"{where} is no configuration of a sink: expected a msgspec.Struct, got {found!r:.100}")
    lacking = [name for name in NEEDED if name not in found.__struct_fields__]
    if lacking or not callable(getattr(found, "build", None)):
        what = " and ".join([f"no field {name}" for name in lacking] or ["no method build(parts)"])
        raise ConfigError(f"{where} is no configuration of a sink: it has {what}")
    return found
