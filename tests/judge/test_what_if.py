"""What if: a rule with other numbers, judged beside the rules in force, says what the daemon would have said."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.decision import Tick
from sentinel.errors import RuleError
from sentinel.judge import what_if as module
from sentinel.judge.replay import judged_again, judged_by_each
from sentinel.judge.what_if import Question, WhatIf, what_if
from sentinel.rules.language.loader import load_pack
from sentinel.rules.language.rule_numbers import written_change
from sentinel.rules.language.schema import Pack
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths
from sentinel.testing import BlowUp, LossJump, Nan

from ..support.serving import judge_run, small_run

pytestmark = pytest.mark.slow

STEPS, JUMP, BLOWN, BAD = 100, 50, 70, 90
PACK = load_pack()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A judged run in which the loss jumps once, an activation is 300 times as large, and a NaN is born."""
    directory = tmp_path_factory.mktemp("what-if") / "run"
    source = small_run(directory)
    source.plant(
        LossJump(step=JUMP), BlowUp(step=BLOWN, module="layers.1.mlp", factor=300.0), Nan(step=BAD, module="layers.2")
    )
    source.write(STEPS)
    judge_run(directory)
    return RunPaths.of(directory)


def asked(run: RunPaths, rule: str, is_over: Callable[[], bool] = lambda: False, **numbers: Any) -> WhatIf:
    question = Question(
        run_dir=str(run.run_dir), state=str(run.state), rule=rule, in_force=PACK, packs=(),
        change=written_change(PACK.rule(rule), numbers),
    )  # fmt: skip
    question = msgspec.json.decode(msgspec.json.encode(question), type=Question)
    return what_if(question, is_over=is_over)


def test_a_higher_bound_says_which_alarm_goes(run: RunPaths) -> None:
    told = asked(run, "loss-spike", k=1000.0)

    [alarm] = told.alarms
    assert (alarm.what, alarm.step, alarm.channel, alarm.is_recorded) == ("goes", JUMP, "loss", True)
    assert (told.difference.onsets, told.difference.num_lost, told.difference.num_new) == ((0, 1), 1, 0)
    assert (told.num_recorded, told.num_recorded_again) == (1, 1)
    assert (told.first_step, told.last_step, told.num_steps, told.num_decided, told.stopped) == (0, 99, STEPS, STEPS, "")
    assert told.others.onsets[1] > 0 and told.others.num_new == told.others.num_lost == 0


def test_a_lower_bound_says_which_alarms_come(run: RunPaths) -> None:
    told = asked(run, "turbulent-norm", k=2.0, threshold=0.1)

    what = Counter(one.what for one in told.alarms)
    assert what["comes"] > 0 and what["stays"] > 0
    assert {one.is_recorded for one in told.alarms if one.what == "comes"} == {False}
    assert {one.is_recorded for one in told.alarms if one.what == "stays"} == {True}
    assert told.difference.onsets == (what["stays"] + what["comes"], what["stays"] + what["goes"])
    assert [one.what == "stays" for one in told.alarms] == sorted(one.what == "stays" for one in told.alarms)


def test_a_change_that_changes_nothing_changes_no_alarm(run: RunPaths) -> None:
    told = asked(run, "non-finite", episode_quiet_steps=20)

    assert {one.what for one in told.alarms} == {"stays"} and {one.is_recorded for one in told.alarms} == {True}
    assert told.num_recorded == told.num_recorded_again == told.num_alarms > 10


def test_each_of_several_packs_says_what_it_says_alone(run: RunPaths) -> None:
    changed = msgspec.structs.replace(PACK.rule("turbulent-norm"), args={"k": 2.0, "threshold": 0.1})
    loud = Pack(rules=tuple(changed if one.name == changed.name else one for one in PACK.rules))
    journal = Journal(run.journal, read_only=True)
    together = list(judged_by_each(run, journal, (loud, PACK)))

    for at, pack in enumerate((loud, PACK)):
        alone = list(judged_again(run, journal, pack=pack))
        assert [judgements[at] for _, judgements in together] == [judgement for _, judgement in alone]
    journal.close()
    assert any(one.anomalies != other.anomalies for _, (one, other) in together), "the two differ"
    assert sum(not isinstance(one, Tick) for one, _ in together) == STEPS


def test_a_run_that_is_too_long_is_answered_as_far_as_it_came(run: RunPaths) -> None:
    looks = itertools.count(1)
    told = asked(run, "loss-spike", is_over=lambda: next(looks) >= JUMP + 5, k=1000.0)

    assert (told.stopped, told.first_step, told.last_step, told.num_steps, told.num_decided) == ("time", 0, 54, 55, STEPS)
    assert [one.what for one in told.alarms] == ["goes"] and told.num_recorded == 1
    early = asked(run, "loss-spike", is_over=lambda: True, k=1000.0)
    assert (early.num_steps, early.alarms, early.num_recorded) == (1, (), 0)


def test_a_change_that_floods_is_stopped_and_says_so(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ALARMS", 20)
    monkeypatch.setattr(module, "MOST_SHOWN", 5)
    told = asked(run, "turbulent-norm", k=0.01, threshold=0.001, warmup=2, episode_quiet_steps=0)

    assert told.stopped == "alarms" and told.num_steps < STEPS
    assert len(told.alarms) == 5 < told.num_alarms


def test_memory_that_runs_out_leaves_what_was_judged(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: Any, **kwargs: Any) -> Any:
        yield from itertools.islice(judged_by_each(*args, **kwargs), 60)
        raise MemoryError

    monkeypatch.setattr(module, "judged_by_each", short)
    told = asked(run, "loss-spike", k=1000.0)

    assert (told.stopped, told.num_steps) == ("memory", 60) and [one.what for one in told.alarms] == ["goes"]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"window": -3}, "what-if.yaml:"),
        ({"window": 2.5}, 'rule "loss-spike": args.window: expected int'),
        ({"episode_quiet_steps": -1}, '"episode_quiet_steps" must be a number of steps'),
        ({"k": 0}, "k must be"),
    ],
)
def test_the_reader_of_packs_says_what_no_pack_may_have(run: RunPaths, numbers: dict[str, Any], words: str) -> None:
    with pytest.raises(RuleError) as told:
        asked(run, "loss-spike", **numbers)

    assert words in str(told.value) and "/sentinel-what-if" not in str(told.value)


def test_what_is_probably_not_meant_is_said_too(run: RunPaths, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "rules:\n- {name: own, detector: Threshold, args: {above: 1.0}, match: {kind: wgrad, statistic: kurtosis}}\n"
    )
    pack = load_pack([tmp_path / "own.yaml"])
    question = Question(
        run_dir=str(run.run_dir), state=str(run.state), rule="own", in_force=pack, packs=(str(tmp_path / "own.yaml"),),
        change=written_change(pack.rule("own"), {"above": 0.5}),
    )  # fmt: skip

    told = what_if(question, is_over=lambda: True)

    assert any("fires at every point" in one for one in told.lint)
    assert (told.num_recorded, told.num_steps) == (0, 1)


def test_rules_whose_files_changed_meanwhile_are_said_to_have(run: RunPaths) -> None:
    question = Question(
        run_dir=str(run.run_dir),
        state=str(run.state),
        rule="gone",
        in_force=PACK,
        packs=(),
        change="rules: [{name: loss-spike}]",
    )
    with pytest.raises(RuleError, match="the former ones are in force"):
        what_if(question, is_over=lambda: True)
