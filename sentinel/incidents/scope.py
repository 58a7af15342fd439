"""Scope: what an incident can explain, by subject, lineage, harm and size.

Pure functions of anomalies. The tracker asks them; they decide nothing about how an incident goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sentinel.anomaly import Anomaly, is_liveness, is_nonfinite
from sentinel.kinds import Phase
from sentinel.order.causes import reached_by
from sentinel.order.phase import phase_of, tensor_name

SEVERAL = 3.0
"""Times its size from which an anomaly is several times worse than what its incident reported. Smaller: an incident that
grows sends a message at nearly each step; larger: one that turns grave sends none."""

_OF_ONE_RANK = frozenset({"StaleRank", "SlowRank"})
"""Detectors whose anomalies are about ranks themselves: a late or silent rank is a subject of its own."""

_DEVIATIONS = frozenset({"RankSkew", "GainSkew", "DuplicateRanks", "ReplicaDivergence"})
"""Detectors that hold ranks against one another: what one rank does differently is another subject than another rank's."""

_OF_PARAMETERS = frozenset({Phase.PARAM, Phase.WGRAD, Phase.WGRAD_UNREDUCED, Phase.OPTIMIZER})


def nature_of(anomaly: Anomaly) -> str:
    """Return the kind of harm: `liveness` (ranks and rows that do not come), `nonfinite`, or `finite`.

    A minus infinity that masks by design, written down as `info`, is no more harm than a lone finite excursion.
    """
    if is_liveness(anomaly):
        return "liveness"
    return "nonfinite" if is_nonfinite(anomaly) and anomaly.severity.level > 0 else "finite"


def subject_of(anomaly: Anomaly) -> tuple[str, ...]:
    """Return what an anomaly of liveness is about: each of its ranks, or its rule where it is about rows and not ranks.

    Two of them are of one subject when they share any.
    """
    if anomaly.detector in _OF_ONE_RANK:
        ranks = (anomaly.rank,) if anomaly.rank is not None else anomaly.ranks
        if ranks:
            return tuple(f"rank {rank}" for rank in ranks)
    return (f"rule {anomaly.rule}",)


def series_of(anomaly: Anomaly) -> str:
    """Return the series that an anomaly is of, the rank with it where ranks are held against one another."""
    rank = "" if (odd := deviating_rank(anomaly)) is None else f"@{odd}"
    return f"{anomaly.kind}/{anomaly.tag_name}{rank}"


def lineage_of(anomaly: Anomaly) -> str:
    """Return the module that an anomaly's tensor belongs to, the rank with it where ranks are held against one another.

    A weight, its gradient, its optimizer state and what its module puts out are of one lineage; a scalar is its own.
    """
    rank = "" if (odd := deviating_rank(anomaly)) is None else f"@{odd}"
    if anomaly.kind == "scalar":
        return f"scalar/{anomaly.tag_name}{rank}"
    name = tensor_name(anomaly.tag_name)
    if phase_of(anomaly.kind, anomaly.tag_name) in _OF_PARAMETERS:
        name = name.rpartition(".")[0] or name
    return name + rank


def deviating_rank(anomaly: Anomaly) -> int | None:
    """Return the rank that deviates from its peers, of an anomaly that says so; None for all others."""
    return anomaly.rank if anomaly.detector in _DEVIATIONS else None


def size_of(anomaly: Anomaly) -> float:
    """Return how bad an anomaly is, to compare with others of its series: infinite for a value that is no number.

    Seconds above what is usual for figures of time; else the distance from the baseline in units of it, else the score.
    """
    if is_nonfinite(anomaly):
        return math.inf
    if anomaly.excess and anomaly.statistic.endswith("_s"):
        return anomaly.excess
    if anomaly.excess and anomaly.baseline:
        return anomaly.excess / abs(anomaly.baseline)
    return anomaly.score if anomaly.score is not None else 0.0


def is_several_times(worse: float, than: float) -> bool:
    """Tell whether one size is several times another; nothing is so of an infinite one."""
    return worse >= SEVERAL * than > 0.0 and math.isfinite(than)


def is_connected(sources: Sequence[Anomaly], others: Iterable[Anomaly]) -> bool:
    """Tell whether a path of the order leads between `sources` and every graver one of `others`, all of one step.

    In either direction: an overflow has its explosion before it. Mere notes (`info`) need no path.
    """
    grave = [one for one in others if one.severity.level > 0]
    if not grave:
        return True
    after = reached_by(sources, grave)
    before = [i for i, is_after in enumerate(after) if not is_after]
    return all(any(reached_by([grave[i]], sources)) for i in before)
