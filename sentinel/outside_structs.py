"""Structs of other packages that a configuration names by a word: imported where one is named, and then alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sentinel.entry_points import OutsidePart, outside_parts
from sentinel.errors import ConfigError


class OutsideStructs(Mapping[str, type[msgspec.Struct]]):
    """The word of a configuration -> the struct that it names. Asking for one imports its package, or is a ConfigError."""

    def __init__(
        self, group: str, what: str, *, fields: Sequence[str], methods: Sequence[str], taken: Mapping[str, Any]
    ) -> None:
        """group: of entry points. what: `a sink`. fields, methods: that each struct has. taken: Sentinel's own words."""
        self._what, self._fields, self._methods = what, fields, methods
        self._parts = {part.name: part for part in outside_parts(group, taken)}

    def __getitem__(self, name: str) -> type[msgspec.Struct]:
        return self._loaded(self._parts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _loaded(self, part: OutsidePart) -> type[msgspec.Struct]:
        where = part.where
        try:
            found = part.load_tried()
        except ConfigError as error:
            raise ConfigError(f"{where} {error}") from error
        if not isinstance(found, type) or not issubclass(found, msgspec.Struct):
            raise ConfigError(f"{where} is no configuration of {self._what}: expected a msgspec.Struct, got {found!r:.100}")
        lacking = [f"no field {name}" for name in self._fields if name not in found.__struct_fields__]
        lacking = lacking or [f"no method {name}" for name in self._methods if not callable(getattr(found, name, None))]
        if lacking:
            raise ConfigError(f"{where} is no configuration of {self._what}: it has {' and '.join(lacking)}")
        return found
