"""What is allowed in a pack and probably not meant."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sentinel.aggregate import matches, nearest_names
from sentinel.anomaly import Severity
from sentinel.rules.language.loader import PACKS
from sentinel.rules.language.schema import RULE_KINDS, Pack, Rule

_PLAIN_PREFIX = re.compile(r"[^*?\[\]]*\.\d+")

RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("std", "var", "norm", "rms", "absmax", "nans", "infs"), (0.0, math.inf)), "zeros": (0.0, 1.0),
    "kurtosis": (1.0, math.inf),
}  # fmt: skip
"""Statistic -> the values it can have; a kurtosis is at least 1 (Jensen), a share at most 1."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to say about a pack."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def lint_rule(rule: Rule, names: Mapping[str, Collection[str]] | None, detectors: Mapping[str, type[Any]]) -> list[Finding]:
    """Return what is odd about a rule by itself. names: kind -> the names of a run, where one is known."""
    notes = []
    if rule.severity is Severity.CRITICAL and "notify" not in rule.actions:
        notes.append('is critical, yet its actions tell nobody; add "notify"')
    named = [("name", glob) for glob in rule.match.name]
    named += [("aggregate", glob) for one in rule.match.aggregate for glob in one.globs]
    for key, glob in named if rule.match.kind != ("scalar",) else ():
        if _PLAIN_PREFIX.fullmatch(glob):
            notes.append(f'match.{key} "{glob}" takes that one name only; "{glob}.*" takes what is inside it')
    for glob in rule.match.name:
        if glob != glob.strip():
            notes.append(f'match.name "{glob}" begins or ends with a blank: no name does')
        if any(sign in glob for sign in ("\\", "^", "$", "(", ".+", "{")):
            notes.append(f'match.name "{glob}" is a glob, no regular expression: * is any text, ? and [0-9] one sign')
        elif glob.count("[") > glob.count("]"):
            notes.append(f'match.name "{glob}" has a "[" without "]": it takes a name with that sign in it')
    notes += _limits(rule, detectors[rule.detector])
    found = [_finding(rule, note) for note in notes]
    # A pack that comes with Sentinel is for every run, whoever changes something else about its rule.
    file, _, line = rule.match_source.rpartition(":")
    if names is not None and file and Path(file).resolve().parent != PACKS.resolve():
        known = {name for kind in rule.match.kind for name in names.get(kind, ())}
        for key, glob in named:
            if not any(matches(glob, name) for name in known):
                kinds = "any kind" if rule.match.kind == RULE_KINDS else "/".join(rule.match.kind)
                near = f"; nearest: {', '.join(nearest_names([glob], known, 3))}" if known else ", which it has none of"
                note = f'rule "{rule.name}": match.{key} "{glob}" matches no name of {kinds} in that run{near}'
                found.append(Finding(file=file, line=int(line), message=note))
    return found


def lint_together(pack: Pack, builtin: Pack) -> list[Finding]:
    """Return what is odd about rules beside each other, and over those of the default pack."""
    found = []
    seen: dict[bytes, Rule] = {}
    of_default = {rule.name: rule for rule in builtin.rules}
    for rule in pack.rules:
        # With another severity or other actions it has a purpose of its own.
        bare = {**rule.unlocated(), "name": "", "description": ""}
        other = seen.setdefault(msgspec.json.encode(bare, order="sorted"), rule)
        if other is not rule:
            found.append(_finding(rule, f'does what rule "{other.name}" ({other.source}) does: all is told twice'))
        below = of_default.get(rule.name)
        if below is not None and below.detector != rule.detector:
            what = f"replaces the rule of that name of the default pack, whose detector is {below.detector}"
            found.append(_finding(rule, f"{what}: nothing does its work now; call yours otherwise to have both"))
    if not pack.rules:
        found.append(Finding(file="rules", line=1, message="no rule is on: nothing will ever be told"))
    return found


def _limits(rule: Rule, detector: type[Any]) -> list[str]:
    """Say of absolute limits that no value, or every value, is past them."""
    statistics = rule.statistics(detector.declares.statistics)
    above, below = _number(rule, "above"), _number(rule, "below")
    if rule.detector != "Threshold":
        above, below = (_number(rule, "threshold") if rule.detector == "AnomalyNan" else None), None
    notes = []
    if above is not None and below is not None and above < below:
        notes.append(f"above {above:g} and below {below:g} leave no value that is well: every point is anomalous")
    for statistic in statistics:
        least, most = RANGES.get(statistic, (-math.inf, math.inf))
        if above is not None and above >= most:
            notes.append(f"never fires: {_article(statistic)} is never above {above:g}")
        if below is not None and below <= least:
            notes.append(f"never fires: {_article(statistic)} is never below {below:g}")
        if above is not None and above < least:
            notes.append(f"fires at every point: {_article(statistic)} is always above {above:g}")
        if below is not None and below > most:
            notes.append(f"fires at every point: {_article(statistic)} is always below {below:g}")
    return notes


def _article(statistic: str) -> str:
    return {"nans": "a number of NaNs", "infs": "a number of infinities", "zeros": "a share of zeros"}.get(
        statistic, f"a value of {statistic}"
    )


def _number(rule: Rule, key: str) -> float | None:
    value = rule.args.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _finding(rule: Rule, note: str) -> Finding:
    file, _, line = rule.source.rpartition(":")
    return Finding(file=file, line=int(line), message=f'rule "{rule.name}": {note}')
