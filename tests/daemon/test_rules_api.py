"""`/api/v1/rules`: what each rule in force said of a run, which are blind, and a what-if in a process of its own."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.daemon import rule_tallies, rules_api, what_if_process
from sentinel.daemon.rule_tallies import RuleTallies
from sentinel.daemon.rules_api import RuleQueries, WhatIfRequest
from sentinel.daemon.series_api import Busy
from sentinel.daemon.serving import ServedRun
from sentinel.errors import ConfigError, RuleError, StoreError, TookTooLong
from sentinel.judge.config import JudgingConfig
from sentinel.testing import BlowUp, LossJump, Nan

from ..support.serving import NOW, catch_up, loaded_packs, served, small_run

JUMP, BAD, STEPS = 50, 70, 80
OWN = """
rules:
- {name: own-limit, detector: Threshold, args: {above: 1000.0}, match: {kind: scalar, name: [loss]}, severity: info}
- {name: nobody, detector: Threshold, args: {above: 1.0}, match: {kind: scalar, name: [reward]}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedRun]:
    folder = tmp_path_factory.mktemp("rules")
    (folder / "own.yaml").write_text(OWN)
    source = small_run(folder / "run")
    source.plant(LossJump(step=JUMP), BlowUp(step=60, module="layers.1.mlp", factor=300.0), Nan(step=BAD, module="layers.2"))
    source.write(STEPS)
    one = served(folder / "run", packs=loaded_packs(folder / "own.yaml"))
    catch_up(one)
    yield one
    one.close()


@pytest.fixture(scope="module")
def queries(run: ServedRun) -> RuleQueries:
    return RuleQueries(loaded_packs(run.paths.run_dir.parent / "own.yaml"))


def asked(queries: RuleQueries, run: ServedRun, rule: str, **numbers: Any) -> dict[str, Any]:
    return queries.what_if(run, WhatIfRequest(run="run", rule=rule, numbers=numbers), JudgingConfig())


def test_each_rule_says_how_often_it_spoke_and_when_last(run: ServedRun, queries: RuleQueries) -> None:
    onsets = [one for _, body in run.journal.found.bodies("anomalies") if (one := json.loads(body))["event"] == "onset"]
    expected = Counter(one["rule"] for one in onsets)

    told = queries.rules(run)

    assert {one["name"]: one["num_onsets"] for one in told["rules"] if one["num_onsets"]} == expected
    assert (told["num_steps"], told["is_counted"], told["is_cut"]) == (STEPS, True, False)
    rules = {one["name"]: one for one in told["rules"]}
    spike = rules["loss-spike"]
    assert (spike["last"]["step"], spike["last"]["tag_name"], spike["onsets"]) == (JUMP, "loss", {"critical": 1})
    incidents = {one["id"]: one for _, body in run.journal.found.bodies("incidents") if (one := json.loads(body))}
    assert incidents[spike["last"]["incident"]]["opened_step"] == JUMP
    assert rules["loss-drift"]["last"] is None and rules["loss-drift"]["num_onsets"] == 0
    assert (rules["own-limit"]["source"].rpartition("/")[2], spike["source"]) == ("own.yaml:3", "")


def test_rules_without_anything_to_look_at_are_blind_and_no_others(run: ServedRun, queries: RuleQueries) -> None:
    blind = {one["name"]: one["blind"] for one in queries.rules(run)["rules"] if one["blind"]}

    assert blind["nobody"] == ["no value named reward was logged in any step that it judged"]
    assert "kind attention" in blind["attention-entropy"][0] and "copy" in blind["replica-divergence"][0]
    assert not blind.keys() & {"loss-spike", "non-finite", "turbulent-norm", "own-limit", "stale-rank", "run-ended"}


def test_before_the_first_step_no_rule_is_called_blind(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    with_nothing = served(tmp_path / "run")
    told = RuleQueries(loaded_packs()).rules(with_nothing)
    with_nothing.close()

    assert told["num_steps"] == 0 and not any(one["blind"] or one["last"] for one in told["rules"])


def test_a_rule_that_is_in_force_from_the_next_step_on_is_not_called_blind(run: ServedRun, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(OWN.replace("nobody", "newcomer"))
    told = {one["name"]: one for one in RuleQueries(loaded_packs(tmp_path / "more.yaml")).rules(run)["rules"]}

    assert told["newcomer"]["blind"] == [] and told["attention-entropy"]["blind"] != []


def test_what_was_counted_is_not_counted_again_and_what_comes_is(run: ServedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_tallies, "PAGE", 5)
    monkeypatch.setattr(rule_tallies, "COUNT_S", 0.0)
    tallies, looks = RuleTallies(run.journal.found), 0
    while not (answer := tallies.read())[1]:
        looks += 1

    whole = RuleTallies(run.journal.found)
    monkeypatch.setattr(rule_tallies, "COUNT_S", 60.0)
    assert looks > 3 and answer == whole.read() == whole.read()


def test_after_a_restart_points_and_counts_are_as_before(tmp_path: Path) -> None:
    source = small_run(tmp_path / "run").plant(Nan(step=12, module="layers.2"))
    source.write(20)
    told = []
    for _ in range(2):
        one = served(tmp_path / "run")
        catch_up(one)
        told.append(RuleQueries(loaded_packs()).rules(one))
        one.finish(NOW, is_over=False, deadline=float("inf"))
        one.close()

    assert told[0] == told[1]


@pytest.mark.slow
def test_a_what_if_is_answered_by_another_process_with_a_pack_to_keep(
    run: ServedRun, queries: RuleQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what_if_process, "LIMIT_S", 300.0)
    told = asked(queries, run, "loss-spike", k=1000.0)

    assert [(one["what"], one["step"]) for one in told["alarms"]] == [("goes", JUMP)]
    assert (told["numbers"], told["stopped"], told["written_in"]) == ({"k": [8.3, 1000.0]}, "", "")
    assert told["pack"].startswith('# Tried on run "run", steps 0 to 79.')
    assert "- name: loss-spike\n  args:\n    k: 1000.0\n" in told["pack"]
    own = asked(queries, run, "own-limit", above=0.5)
    assert own["difference"]["onsets"][0] > 0 == own["difference"]["onsets"][1]
    assert own["written_in"].endswith("own.yaml:3")
    with pytest.raises(RuleError, match=r"what-if\.yaml:\d+: .*window"):
        asked(queries, run, "loss-spike", window=-1)


@pytest.mark.slow
def test_a_process_that_takes_too_long_or_dies_is_said_to(
    run: ServedRun, queries: RuleQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = what_if_process._CODE
    monkeypatch.setattr(
        what_if_process, "_CODE", "import os\nprint('out of luck', file=__import__('sys').stderr, flush=True)\nos._exit(3)"
    )
    with pytest.raises(StoreError, match=r'ended with exit code 3: "out of luck"; sentinel rules backtest'):
        asked(queries, run, "loss-spike", k=9.0)
    monkeypatch.setattr(what_if_process, "_CODE", "import time\ntime.sleep(1000)")
    monkeypatch.setattr(what_if_process, "LIMIT_S", 0.2)
    monkeypatch.setattr(what_if_process, "SPARE_S", 0.2)
    with pytest.raises(TookTooLong, match=r"no answer within 0\.4 s"):
        asked(queries, run, "loss-spike", k=9.0)
    monkeypatch.setattr(what_if_process, "_CODE", code)
    monkeypatch.setattr(what_if_process, "LIMIT_S", 0.0)
    monkeypatch.setattr(what_if_process, "SPARE_S", 300.0)
    assert asked(queries, run, "loss-spike", k=9.0)["stopped"] == "time"


def test_one_is_judged_at_a_time(run: ServedRun, queries: RuleQueries, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end = threading.Event(), threading.Event()

    def waits(question: object) -> object:
        began.set()
        may_end.wait(60)
        raise StoreError("ended")

    monkeypatch.setattr(rules_api, "WAIT_S", 0.01)
    monkeypatch.setattr(rules_api, "ask_apart", waits)

    def ask() -> None:
        with pytest.raises(StoreError):
            asked(queries, run, "loss-spike", k=9.0)

    first = threading.Thread(target=ask)
    first.start()
    began.wait(60)
    with pytest.raises(Busy, match="another what-if"):
        asked(queries, run, "loss-spike", k=9.0)
    may_end.set()
    first.join()
    with pytest.raises(StoreError, match="ended"):
        asked(queries, run, "loss-spike", k=9.0)


@pytest.mark.parametrize(
    ("rule", "numbers", "words"),
    [
        ("loss-spikes", {"k": 1.0}, 'did you mean "loss-spike"'),
        ("loss-spike", {"kk": 1.0}, 'has no number "kk"'),
        ("loss-spike", {}, "expected a number to change"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_any_process_starts(
    run: ServedRun, queries: RuleQueries, rule: str, numbers: dict[str, float], words: str
) -> None:
    with pytest.raises((ConfigError, RuleError)) as told:
        asked(queries, run, rule, **numbers)

    assert words in str(told.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"run":"r","rule":"a","numbers":{"k":1e999}}', b'{"run":"r","rule":"a","numbers":{"k":' + b"9" * 400 + b"}}",
        b'{"run":"r","rule":"a","numbers":{"k":"1"}}', b'{"run":"r","rule":"a","numbers":{"k":true}}',
        b'{"run":"r","rule":"a","numbers":{},"write_to":"/etc/x"}', b'{"rule":"a","numbers":{}}', b"[]",
    ],
)  # fmt: skip
def test_what_is_no_question_is_refused(body: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, ConfigError)):
        msgspec.json.decode(body, type=WhatIfRequest)
