"""Online detectors, vectorised over series.

In: the values of many series at one step, and their state. Out: scores, at least 1.0 is anomalous, with evidence.
Never: I/O, a clock, or learning from a value before it was scored.
"""

from __future__ import annotations

import logging
from typing import Any

from sentinel.detect.attention import AttentionCollapse
from sentinel.detect.dead import DeadTensor
from sentinel.detect.declaration import Declaration, declared
from sentinel.detect.detector import Explanation, Scores, SeriesDetector, State, grow, state_bytes
from sentinel.detect.dotted import Detectors, shortcoming
from sentinel.detect.drift import Drift, Plateau
from sentinel.detect.duplicate_ranks import DuplicateRanks
from sentinel.detect.ended import RunEnded
from sentinel.detect.experts import DeadExpert, DominantExpert, ExpertImbalance
from sentinel.detect.group import GroupDetector
from sentinel.detect.growth import ExplodingTensor, VanishingGradient
from sentinel.detect.impossible import ImpossibleFrame
from sentinel.detect.limits import PrecisionLoss, Threshold
from sentinel.detect.liveness import LivenessDetector, StaleRank
from sentinel.detect.lost_rows import LostRows
from sentinel.detect.nonfinite import AnomalyNan, HiddenNan, NanStorm
from sentinel.detect.replica_divergence import ReplicaDivergence
from sentinel.detect.same_batch import SameBatch
from sentinel.detect.saturation import Saturation
from sentinel.detect.skew import GainSkew, RankSkew
from sentinel.detect.slow import SlowRank
from sentinel.detect.turbulence import AnomalyTurbulence, KurtosisSpike
from sentinel.detect.update_ratio import UpdateRatio
from sentinel.detect.windowed import GradNormSpike, LossSpike
from sentinel.entry_points import OutsidePart, outside_parts
from sentinel.errors import ConfigError

DETECTORS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        AnomalyNan,
        AnomalyTurbulence,
        KurtosisSpike,
        LossSpike,
        GradNormSpike,
        NanStorm,
        HiddenNan,
        SameBatch,
        ReplicaDivergence,
        StaleRank,
        LostRows,
        ImpossibleFrame,
        RunEnded,
        SlowRank,
        VanishingGradient,
        ExplodingTensor,
        DeadTensor,
        UpdateRatio,
        Saturation,
        PrecisionLoss,
        AttentionCollapse,
        ExpertImbalance,
        DeadExpert,
        DominantExpert,
        RankSkew,
        GainSkew,
        DuplicateRanks,
        Threshold,
        Drift,
        Plateau,
    )
}
"""Name in a rule -> class. The fields of a class are the `args` of its rules."""

ENTRY_POINTS = "sentinel.detectors"
"""Group of entry points under which other packages offer theirs."""

log = logging.getLogger("sentinel.detect")

_said: set[str] = set()
"""Entry points whose fault was logged by this process."""


def known_detectors() -> Detectors:
    """Return DETECTORS and those of other packages' entry points; nothing outside is imported but what they name.

    Where code is allowed a dotted path is the name of what it leads to. An entry point that cannot be loaded, is no
    detector or takes the name of one of ours is left out and said once: only a rule that names it is refused.
    """
    found = Detectors(DETECTORS)
    for part in outside_parts(ENTRY_POINTS):
        problem = _offer(found, part)
        if problem and part.name not in DETECTORS:
            found.broken[part.name] = f"{part.where} {problem}"
        if problem and part.where not in _said:
            _said.add(part.where)
            log.warning("%s %s; it is left out, mend or uninstall the package that offers it", part.where, problem)
    return found


def _offer(found: Detectors, part: OutsidePart) -> str:
    """Put the detector of an entry point among `found`; return in words why it cannot be one, empty where it is."""
    if part.name in DETECTORS:
        return "takes the name of a built-in detector"
    try:
        detector = part.load()
    except ConfigError as error:
        return str(error)
    problem = shortcoming(detector)
    if problem is not None:
        return f"is no detector: {problem}"
    found[part.name] = detector
    return ""


__all__ = [
    "DETECTORS",
    "ENTRY_POINTS",
    "AnomalyNan",
    "AnomalyTurbulence",
    "AttentionCollapse",
    "DeadExpert",
    "DeadTensor",
    "Declaration",
    "DominantExpert",
    "Drift",
    "DuplicateRanks",
    "ExpertImbalance",
    "Explanation",
    "ExplodingTensor",
    "GainSkew",
    "GradNormSpike",
    "GroupDetector",
    "HiddenNan",
    "ImpossibleFrame",
    "KurtosisSpike",
    "LivenessDetector",
    "LossSpike",
    "LostRows",
    "NanStorm",
    "Plateau",
    "PrecisionLoss",
    "RankSkew",
    "ReplicaDivergence",
    "RunEnded",
    "SameBatch",
    "Saturation",
    "Scores",
    "SeriesDetector",
    "SlowRank",
    "StaleRank",
    "State",
    "Threshold",
    "UpdateRatio",
    "VanishingGradient",
    "declared",
    "grow",
    "known_detectors",
    "state_bytes",
]
