"""Runs tests of rules: inputs on paper through the daemon's own judge, what came held against what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.errors import ConfigError
from sentinel.incident import Incident
from sentinel.ingest.synthetic_views import SyntheticSeries, synthetic_views
from sentinel.judge.judge import Judge
from sentinel.rules.language.rule_test_file import Expected, RuleTest, RuleTestFile
from sentinel.rules.language.schema import Pack

MAX_SHOWN = 5
"""Most onsets that are named beside one that did not come: a bound on the length of a message."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as expected."""

    file: str
    line: int
    test: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f'{self.file}:{self.line}: test "{self.test}":\n    expected: {self.expected}\n    got:      {self.got}'


class RuleTestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one test brought."""

    file: str
    line: int
    test: str
    num_steps: int
    num_points: int
    """Points that the rules judged."""
    failures: tuple[Failure, ...] = ()


def run_rule_test(file: RuleTestFile, rule_test: RuleTest, pack: Pack) -> RuleTestResult:
    """Judge the test's inputs by `pack` and compare."""
    judge = Judge(pack)
    series = [
        SyntheticSeries(name=one.name, kind=one.kind, values=one.values, ranks=one.ranks, noise=one.noise)
        for one in rule_test.series
    ]
    onsets: list[Anomaly] = []
    incidents: dict[str, Incident] = {}
    num_steps = 0
    try:
        for view in synthetic_views(
            rule_test.name, series, num_ranks=rule_test.num_ranks, first_step=rule_test.first_step, skipped=rule_test.skipped
        ):
            judgement = judge.judge(None, view)
            onsets += [one for one in judgement.anomalies if one.event == "onset"]
            incidents.update((one.id, one) for one in judgement.incidents)
            num_steps += 1
    except ConfigError as error:
        failure = Failure(
            file=file.path,
            line=rule_test.line,
            test=rule_test.name,
            expected="statistics that a tensor can have",
            got=str(error),
        )
        return RuleTestResult(
            file=file.path, line=rule_test.line, test=rule_test.name, num_steps=num_steps, num_points=0, failures=(failure,)
        )
    failures: list[Failure] = []
    if rule_test.expect is not None:
        seen = [one for one in onsets if _counts(one, rule_test)]
        failures += _compare(file, rule_test, rule_test.expect, seen, _of_onset, _onset_line, "an alarm")
    if rule_test.incidents is not None:
        known = [one for one in incidents.values() if one.severity.level >= rule_test.min_severity.level]
        failures += _compare(file, rule_test, rule_test.incidents, known, _of_incident, _incident_line, "an incident")
    return RuleTestResult(
        file=file.path,
        line=rule_test.line,
        test=rule_test.name,
        num_steps=num_steps,
        num_points=sum(judge.num_points_judged.values()),
        failures=tuple(sorted(failures, key=lambda one: one.line)),
    )


def unknown_rules(rule_test: RuleTest, pack: Pack) -> list[tuple[int, str]]:
    """Return (line, rule) of what a test names and the pack does not have: such an expectation could never come true."""
    known = {rule.name for rule in pack.rules}
    named = [(one.line, str(one.fields.get("rule"))) for one in rule_test.expect or ()]
    return [
        (line, rule) for line, rule in [*named, *((rule_test.line, rule) for rule in rule_test.only)] if rule not in known
    ]


def _counts(anomaly: Anomaly, rule_test: RuleTest) -> bool:
    return anomaly.severity.level >= rule_test.min_severity.level and (not rule_test.only or anomaly.rule in rule_test.only)


def _compare(
    file: RuleTestFile, rule_test: RuleTest, wanted: Sequence[Expected], seen: Sequence[Any], read: Any, say: Any, what: str
) -> list[Failure]:
    """Return what is missing and what is too much: each expectation takes the first that fits and is not taken."""
    failures = []
    left = list(seen)
    missing = []
    # Those that say most choose first, so that a vague one takes nothing from them.
    for one in sorted(wanted, key=lambda one: -len(one.fields)):
        found = next((got for got in left if _fits(one, read(got))), None)
        if found is None:
            missing.append(one)
        else:
            left.remove(found)
    for one in missing:
        near = sorted(left, key=lambda got: -sum(_is_equal(read(got).get(k), v) for k, v in one.fields.items()))
        shown = "; ".join(say(got) for got in near[:MAX_SHOWN]) or "none"
        more = f"; and {len(near) - MAX_SHOWN} more" if len(near) > MAX_SHOWN else ""
        expected = ", ".join(f"{key} {value}" for key, value in one.fields.items())
        failures.append(
            Failure(file=file.path, line=one.line, test=rule_test.name, expected=f"{what}: {expected}", got=f"{shown}{more}")
        )
    if not missing:
        # With something missing what is left was shown beside it.
        none = f"no more {what.partition(' ')[2]}s"
        failures += [
            Failure(file=file.path, line=rule_test.line, test=rule_test.name, expected=none, got=say(one)) for one in left
        ]
    return failures


def _fits(expected: Expected, got: dict[str, Any]) -> bool:
    return all(_is_equal(got.get(key), value) for key, value in expected.fields.items())


def _is_equal(got: Any, wanted: Any) -> bool:
    return list(got) == list(wanted) if isinstance(wanted, list) and isinstance(got, tuple) else bool(got == wanted)


def _of_onset(one: Anomaly) -> dict[str, Any]:
    named = {"scalar" if one.kind == "scalar" else "tensor": one.tag_name}
    return {
        "rule": one.rule, "step": one.step, "kind": one.kind, "statistic": one.statistic, "rank": one.rank,
        "severity": one.severity.value, "detector": one.detector, **named,
    }  # fmt: skip


def _onset_line(one: Anomaly) -> str:
    what = f"scalar {one.tag_name}" if one.kind == "scalar" else f"{one.kind} {one.tag_name} {one.statistic}"
    rank = "" if one.rank is None else f", rank {one.rank}"
    return f"rule {one.rule}, step {one.step}, {what}{rank}, {one.severity.value} ({one.message})"


def _of_incident(one: Incident) -> dict[str, Any]:
    return {
        "opened": one.opened_step, "verdict": one.suspected, "state": one.state, "severity": one.severity.value,
        "skip_steps": one.skip_steps,
    }  # fmt: skip


def _incident_line(one: Incident) -> str:
    return f"opened {one.opened_step}, verdict {one.suspected}, state {one.state}, {one.severity.value} ({one.title})"
