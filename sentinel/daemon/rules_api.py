"""`/api/v1/rules`: the rules in force of a run, what each said so far, and what it would say with other numbers."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from sentinel.daemon.judged_by_rule import JudgedByRule
from sentinel.daemon.rule_tallies import RuleTallies, RuleTally
from sentinel.daemon.series_api import Busy
from sentinel.daemon.what_if_process import ask_apart
from sentinel.detect import known_detectors
from sentinel.detect.declaration import Over
from sentinel.errors import ConfigError
from sentinel.judge.config import JudgingConfig
from sentinel.judge.packs import RulePacks
from sentinel.judge.what_if import Question, is_builtin
from sentinel.known_words import nearest
from sentinel.rules.language.listing import ListedRule, list_rules
from sentinel.rules.language.rule_numbers import numbers_of, written_change
from sentinel.rules.language.schema import Pack, Rule
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

if TYPE_CHECKING:
    from sentinel.daemon.run_status import RunStatus

WAIT_S = 20.0
"""One `what if` is judged at a time; the next waits so long: its page may have asked before, and thought better of it."""
ALWAYS_AT_WORK = frozenset({"moments", "ends", "losses", "frames"})
"""What detectors compare that every run has: ranks that live, end, and write."""


class WhatIfRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client asks: a rule of a run, and other numbers for it."""

    run: str
    rule: str
    numbers: dict[str, float | int]
    """Arguments of its detector, or `episode_quiet_steps`."""

    def __post_init__(self) -> None:
        for name, value in self.numbers.items():
            if not -1e300 <= value <= 1e300:  # NaN is not.
                raise ConfigError(f"numbers.{name[:80]}: expected a number below 1e300, got {value!r:.40}")


class RulesSource(Protocol):
    """What of a served run is asked."""

    name: str
    paths: RunPaths
    journal: Journal

    status: RunStatus


class RuleQueries:
    """Answers requests from any thread; nothing of it is done in the thread that judges."""

    def __init__(self, packs: RulePacks) -> None:
        self._packs = packs
        self._tallies: weakref.WeakKeyDictionary[Journal, RuleTallies] = weakref.WeakKeyDictionary()
        self._listed: tuple[str, list[tuple[Rule, Over, dict[str, Any]]]] = ("", [])
        self._asking = threading.Lock()

    def rules(self, run: RulesSource) -> dict[str, Any]:
        """Return the rules in force, in the order of the pack, each with what it said of a run."""
        judged = run.status.judged_by_rule()
        tallies, is_whole = self._tallies.setdefault(run.journal, RuleTallies(run.journal.found)).read()
        return {
            "run": run.name,
            "pack_hash": self._packs.pack_hash,
            "num_steps": judged.num_steps,
            "is_counted": is_whole,
            "is_cut": run.journal.cut.seq > 0,
            "rules": [
                {
                    **described,
                    **_told(tallies.get(rule.name, RuleTally())),
                    "num_points": judged.points.get(rule.name, 0),
                    "blind": _blindness(rule, over, judged),
                }
                for rule, over, described in self._described()
            ],
        }

    def what_if(self, run: RulesSource, request: WhatIfRequest, judging: JudgingConfig) -> dict[str, Any]:
        """Return what a rule with other numbers would have said, and the pack that gives it those.

        RuleError for a rule that is not in force and for a change that no pack may have; StoreError where the run cannot be
        read again; Busy while another is judged.
        """
        rule = _rule_of(self._packs.pack, request.rule)
        change = written_change(rule, request.numbers)
        question = Question(
            run_dir=str(run.paths.run_dir), state=str(run.paths.state), rule=rule.name, in_force=self._packs.pack,
            packs=tuple(map(str, self._packs.paths)), change=change, judging=judging,
        )  # fmt: skip
        if not self._asking.acquire(timeout=WAIT_S):
            raise Busy("another what-if is being judged; try again in a moment")
        try:
            answer = ask_apart(question)
        finally:
            self._asking.release()
        before = {one.name: one.value for one in numbers_of(rule)}
        return {
            "run": run.name,
            "numbers": {name: [before[name], value] for name, value in request.numbers.items()},
            "pack": _commented(change, run.name, answer.first_step, answer.last_step),
            "written_in": "" if is_builtin(rule) else rule.source,
            **msgspec.to_builtins(answer),
        }

    def _described(self) -> list[tuple[Rule, Over, dict[str, Any]]]:
        """Return each rule in force, what its detector compares, and what is known of it in any run."""
        pack, pack_hash = self._packs.pack, self._packs.pack_hash
        if self._listed[0] != pack_hash:
            detectors = known_detectors()
            rules = [
                (rule, detectors[rule.detector].declares.over, _described(rule, listed))
                for rule, listed in zip(pack.rules, list_rules(pack), strict=True)
            ]
            self._listed = (pack_hash, rules)
        return self._listed[1]


def _rule_of(pack: Pack, name: str) -> Rule:
    try:
        return pack.rule(name)
    except KeyError:
        known = [rule.name for rule in pack.rules]
        raise ConfigError(f'rule "{name[:80]}": expected one that is in force{nearest(name[:80], known)}') from None


def _described(rule: Rule, listed: ListedRule) -> dict[str, Any]:
    return {
        "name": rule.name,
        "description": listed.description,
        "detector": rule.detector,
        "watched": listed.watched,
        "kinds": listed.kind,
        "severity": listed.severity,
        "actions": listed.actions,
        "numbers": msgspec.to_builtins(numbers_of(rule)),
        "source": "" if is_builtin(rule) else rule.source,
    }


def _told(tally: RuleTally) -> dict[str, Any]:
    return {
        "onsets": tally.onsets,
        "num_onsets": sum(tally.onsets.values()),
        "last": None if tally.last is None else {**msgspec.to_builtins(tally.last), "incident": tally.incident},
    }


def _blindness(rule: Rule, over: Over, judged: JudgedByRule) -> list[str]:
    """Return what a rule is blind to, in words; nothing where it sees what it needs, or has judged no step yet."""
    known = judged.blind.get(rule.name, [])
    # A rule that is in force from the next step on has no points, not none.
    if known or not judged.num_steps or judged.points.get(rule.name, 1) or over in ALWAYS_AT_WORK:
        return known
    globs = " or ".join(rule.match.name[:4]) + (" ..." if len(rule.match.name) > 4 else "")
    names = "" if rule.match.name == ("*",) else f" named {globs}"
    if rule.match.kind == ("scalar",):
        return [f"no value{names} was logged in any step that it judged"]
    if over == "copies":
        return ["no rank held a copy of what another one holds"]
    if over == "ranks":
        return ["no rank said how long it took and waited"]
    kinds = ", ".join(kind for kind in rule.match.kind if kind != "scalar")
    return [f"nothing of kind {kinds}{names} came in any step that it judged: it is not measured, or too seldom"]


def _commented(change: str, run: str, first: int | None, last: int | None) -> str:
    """Return a pack with what it was tried on above it. run: names come from trainers, and are put on one line."""
    steps = f", steps {first} to {last}" if first is not None else ""
    return (
        f"# Tried on run {msgspec.json.encode(run).decode()}{steps}. Put it beside your rules and say --rules FILE;\n"
        "# sentinel rules check FILE says whether it is sound.\n" + change
    )
