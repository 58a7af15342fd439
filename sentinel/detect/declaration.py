"""Declaration: the statistics, groups and words of a detector, in one value that is read when its rule is bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import msgspec

from sentinel.errors import ConfigError

Over = Literal["series", "copies", "ranks", "peers", "moments", "losses", "frames", "ends"]
"""What a detector compares, and so which contract it keeps: see `Declaration.over`."""
METHODS: dict[str, tuple[str, ...]] = {
    "series": ("state", "score", "learn"),
    "copies": ("state", "score", "learn"),
    "ranks": ("state", "score", "learn"),
    "peers": ("state", "score", "learn"),
    "moments": ("state", "score_at", "learn_step"),
}
"""What it compares -> the methods that its contract asks for; what is not here only Sentinel's own detectors compare."""
CONTRACTS = {
    "series": "SeriesDetector", "copies": "GroupDetector", "ranks": "GroupDetector", "peers": "GroupDetector",
    "moments": "LivenessDetector",
}  # fmt: skip


class Declaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a detector is asked for, what it is handed, and in which words its anomalies are reported.

    A class attribute of the detector, called `declares`. Raises ConfigError where a field's value is not valid.
    """

    summary: str
    """One sentence for `sentinel rules list`."""
    statistics: tuple[str, ...] = ("norm",)
    """Statistics watched when a rule names none; `("value",)`: it is for logged values."""
    over: Over = "series"
    """`series`: each tensor's or logged value's own past (`SeriesDetector`). Groups (`GroupDetector`): `copies` of a tensor,
    whose columns are `checksum` (uint64), at least two of which differ; `ranks` of a step, `step_s` and `wait_s` (NaN: not
    known) and `stage`; `peers`, ranks that do the same work on other data, `value` (float64, NaN: not measured) and `is_own`
    (bool: the rank measured it itself; what is logged may be a mean over ranks). `moments`: ranks, by the time that passes
    (`LivenessDetector`). `losses`, `frames` and `ends` of ranks are Sentinel's own."""
    judges: Literal["tensors", "own_rows", "counts"] = "tensors"
    """Of series: `tensors`, as merged over ranks; `own_rows`, each rank's own row by itself; `counts`, whether a row counts
    a NaN or an infinity, and no statistic. One that keeps no state judges each rank's own rows whatever it says."""
    raw_values: bool = False
    """Hand it NaN and infinities as they are; false: a series whose value is not finite sits the step out, scores 0.0 and
    keeps its state, so that it never learns what is no number."""
    is_vectorised: bool = False
    """Its method `vectorised(statistic)` returns the algorithm of `sentinel.detect.vectorised` that it is for a statistic,
    which runs in C."""
    is_fitted: bool = False
    """Its method `for_statistic(statistic)` returns a copy of it that is fitted to a statistic."""
    rearms: bool = False
    """Its method `rearm(state)` is called where what came before is no measure any more: a resume, a restarted schedule."""
    is_rolling: bool = False
    """It is a rolling median of logged values: it knows spikes that come again, and may judge beside reference runs."""
    trades: Literal["", "points", "levels"] = ""
    """Losses that rise while another one falls, as sides of a game and terms of a sum may, are notes: judged by their newest
    points, or by their levels, which `improved` and `paid_by` tell; empty: they are not."""
    per_input: bool = False
    """Of peers: compare what a module puts out over what went in."""
    max_sites: int = 64
    """Of peers: sites of a stage that are compared, evenly over its depth."""
    takes_all: bool = False
    """Of peers: hand it all groups of a step at once, for its evidence says which member is meant; false: of thousands of
    ranks it is handed some groups after others, while these are in a cache."""
    is_limit: bool = False
    """Its baseline is a limit that somebody set."""
    phrase: str = ""
    """What its anomalies usually mean, for their message."""
    phrase_up: str = ""
    """The same of what rose, where that means something else."""
    phrase_down: str = ""
    """The same of what fell."""
    with_arguments: Callable[[Any], Declaration] | None = None
    """Returns what is declared of a detector that was built, where its arguments change it; None: they change nothing."""

    def __post_init__(self) -> None:
        if self.over not in get_args(Over):
            raise ConfigError(f"declares.over must be among {', '.join(get_args(Over))}, got {self.over!r:.100}")
        names: Any = self.statistics
        if not isinstance(names, tuple | list) or not all(isinstance(one, str) for one in names):
            raise ConfigError(f"declares.statistics must be a tuple of names, got {names!r:.100}")
        if not isinstance(self.summary, str):
            raise ConfigError(f"declares.summary must be a sentence, got {self.summary!r:.100}")

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that a detector which declares this must have; empty: only Sentinel's own may."""
        own = METHODS.get(self.over, ())
        more = {"vectorised": self.is_vectorised, "for_statistic": self.is_fitted, "rearm": self.rearms}
        return (*own, *(name for name, is_needed in more.items() if is_needed))

    def meaning(self, direction: int) -> str:
        """Return what its anomalies mean: +1 of what rose, -1 of what fell; empty where it says nothing."""
        side = self.phrase_up if direction > 0 else self.phrase_down if direction < 0 else ""
        return side or self.phrase


def declared(detector: Any) -> Declaration:
    """Return what a detector declares, with what its arguments change of it."""
    own: Declaration = detector.declares
    return own if own.with_arguments is None else own.with_arguments(detector)
