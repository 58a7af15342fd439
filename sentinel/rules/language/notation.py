"""How a test of rules writes a series: `1+0.1x20 5 _x3 nan 1x10`, as promtool does."""

from __future__ import annotations

import math
import re

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_PART = re.compile(
    rf"(?P<start>{_NUMBER}|[-+]?inf|nan|_)(?:(?P<by>[-+*])(?P<change>{_NUMBER}))?(?:x(?P<times>\d+))?", re.IGNORECASE
)
MAX_VALUES = 1_000_000
"""Most values of one series, a bound on memory: 32 MB as a list of Python's floats."""


class BadNotation(ValueError):
    """A part of a series that cannot be read."""


def expand(text: str) -> list[float | None]:
    """Return the values that `text` writes, one a step; None where the step has none.

    `5` once; `5x3` once and three times more; `1+2x3` is 1 3 5 7, `1-2x3` falls, `1*2x3` is 1 2 4 8; `_` nothing, `_x3`
    nothing three times; `nan`, `inf`, `-inf`. BadNotation names the part that is none of these.

    Source: prometheus.io/docs/prometheus/latest/configuration/unit_testing_rules, `values`; `*` is ours.
    """
    found: list[float | None] = []
    for part in text.split():
        match = _PART.fullmatch(part)
        if match is None:
            raise BadNotation(f'expected "1", "1x5", "1+0.5x10", "1*1.1x10", "_" or "nan", got "{part}"')
        times = int(match["times"]) if match["times"] else 0
        if len(found) + times >= MAX_VALUES:
            raise BadNotation(f"expected at most {MAX_VALUES} values, got more")
        if match["by"] and not match["times"]:
            raise BadNotation(f'"{part}": how often? "{part}x10" is ten times more')
        if match["start"] == "_":
            if match["by"]:
                raise BadNotation(f'"{part}": nothing cannot grow; "_x{times}" is nothing {times} times')
            found += [None] * (times if match["times"] else 1)
        else:
            start, change = float(match["start"]), float(match["change"] or 0.0)
            found += [_value(start, match["by"], change, at) for at in range(times + 1)]
    return found


def _value(start: float, by: str | None, change: float, at: int) -> float:
    if by == "*":
        try:
            return start * change**at
        except OverflowError:
            return math.copysign(math.inf, start)
    return start + at * (-change if by == "-" else change) if by else start
