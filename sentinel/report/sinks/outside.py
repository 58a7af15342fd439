"""Sinks of other packages: found by entry point, imported where a configuration names one, and then alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from sentinel.entry_points import OutsidePart, outside_parts
from sentinel.errors import ConfigError

ENTRY_POINTS = "sentinel.sinks"
"""Group of entry points: the `type` of a sink -> its configuration, a struct that keeps `delivery.SinkSettings`."""
NEEDED = ("name", "route")
"""Fields that the configuration of every sink has."""


class OutsideSinks(Mapping[str, type[msgspec.Struct]]):
    """The `type` of a sink -> the struct that configures it. Asking for one imports its package, or is a ConfigError."""

    def __init__(self, taken: Mapping[str, Any]) -> None:
        """taken: types that are Sentinel's own, which no package takes."""
        self._parts = {part.name: part for part in outside_parts(ENTRY_POINTS, taken)}

    def __getitem__(self, name: str) -> type[msgspec.Struct]:
        return _loaded(self._parts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _loaded(part: OutsidePart) -> type[msgspec.Struct]:
    where = part.where
    try:
        found = part.load_tried()
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from error
    if not isinstance(found, type) or not issubclass(found, msgspec.Struct):
        raise ConfigError(f"{where} is no configuration of a sink: expected a msgspec.Struct, got {found!r:.100}")
    lacking = [name for name in NEEDED if name not in found.__struct_fields__]
    if lacking or not callable(getattr(found, "build", None)):
        what = " and ".join([f"no field {name}" for name in lacking] or ["no method build(parts)"])
        raise ConfigError(f"{where} is no configuration of a sink: it has {what}")
    return found
