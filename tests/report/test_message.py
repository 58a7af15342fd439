"""What a message says and in which order, and what nobody can make it say."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.incident import IncidentAct
from sentinel.rank_identity import RankIdentity
from sentinel.report.alert import Alert, AlikeRuns
from sentinel.report.alert_context import AlertContext
from sentinel.report.links import MessageLinks, check_template
from sentinel.report.message import LEAST_RUN, MAX_FIELD, PHONE, facts, headline, message_of, middle_cut, visible
from sentinel.report.sample_alert import sample_alert

from ..support.anomalies import an_incident

ORDER = (
    "runs", "now", "merged into",
    "began with", "module", "segment", "ranks", "machines", "job", "labels",
    "since", "steps",
    "how bad", "cause", "because", "known",
    "done", "people",
    "what to do", "batches to skip", "commands",
)  # fmt: skip
"""What happened, where, since when, how bad, what was done, what to do."""
CRITICAL = Severity.CRITICAL
ON_NODE_17 = AlertContext(
    opened=1_780_000_000.0,
    ranks=(RankIdentity(rank=3, host="node17", gpu="5"),),
    num_ranks=1,
    job="8812",
    labels={"team": "a"},
)


def an_alert(change="opened", context=ON_NODE_17, *, is_page=False, repeated=False, was=None, **fields):
    incident = an_incident(**fields)
    return Alert(
        key="k", sink="s", change=change, incident=incident, context=context, is_page=is_page, repeated=repeated,
        was_severity=was, created=1_780_000_060.0,
    )  # fmt: skip


FULL = an_alert(
    state="merged", merged_into="i9", run="a", root_name="b.3 activation rank 3", module="b.3.mlp", segment="b.3",
    ranks=(3,), num_members=52, detectors=("AnomalyNan",), suspected="hardware", skip_steps=(7,), attempt=2,
    num_worse=2,
    evidence=("suspected hardware: alone", "suspected hardware: to do: drain node17", "first bad: b.3"),
    acts=(IncidentAct(incident="i1", act="ack", who="ana"),),
)  # fmt: skip


def test_everything_is_said_in_the_order_in_which_it_is_asked():
    alike = AlikeRuns(runs=("a", "b"), num_runs=2, num_incidents=2, num_open=0)
    names = [name for name, _ in facts(msgspec.structs.replace(FULL, alike=alike), done=["monitoring on from step 9"])]

    assert names == list(ORDER)


def test_runs_that_are_alike_are_counted_and_named():
    runs = tuple(f"sweep-{n}" for n in range(20))
    alert = msgspec.structs.replace(
        an_alert(run="sweep-0", severity=CRITICAL), alike=AlikeRuns(runs=runs, num_runs=30, num_incidents=31, num_open=29)
    )

    message = message_of(alert)
    said = dict(message.fields)["runs"]

    assert message.headline() == "CRITICAL: run sweep-0 and 29 more: NaN in blocks.3, step 7"
    assert said.startswith("30 with incidents that are alike, 29 of 31 open: sweep-0, sweep-1, ")
    assert said.endswith("sweep-7 and 22 more; what follows is of the first")
    long = message_of(msgspec.structs.replace(alert, incident=an_incident(run="x" * 200, title="y" * 99)))
    assert " and 29 more: yyyyyyyy" in long.summary(1000)[:PHONE]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("now", "merged: it is part of another incident"),
        ("ranks", "3"),
        ("machines", "rank 3: node17, GPU 5"),
        ("job", "8812"),
        ("labels", "team=a"),
        ("since", "2026-05-28 20:26:40 UTC, step 7"),
        ("steps", "7 to 7 of attempt 2"),
        ("how bad", "warning; 2 times several times worse than was told; 52 anomalies; seen by AnomalyNan"),
        ("cause", "hardware"),
        ("done", "monitoring on from step 9"),
        ("people", "acknowledged by ana"),
        ("what to do", "drain node17"),
        ("commands", "sentinel explain i1 -d a"),
    ],
)
def test_each_line_says_what_is_true(name, text):
    assert dict(facts(FULL, done=["monitoring on from step 9"]))[name] == text


@pytest.mark.parametrize(
    ("alert", "line"),
    [
        (an_alert(severity=CRITICAL), "CRITICAL: run r: NaN in blocks.3, step 7"),
        (an_alert("raised", severity=CRITICAL), "now CRITICAL: run r: NaN in blocks.3, step 7"),
        (an_alert("worse"), "WARNING, much worse: run r: NaN in blocks.3, step 7"),
        (an_alert("resolved"), "WARNING resolved: run r: NaN in blocks.3, step 7"),
        (an_alert("acknowledged"), "WARNING, acknowledged: run r: NaN in blocks.3, step 7"),
        (an_alert(title="loss 9 at step 7"), "WARNING: run r: loss 9 at step 7"),
        (an_alert(title="loss 9 at step 71"), "WARNING: run r: loss 9 at step 71, step 7"),
        (an_alert(repeated=True), "WARNING: run r: NaN in blocks.3, step 7 (repeated)"),
    ],
)
def test_the_headline_says_how_bad_which_run_and_what(alert, line):
    assert headline(alert) == line


def test_the_end_of_some_of_many_is_no_all_clear():
    some = AlikeRuns(runs=("a", "b"), num_runs=2, num_incidents=2, num_open=1)
    none = msgspec.structs.replace(some, num_open=0)

    assert headline(msgspec.structs.replace(an_alert("resolved"), alike=some)).startswith(
        "WARNING, 1 of 2 open: run r and 1 more"
    )
    assert headline(msgspec.structs.replace(an_alert("resolved", state="resolved"), alike=none)).startswith(
        "WARNING resolved: "
    )


def test_nobody_is_told_to_take_what_somebody_has_or_what_is_over():
    assert "sentinel ack i1 -d r" in dict(facts(an_alert()))["commands"]
    for taken in (an_alert(state="resolved"), an_alert(acts=FULL.incident.acts), an_alert(severity=Severity.INFO)):
        assert "sentinel ack" not in dict(facts(taken))["commands"]
    assert dict(facts(an_alert(run="a; rm -rf ~")))["commands"].startswith("sentinel explain i1 -d 'a; rm -rf ~'")


def test_what_is_not_known_is_not_said():
    bare = an_alert(context=AlertContext(), time=0.0)

    assert [name for name, _ in facts(bare)] == ["steps", "how bad", "commands"]


def test_machines_of_no_rank_in_particular_are_the_hosts():
    ranks = tuple(RankIdentity(rank=n, host=f"h{n // 2}") for n in range(4))

    assert dict(facts(an_alert(context=AlertContext(ranks=ranks, num_ranks=4))))["machines"] == "h0, h1"
    assert dict(facts(an_alert(context=AlertContext(ranks=ranks, num_ranks=64))))["machines"] == "h0, h1 and others"
    some = an_alert(context=AlertContext(ranks=ranks[:1], num_ranks=3), ranks=(0, 1, 2))
    assert dict(facts(some))["machines"] == "rank 0: h0; and 2 more"
    spread = AlertContext(ranks=(ranks[3], *ranks[:3]), origin=3, num_ranks=9)
    text = dict(facts(an_alert(context=spread, ranks=tuple(range(9)))))["machines"]
    assert text == "rank 3, where it began: h1; ranks 0, 1: h0; rank 2: h1; and 5 more"


@pytest.mark.parametrize("limit", [PHONE, 150, 1024, 3000])
def test_a_short_name_of_a_run_is_never_cut(limit):
    run = "llama-70b-sweep-lr3e4-seed17"
    alert = an_alert("worse", severity=CRITICAL, run=run, title="x" * 5000, repeated=limit > PHONE)
    message = message_of(alert)

    assert run + ": x" in message.headline(limit)
    assert len(message.headline(limit)) <= limit


@given(run=st.text(min_size=1, max_size=400), title=st.text(max_size=900), limit=st.integers(PHONE, 3000))
def test_a_phone_shows_severity_run_and_what_of_any_name(run, title, limit):
    message = message_of(an_alert("raised", severity=CRITICAL, run=run, title=title))
    line = message.summary(limit)

    shown = line[:PHONE]
    assert shown.startswith("now CRITICAL: run " + visible(run, 400)[:8])
    assert len(line) <= limit
    assert line.isprintable()
    what = visible(title, 400)[:8]
    assert len(what) < 8 or what in shown


def test_a_name_that_is_too_long_keeps_its_beginning_and_its_end_and_stands_whole_below():
    run = "sweep-" + "x" * 200 + "-seed17"
    message = message_of(an_alert(run=run))

    assert message.headline(150).startswith("WARNING: run sweep-xx") and "seed17: NaN in blocks.3" in message.headline(150)
    assert dict(message.fields_under(message.headline(150)))["run"] == run
    assert "run" not in dict(message.fields_under(message.headline()))
    assert len(middle_cut(run, LEAST_RUN)) == LEAST_RUN


@pytest.mark.parametrize("evil", ["\x1b[2J", "a\nb", "\0", "x" * 10**6, "\u202egpj.exe", "\ud800"])
def test_no_text_moves_a_cursor_or_floods(evil):
    alert = an_alert(
        run=evil, title=evil, root_name=evil, module=evil, segment=evil, suspected=evil, detectors=(evil,) * 99,
        evidence=(evil,) * 99, acts=(IncidentAct(incident="i", act=evil, who=evil, why=evil),),
        context=AlertContext(ranks=(RankIdentity(rank=0, host=evil, pod=evil),), job=evil, labels={"a": evil}, num_ranks=1),
    )  # fmt: skip

    message = message_of(alert, done=[evil] * 99)

    assert all(text.isprintable() and len(text) <= MAX_FIELD for _, text in message.fields)
    assert message.headline().isprintable() and len(message.headline()) < 2000


def test_a_test_message_looks_real_and_says_that_it_is_none():
    alert = sample_alert("slack", 1_780_000_000.0)

    assert "TEST, nothing is wrong" in message_of(alert).summary(1000)[:PHONE]
    names = [name for name, _ in facts(alert)]
    assert {"machines", "job", "since", "cause", "what to do"} <= set(names)
    over = sample_alert("slack", 1_780_000_000.0, is_over=True)
    assert over.is_closed and over.incident.id == alert.incident.id and over.key != alert.key


def test_links_lead_to_the_incident_and_hold_nothing_unescaped():
    links = MessageLinks(
        external_url="https://s.example/sentinel/",
        runbook_url="https://wiki.example/{detector}#{cause}",
        dashboard_url="https://g.example/d/x?var-run={run}&from={from_ms}&to={to_ms}&host={host}",
    )
    found = {one.name: one.url for one in links.of(an_alert(run="a/b&c", detectors=("AnomalyNan",)))}

    assert found == {
        "incident": "https://s.example/sentinel/incidents/i1?run=a%2Fb%26c",
        "runbook": "https://wiki.example/AnomalyNan#unknown",
        "dashboard": "https://g.example/d/x?var-run=a%2Fb%26c&from=1779998200000&to=1780001860000&host=node17",
    }
    assert MessageLinks().of(an_alert()) == ()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://w/{detektor}", 'notify.runbook_url: unknown name {detektor}; did you mean "detector"?'),
        ("https://w/{}", "notify.runbook_url: unknown name {}"),
        ("https://w/{run", "notify.runbook_url: expected '}' before end of string"),
        ("https://w/{run.__class__}", "notify.runbook_url: unknown name {run.__class__}"),
        ("https://w/{run!r}", "notify.runbook_url: expected a plain name in braces"),
        ("wiki/{run}", "notify.runbook_url must be an http or https address, got 'wiki/{run}'"),
    ],
)
def test_an_address_with_a_name_that_is_none_is_refused(url, said):
    with pytest.raises(ConfigError) as error:
        check_template(url, "notify.runbook_url")

    assert said in str(error.value)


def test_an_alert_of_before_has_no_context_and_is_read():
    old = msgspec.json.decode(an_alert(context=AlertContext()).body)
    del old["context"]

    assert Alert.read(msgspec.json.encode(old)).context == AlertContext()
