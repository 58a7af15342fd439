"""Lengths of time as people type them, `90s`, `10min`, `4h`, `2d`, and as they read them."""

from __future__ import annotations

import math
import re

from sentinel.errors import ConfigError

UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]+)")


def parse_duration(text: str, option: str) -> float | None:
    """Return the seconds that a length of time means; None for another kind of text. ConfigError for an unknown unit, 0."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    if match[2] not in UNITS:
        raise ConfigError(f'{option}: unknown unit "{match[2]}"; known: {", ".join(UNITS)}')
    seconds = float(match[1]) * UNITS[match[2]]
    if not 0 < seconds < math.inf:
        raise ConfigError(f'{option}: expected a time above 0 like 90s, 10min, 2h, got "{text}"')
    return seconds


def duration_words(seconds: float) -> str:
    """`43 s`, `12 min`, `5 h`, `3 d`: in the largest unit of which there are two"""
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"
