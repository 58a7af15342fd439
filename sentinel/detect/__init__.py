"""Online detectors, vectorised over series: no I/O, no clock; scores before it learns."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from sentinel.detect.detector import Explanation, Scores, SeriesDetector, State, grow, state_bytes
from sentinel.detect.group import GroupDetector
from sentinel.detect.liveness import LivenessDetector, StaleRank
from sentinel.detect.nonfinite import AnomalyNan, HiddenNan, NanStorm
from sentinel.detect.replicas import ReplicaDivergence
from sentinel.detect.slow import SlowRank
from sentinel.detect.turbulence import AnomalyTurbulence, KurtosisSpike
from sentinel.detect.windowed import GradNormSpike, LossSpike
from sentinel.errors import RuleError

DETECTORS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        AnomalyNan, AnomalyTurbulence, KurtosisSpike, LossSpike, GradNormSpike, NanStorm, HiddenNan, ReplicaDivergence,
        StaleRank, SlowRank,
    )
}
"""Name in a rule -> class. The fields of a class are the `args` of its rules."""

ENTRY_POINTS = "sentinel.detectors"
"""Group of entry points under which other packages offer theirs."""


def known_detectors() -> dict[str, type[Any]]:
    """Return DETECTORS and those of other packages' entry points; nothing outside is imported but what they name.

    RuleError when one cannot be loaded or takes the name of one of ours.
    """
    found = dict(DETECTORS)
    for point in entry_points(group=ENTRY_POINTS):
        where = f'entry point "{point.name}" of {ENTRY_POINTS} ({point.value})'
        if point.name in DETECTORS:
            raise RuleError(f"{where} takes the name of a built-in detector")
        try:
            found[point.name] = point.load()
        except Exception as error:  # another package's import may fail in any way
            raise RuleError(f"{where} cannot be loaded: {error}") from error
    return found


__all__ = [
    "DETECTORS",
    "ENTRY_POINTS",
    "AnomalyNan",
    "AnomalyTurbulence",
    "Explanation",
    "GradNormSpike",
    "GroupDetector",
    "HiddenNan",
    "KurtosisSpike",
    "LivenessDetector",
    "LossSpike",
    "NanStorm",
    "ReplicaDivergence",
    "Scores",
    "SeriesDetector",
    "SlowRank",
    "StaleRank",
    "State",
    "grow",
    "known_detectors",
    "state_bytes",
]
