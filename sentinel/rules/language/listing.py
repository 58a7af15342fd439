"""What `sentinel rules check` and `sentinel rules list` say, as data."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from sentinel.detect import DETECTORS, known_detectors
from sentinel.document import Problem
from sentinel.rules.language.building import detector_arguments
from sentinel.rules.language.lint import Finding, lint_rule, lint_together
from sentinel.rules.language.loader import read_pack
from sentinel.rules.language.schema import RULE_KINDS, Pack, Rule

log = logging.getLogger("sentinel.rules")


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
        """0 clean, 1 errors, 3 lint only."""
        return 1 if self.errors else 3 if self.lint else 0


class ListedRule(msgspec.Struct, frozen=True, kw_only=True):
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

    @property
    def watched(self) -> str:
        """What it looks at, in words: `norm of wgrad/activation layers.*`."""
        kinds = "every kind" if self.kind == ("*",) else "/".join(self.kind)
        names = "" if self.names == ("*",) else f" {' '.join(self.names)}"
        groups = f", merged to {' '.join(self.aggregates)}" if self.aggregates else ""
        return f"{'/'.join(self.statistic)} of {kinds}{names}{groups}"


def check_packs(
    paths: Iterable[str | Path], *, builtin: bool = True, names: Mapping[str, Collection[str]] | None = None
) -> CheckResult:
    """Return all errors and lint of the packs in `paths`, merged as the daemon would merge them.

    names: kind -> the names of a run. Globs that match none of them are lint; those of the packs that come with Sentinel,
    which are for every run, are not looked at.
    """
    detectors = known_detectors()
    pack, problems = read_pack(paths, builtin=builtin, detectors=detectors)
    errors = tuple(_finding(problem) for problem in problems)
    lint = [finding for rule in pack.rules for finding in lint_rule(rule, names, detectors)]
    lint += lint_together(pack, read_pack((), builtin=True)[0] if builtin else Pack(rules=()))
    lint.sort(key=lambda finding: (finding.file, finding.line))
    pack_hash = "" if errors else pack.pack_hash
    return CheckResult(errors=errors, lint=tuple(lint), num_rules=len(pack.rules), pack_hash=pack_hash)


def list_rules(pack: Pack) -> list[ListedRule]:
    """Return one line a rule, in order, detector defaults filled in."""
    detectors = known_detectors()
    lines = []
    for rule in pack.rules:
        cls = detectors[rule.detector]
        defaults = {key: value for key, value in detector_arguments(cls).items() if value is not ...}
        lines.append(
            ListedRule(
                name=rule.name,
                detector=rule.detector,
                kind=("*",) if rule.match.kind == RULE_KINDS else rule.match.kind,
                names=rule.match.name,
                aggregates=tuple(one.definition for one in rule.match.aggregate),
                statistic=_statistics(rule, cls),
                severity=rule.severity.value,
                actions=rule.actions,
                args={**defaults, **rule.args},
                description=rule.description or cls.declares.summary,
                source=rule.source,
            )
        )
    return lines


def _statistics(rule: Rule, detector: type[Any]) -> tuple[str, ...]:
    """Return what a rule looks at: of one without a limit that takes raw values nothing but what is no number."""
    named = rule.statistics(detector.declares.statistics)
    counts_only = detector is DETECTORS["AnomalyNan"] and rule.args.get("threshold") is None and not rule.args.get("compat")
    return ("nans", "infs") if counts_only else named


def list_detectors() -> list[dict[str, Any]]:
    """Return what there is to know of every detector, other packages' included; what they offer in vain is logged.

    Each: name, summary, doc, statistics that it watches by default, args with their defaults (null: none, or to be given),
    args_doc with what each argument means, needed: arguments without a default.
    """
    found = []
    detectors = known_detectors()
    for name in detectors:
        if why := detectors.why_not(name):
            log.warning("%s; it is left out, mend or uninstall the package that offers it", why)
            continue
        cls = detectors[name]
        args = detector_arguments(cls)
        documented = argument_docs(cls)
        found.append(
            {
                "name": name,
                "summary": cls.declares.summary,
                "doc": inspect.getdoc(cls) or "",
                "statistics": list(cls.declares.statistics),
                "args": {key: None if value is ... else value for key, value in args.items()},
                "args_doc": {key: documented.get(key, "") for key in args},
                "needed": [key for key, value in args.items() if value is ...],
            }
        )
    return found


def argument_docs(cls: type[Any]) -> dict[str, str]:
    """Return argument -> the text that stands under its field; nothing where there is no source to read."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__[:-1]):
        module = sys.modules.get(one.__module__)
        found.update(_field_docs(module).get(one.__qualname__, {}) if module is not None else {})
    return found


@functools.lru_cache(maxsize=256)
def _field_docs(module: ModuleType) -> Mapping[str, Mapping[str, str]]:
    """Return class -> field -> the text under it, of every class of a module: read once, for detectors share modules."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    found: dict[str, Mapping[str, str]] = {}
    waiting: list[tuple[str, ast.stmt]] = [("", one) for one in tree.body]
    for within, node in waiting:
        if isinstance(node, ast.ClassDef):
            found[within + node.name] = dict(_documented(node.body))
            waiting += [(f"{within}{node.name}.", one) for one in node.body]
        elif isinstance(node, ast.FunctionDef):
            waiting += [(f"{within}{node.name}.<locals>.", one) for one in node.body]
    return found


def _documented(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(body):
        said = text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else None
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(said, str):
            yield field.target.id, " ".join(said.split())


def _finding(problem: Problem) -> Finding:
    return Finding(file=problem.file, line=problem.line, message=problem.message)
