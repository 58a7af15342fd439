"""Online detectors, vectorised over series.

In: the values of many series at one step, and their state. Out: scores, at least 1.0 is anomalous, with evidence.
Never: I/O, a clock, or learning from a value before it was scored.
"""

from __future__ import annotations

from typing import Any

from sentinel.detect.attention import AttentionCollapse
from sentinel.detect.dead import DeadTensor
from sentinel.detect.declaration import Declaration, declared
from sentinel.detect.detector import Explanation, Scores, SeriesDetector, State, grow, state_bytes
from sentinel.detect.drift import Drift, Plateau
from sentinel.detect.duplicate_ranks import DuplicateRanks
from sentinel.detect.ended import RunEnded
from sentinel.detect.experts import DeadExpert, DominantExpert, ExpertImbalance
from sentinel.detect.group import GroupDetector
from sentinel.detect.growth import ExplodingTensor, VanishingGradient
from sentinel.detect.impossible import ImpossibleFrame
from sentinel.detect.known import ENTRY_POINTS, Detectors
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


def known_detectors() -> Detectors:
    """Return DETECTORS and what other packages offer, each of which is imported when it is asked for."""
    return Detectors(DETECTORS)


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
