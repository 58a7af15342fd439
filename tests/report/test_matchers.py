"""Which alerts a matcher means."""

from __future__ import annotations

import pytest

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.rank_identity import RankIdentity
from sentinel.report.alert import Alert
from sentinel.report.alert_context import AlertContext
from sentinel.report.matchers import Matchers

from ..support.anomalies import an_incident

ALERT = Alert(
    key="k", sink="s", change="opened",
    incident=an_incident(
        run="nightly-7", severity=Severity.CRITICAL, detectors=("AnomalyNan", "StaleRank"), module="blocks.3", ranks=(3, 17)
    ),
    context=AlertContext(ranks=(RankIdentity(rank=3, host="pod-a", node="node7"),), labels={"team": "nlp"}, job="42"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "is_meant"),
    [
        ("run=nightly-7", True),
        ("run=nightly", False),
        ("run=~nightly-.*", True),
        ("run=~nightly", False),
        ("run!~nightly-.*", False),
        (" severity = critical ", True),
        ("severity!=critical", False),
        ("detector=StaleRank", True),
        ("detector!=StaleRank", False),
        ("rank=17", True),
        ("rank=1", False),
        ("host=node7", True),
        ("host=pod-a", True),
        ("label.team=nlp", True),
        ("label.owner=", True),
        ("label.owner!=", False),
        ("job=42", True),
        ("segment=", True),
    ],
)
def test_what_a_matcher_means(text, is_meant):
    assert Matchers([text], "m").match(ALERT) is is_meant


def test_all_of_several_have_to_hold():
    assert Matchers(["run=~nightly.*", "rank=3"], "m").match(ALERT)
    assert not Matchers(["run=~nightly.*", "rank=4"], "m").match(ALERT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ruN=x", 'm: unknown name "ruN"; did you mean "run"?'),
        ("modul=x", 'did you mean "module"?'),
        ("run", "expected NAME=VALUE, NAME!=VALUE, NAME=~REGEX or NAME!~REGEX"),
        ("severity=critcal", 'unknown severity "critcal"; did you mean "critical"?'),
        ("run=~(", "not a regular expression"),
        ("run=~(a)\\1", "cannot be matched in bounded time"),
        ("run=" + "x" * 600, "at most 500 characters"),
        ("label.=x", 'unknown name "label."'),
    ],
)
def test_what_is_none_is_said_with_the_nearest_word(text, words):
    with pytest.raises(ConfigError) as caught:
        Matchers([text], "m")

    assert words in str(caught.value)


def test_an_expression_that_backtracking_would_never_end_is_matched_at_once():
    assert not Matchers([r"title=~((\w+\.?)+)+!"], "m").match(ALERT)
