"""The numbers of rules: those that the language has and no others, and packs that change them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sentinel.detect import known_detectors
from sentinel.errors import RuleError
from sentinel.rules.language.listing import check_packs
from sentinel.rules.language.loader import builtin_packs, load_pack
from sentinel.rules.language.rule_numbers import QUIET_STEPS, numbers_of, written_change
from sentinel.rules.language.schema import Pack, Rule

ALL = load_pack(list(builtin_packs()))


@pytest.fixture(scope="module")
def pack() -> Pack:
    return load_pack()


def test_every_number_of_every_rule_is_taken_by_the_reader_of_packs(tmp_path: Path) -> None:
    """One pack with each number as it is: nothing in it is refused, and nothing of the rules changes."""
    changes = []
    for rule in ALL.rules:
        numbers = {one.name: one.value for one in numbers_of(rule) if one.value is not None}
        changes.append(written_change(rule, numbers).partition("\n")[2])
    (tmp_path / "same.yaml").write_text("rules:\n" + "".join(changes))

    changed = load_pack([*builtin_packs(), tmp_path / "same.yaml"])

    listed = {rule.name: {one.name: one.value for one in numbers_of(rule)} for rule in ALL.rules}
    assert {rule.name: {one.name: one.value for one in numbers_of(rule)} for rule in changed.rules} == listed
    assert sum(map(len, listed.values())) > 250, "numbers are found"


def test_a_number_is_told_with_its_value_its_default_and_its_meaning(pack: Pack) -> None:
    told = {one.name: one for one in numbers_of(pack.rule("rows-lost"))}

    assert (told[QUIET_STEPS].value, told[QUIET_STEPS].default, told[QUIET_STEPS].is_whole) == (500, 20, True)
    spike = {one.name: one for one in numbers_of(pack.rule("loss-spike"))}
    assert (spike["k"].is_whole, spike["window"].is_whole) == (False, True)
    assert all(one.meaning for one in spike.values())


def test_what_is_no_number_is_none_of_them(pack: Pack) -> None:
    turbulent = pack.rule("turbulent-norm")
    words = {"domain", "sides", "rearms"}

    assert not words & {one.name for one in numbers_of(turbulent)}
    assert {"threshold", "k", "warmup"} <= {one.name for one in numbers_of(turbulent)}


def test_numbers_of_a_detector_that_declares_no_types_are_told_by_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        def __init__(self, size: float = 2.0, times: int = 3, name: str = "x", flag: bool = True) -> None: ...

    known = {**known_detectors(), "Plain": Plain}
    monkeypatch.setattr("sentinel.rules.language.rule_numbers.known_detectors", lambda: known)
    rule = Rule(name="a", detector="Plain", match=ALL.rules[0].match)

    told = [(one.name, one.value, one.is_whole) for one in numbers_of(rule)]
    assert told == [("size", 2.0, False), ("times", 3, True), (QUIET_STEPS, 20, True)]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({}, "expected a number to change (k, floor"),
        ({"kk": 1.0}, 'has no number "kk"'),
        ({"domain": 1.0}, 'has no number "domain"'),
        ({"k\n  name: other": 1.0}, "has no number"),
    ],
)
def test_what_a_rule_does_not_have_is_refused(pack: Pack, numbers: dict[str, float], words: str) -> None:
    with pytest.raises(RuleError) as told:
        written_change(pack.rule("loss-spike"), numbers)

    assert words in str(told.value)


def test_a_change_of_a_rule_with_a_hostile_name_is_a_pack_with_that_name(tmp_path: Path) -> None:
    name = "a: [b] #'\"{c} - \U0001f4a5"
    rule = {"name": name, "detector": "Drift", "match": {"kind": "scalar"}}
    (tmp_path / "own.yaml").write_text(json.dumps({"rules": [rule]}, ensure_ascii=False), "utf-8")
    own = load_pack([tmp_path / "own.yaml"]).rules[-1]
    (tmp_path / "change.yaml").write_text(written_change(own, {"warmup": 77, QUIET_STEPS: 3}), "utf-8")

    result = check_packs([tmp_path / "own.yaml", tmp_path / "change.yaml"])
    changed = load_pack([tmp_path / "own.yaml", tmp_path / "change.yaml"]).rule(own.name)

    assert not result.errors
    assert changed.name == name
    assert (changed.args, changed.episode_quiet_steps, changed.detector) == ({"warmup": 77}, 3, "Drift")
