"""Detectors by the name that a rule gives: Sentinel's own, those that other packages offer, and dotted paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sentinel.detect.dotted import dotted_detector, is_dotted, shortcoming
from sentinel.entry_points import OutsidePart, outside_parts
from sentinel.errors import ConfigError, RuleError

ENTRY_POINTS = "sentinel.detectors"
"""Group of entry points under which other packages offer theirs."""


class Detectors(Mapping[str, type[Any]]):
    """Name -> class. A package is imported when the detector that it offers is asked for, and no sooner.

    It iterates over the names that are known or offered. `why_not` says of a name that is offered, or of a dotted path, why
    there is no detector behind it; a dotted path leads to one where code is allowed.
    """

    def __init__(self, own: Mapping[str, type[Any]]) -> None:
        """own: Sentinel's, whose names no package takes."""
        self._found = dict(own)
        self._offered = {part.name: part for part in outside_parts(ENTRY_POINTS, own)}
        self._broken: dict[str, str] = {}

    def __getitem__(self, name: str) -> type[Any]:
        if name not in self._found and (name in self._broken or not self._find(name)):
            raise KeyError(name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._found, *self._offered]))

    def __len__(self) -> int:
        return len({*self._found, *self._offered})

    def why_not(self, name: str) -> str:
        """Return in words why what a name leads to is no detector; empty where it is one, or the name leads nowhere."""
        return "" if name in self else self._broken.get(name, "")

    def _find(self, name: str) -> bool:
        """Import what a name leads to; False where that is no detector, or nothing."""
        try:
            if name in self._offered:
                self._found[name] = _offered_detector(self._offered[name])
            elif is_dotted(name):
                self._found[name] = dotted_detector(name)
        except (ConfigError, RuleError) as error:
            self._broken[name] = str(error)
        return name in self._found


def why_not(name: str, detectors: Mapping[str, type[Any]]) -> str:
    """Return in words why there is no detector behind a name; empty where nothing is known of it but that."""
    return detectors.why_not(name) if isinstance(detectors, Detectors) else ""


def _offered_detector(part: OutsidePart) -> type[Any]:
    """Return the class behind an entry point. ConfigError where it cannot be loaded, or is no detector."""
    try:
        found = part.load_tried()
    except ConfigError as error:
        raise ConfigError(f"{part.where} {error}") from error
    if (problem := shortcoming(found)) is not None:
        raise ConfigError(f"{part.where} is no detector: {problem}")
    return found  # type: ignore[no-any-return]
