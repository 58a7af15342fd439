"""Binding: from a rule and its detector to the watches that it becomes, by what the detector declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sentinel.detect import Declaration, declared
from sentinel.detect.known import why_not
from sentinel.detect.vectorised import Vectorised
from sentinel.errors import RuleError
from sentinel.record import STATISTICS
from sentinel.rules.language.building import build_detector
from sentinel.rules.language.schema import VALUE, Pack, Rule
from sentinel.rules.watches.aggregate_watch import AggregateWatch, Merged
from sentinel.rules.watches.end_watch import EndWatch
from sentinel.rules.watches.fast_path import fast_path_of
from sentinel.rules.watches.frame_watch import FrameWatch
from sentinel.rules.watches.liveness_watch import LivenessWatch
from sentinel.rules.watches.lost_rows_watch import LossWatch
from sentinel.rules.watches.own_row_watch import OwnRowWatch
from sentinel.rules.watches.rank_watch import RankWatch
from sentinel.rules.watches.replica_watch import ReplicaWatch
from sentinel.rules.watches.row_watch import RowWatch
from sentinel.rules.watches.scalar_watch import ScalarWatch
from sentinel.rules.watches.skew_watch import SkewWatch
from sentinel.rules.watches.tensor_watch import TensorWatch
from sentinel.rules.watches.watch import Watch


def watches_of_pack(pack: Pack, detectors: Mapping[str, type[Any]]) -> list[Watch]:
    """Return the watches of all rules of a pack, in its order. RuleError where a detector is not known or cannot be made."""
    watches: list[Watch] = []
    for rule in pack.rules:
        if rule.detector not in detectors:
            why = why_not(rule.detector, detectors) or f'unknown detector "{rule.detector}"'
            raise RuleError(f'rule "{rule.name}": {why}')
        detector = build_detector(rule, detectors)
        declares = declared(detector)
        watches += WATCHES_OVER[declares.over](rule, detector, declares)
    return watches


def _of_series(rule: Rule, detector: Any, declares: Declaration) -> list[Watch]:
    """Groups of tensors where the rule merges them; else tensors, each with its own past, or rows; and logged values."""
    kinds = frozenset(kind for kind in rule.match.kind if kind != "scalar")
    watches: list[Watch] = []
    if rule.match.aggregate:
        merged = Merged(rule, kinds)
        for statistic in rule.statistics(declares.statistics):
            watches.append(AggregateWatch(rule, _fitted(detector, statistic), statistic, merged))
        return watches
    if kinds:
        watches += _of_tensors(rule, detector, declares, kinds)
    if "scalar" in rule.match.kind and (rule.match.kind == ("scalar",) or declares.raw_values):
        fitted = _fitted(detector, VALUE)
        watches.append(ScalarWatch(rule, fitted, fast_path_of(fitted) if rule.reference is None else None))
    return watches


def _of_tensors(rule: Rule, detector: Any, declares: Declaration, kinds: frozenset[str]) -> list[Watch]:
    statistics = rule.statistics(declares.statistics)
    if not detector.state(1):
        # The counts of a row are the same whatever statistic is asked for.
        wanted = statistics[:1] if declares.judges == "counts" else statistics
        return [RowWatch(rule, detector, statistic, kinds) for statistic in wanted]
    watches: list[Watch] = []
    for statistic in statistics:
        fitted = _fitted(detector, statistic)
        if declares.judges == "own_rows":
            watches.append(OwnRowWatch(rule, fitted, statistic, kinds))
        else:
            watches.append(TensorWatch(rule, fitted, statistic, kinds, _vectorised_of(fitted, statistic)))
    return watches


def _of_peers(rule: Rule, detector: Any, declares: Declaration) -> list[Watch]:
    named = rule.statistics(declares.statistics)
    return [SkewWatch(rule, detector, one, has_scalars=at == 0) for at, one in enumerate(named)]


WATCHES_OVER: dict[str, Callable[[Rule, Any, Declaration], list[Watch]]] = {
    "series": _of_series,
    "copies": lambda rule, detector, declares: [ReplicaWatch(rule, detector)],
    "ranks": lambda rule, detector, declares: [RankWatch(rule, detector)],
    "peers": _of_peers,
    "moments": lambda rule, detector, declares: [LivenessWatch(rule, detector)],
    "losses": lambda rule, detector, declares: [LossWatch(rule, detector)],
    "frames": lambda rule, detector, declares: [FrameWatch(rule, detector)],
    "ends": lambda rule, detector, declares: [EndWatch(rule, detector)],
}
"""What a detector compares (`Declaration.over`) -> the watches that its rule becomes."""


def _fitted(detector: Any, statistic: str) -> Any:
    return detector.for_statistic(statistic) if declared(detector).is_fitted else detector


def _vectorised_of(detector: Any, statistic: str) -> Vectorised | None:
    """Return the vectorised algorithm that a detector is for a statistic; None: it scores and learns itself."""
    declares = declared(detector)
    is_vectorised = declares.is_vectorised and not declares.raw_values and statistic in STATISTICS
    vectorised: Vectorised | None = detector.vectorised(statistic) if is_vectorised else None
    return vectorised
