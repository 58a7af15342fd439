"""What `sentinel rules check` and `sentinel rules list` say, as data."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sentinel.aggregate import matches, nearest_names
from sentinel.anomaly import Severity
from sentinel.detect import known_detectors
from sentinel.rules.loader import PACKS, Problem, detector_arguments, read_pack
from sentinel.rules.schema import RULE_KINDS, Pack, Rule

_PLAIN_PREFIX = re.compile(r"[^*?\[\]]*\.\d+")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to say about a pack."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking packs."""

    errors: tuple[Finding, ...]
    """What makes the pack unusable."""
    lint: tuple[Finding, ...]
    """What is allowed and probably not meant."""
    num_rules: int
    """Rules that are on, defaults merged in."""
    pack_hash: str
    """Hash of those rules; empty when there are errors."""

    @property
    def exit_code(self) -> int:
        """0 clean, 1 errors, 3 lint only (DESIGN.md, section 11)."""
        return 1 if self.errors else 3 if self.lint else 0


class RuleLine(msgspec.Struct, frozen=True, kw_only=True):
    """One rule that is on, for people."""

    name: str
    detector: str
    kind: tuple[str, ...]
    """Kinds watched; `*` alone: all."""
    names: tuple[str, ...]
    aggregates: tuple[str, ...]
    """Groups watched instead of single tensors, each as NAME=GLOB,GLOB."""
    statistic: tuple[str, ...]
    severity: str
    actions: tuple[str, ...]
    args: dict[str, Any]
    """Every argument of the detector with the value it has."""
    description: str
    source: str


def check_packs(
    paths: Iterable[str | Path], *, builtin: bool = True, names: Mapping[str, Collection[str]] | None = None
) -> CheckResult:
    """Return all errors and lint of the packs in `paths`, merged as the daemon would merge them.

    names: kind -> the names of a run. Globs that match none of them are lint; those of the packs that come with Sentinel,
    which are for every run, are not looked at.
    """
    pack, problems = read_pack(paths, builtin=builtin)
    errors = tuple(_finding(problem) for problem in problems)
    lint = tuple(finding for rule in pack.rules for finding in _lint(rule, names))
    return CheckResult(errors=errors, lint=lint, num_rules=len(pack.rules), pack_hash="" if errors else pack.pack_hash)


def list_rules(pack: Pack) -> list[RuleLine]:
    """Return one line a rule, in order, detector defaults filled in."""
    detectors = known_detectors()
    lines = []
    for rule in pack.rules:
        cls = detectors[rule.detector]
        defaults = {key: value for key, value in detector_arguments(cls).items() if value is not ...}
        lines.append(
            RuleLine(
                name=rule.name,
                detector=rule.detector,
                kind=("*",) if rule.match.kind == RULE_KINDS else rule.match.kind,
                names=rule.match.name,
                aggregates=tuple(one.definition for one in rule.match.aggregate),
                statistic=rule.statistics(tuple(getattr(cls, "statistics", ()))),
                severity=rule.severity.value,
                actions=rule.actions,
                args={**defaults, **rule.args},
                description=rule.description or str(getattr(cls, "summary", "")),
                source=rule.source,
            )
        )
    return lines


def list_detectors() -> list[dict[str, Any]]:
    """Return name, summary and default arguments of every detector, other packages' included."""
    return [
        {
            "name": name,
            "summary": str(getattr(cls, "summary", "")),
            "args": {key: None if value is ... else value for key, value in detector_arguments(cls).items()},
        }
        for name, cls in known_detectors().items()
    ]


def _finding(problem: Problem) -> Finding:
    return Finding(file=problem.file, line=problem.line, message=problem.message)


def _lint(rule: Rule, names: Mapping[str, Collection[str]] | None) -> list[Finding]:
    notes = []
    if rule.severity is Severity.CRITICAL and "notify" not in rule.actions:
        notes.append('is critical, yet its actions tell nobody; add "notify"')
    named = [("name", glob) for glob in rule.match.name]
    named += [("aggregate", glob) for one in rule.match.aggregate for glob in one.globs]
    for key, glob in named if rule.match.kind != ("scalar",) else ():
        if _PLAIN_PREFIX.fullmatch(glob):
            notes.append(f'match.{key} "{glob}" takes that one name only; "{glob}.*" takes what is inside it')
    file, _, line = rule.source.rpartition(":")
    if names is not None and Path(file).parent != PACKS:
        known = {name for kind in rule.match.kind for name in names.get(kind, ())}
        for key, glob in named:
            if not any(matches(glob, name) for name in known):
                kinds = "any kind" if rule.match.kind == RULE_KINDS else "/".join(rule.match.kind)
                near = f"; nearest: {', '.join(nearest_names([glob], known, 3))}" if known else ", which it has none of"
                notes.append(f'match.{key} "{glob}" matches no name of {kinds} in that run{near}')
    return [Finding(file=file, line=int(line), message=f'rule "{rule.name}": {note}') for note in notes]
