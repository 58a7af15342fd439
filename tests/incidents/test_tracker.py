"""Incidents: what opens one, what joins it, what refines it, and what closes it."""

from __future__ import annotations

import random

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.incidents.diagnosis.step_facts import StepFacts
from sentinel.incidents.peers import IncidentConfig
from sentinel.incidents.tracker import IncidentTracker

from ..support.anomalies import a_nan


def on_rank_3(kind="activation", name="blocks.2", step=41, **fields):
    """A NaN on rank 3, micro_step 1, unless said."""
    return a_nan(kind, name, step, **({"rank": 3, "micro_step": 1, "call_id": 7} | fields))


def finite(kind="wgrad", name="blocks.0.fc.weight", step=41, **fields):
    """A lone finite excursion."""
    defaults = {
        "rank": None, "ranks": (0, 1), "micro_step": None, "call_id": None, "statistic": "norm", "rule": "turbulence",
        "detector": "AnomalyTurbulence", "severity": Severity.INFO, "value": 9.0, "baseline": 1.0, "value_text": "",
    }  # fmt: skip
    return on_rank_3(kind, name, step, **(defaults | fields))


def loss_spike(step=41, **fields):
    return finite("scalar", "loss", step, rule="loss-spike", detector="LossSpike", severity=Severity.CRITICAL, **fields)


def end(onset, step, **fields):
    return msgspec.structs.replace(onset, id=f"end-{onset.id}", event="end", onset_id=onset.id, step=step, **fields)


def without_episodes(**fields):
    return IncidentTracker(IncidentConfig(episode_quiet_steps=0, **fields))


def test_title_says_what_where_and_when():
    tracker = without_episodes()
    born = on_rank_3(name="blocks.2.mlp.fc1", site_pos=4, segment="blocks.2")
    later = on_rank_3("dgrad", "blocks.1", site_pos=9)

    (incident,) = tracker.update(41, [later, born])

    assert incident.title == "NaN born in blocks.2.mlp.fc1 (forward) on rank 3, micro_step 1, step 41"
    assert (incident.root, incident.first_causes) == (born.id, (born.id,))
    assert (incident.state, incident.severity, incident.paged) == ("open", Severity.CRITICAL, True)
    assert (incident.num_members, set(incident.members)) == (2, {born.id, later.id})
    assert (incident.segment, incident.module, incident.suspected) == ("blocks.2", "blocks.2.mlp.fc1", "unknown")


@pytest.mark.parametrize(
    ("root", "title"),
    [
        (
            on_rank_3(border="block_output", segment="blocks.2"),
            "NaN born in segment blocks.2 (forward) on rank 3, micro_step 1, step 41",
        ),
        (
            on_rank_3("wgrad", "fc.weight", rank=None, micro_step=None, value_text="inf"),
            "inf born in the gradient of fc.weight at step 41",
        ),
        (on_rank_3("scalar", "loss", rank=None, micro_step=None), "NaN born in loss at step 41"),
        (loss_spike(), "loss-spike: loss 9 against 1 at step 41"),
        (finite(), "turbulence: norm of blocks.0.fc.weight (wgrad) 9 against 1 at step 41"),
        (
            on_rank_3(
                "health", "rank 5", rule="stale-rank", detector="StaleRank", value_text="", message="rank 5 is silent"
            ),
            "rank 5 is silent",
        ),
    ],
)  # fmt: skip
def test_titles_in_words(root, title):
    (incident,) = without_episodes().update(41, [root])

    assert incident.title == title


def test_a_loss_spike_and_its_own_excursions_are_one_incident():
    tracker = without_episodes()
    spike = loss_spike()

    (opened,) = tracker.update(41, [finite("activation", "blocks.0"), spike, finite()])
    (grown,) = tracker.update(42, [finite(step=42), finite("wgrad", "head.weight", step=42)])

    assert opened.root == spike.id
    assert grown.id == opened.id
    assert (grown.revision, grown.num_members, len(grown.members)) == (2, 5, 2)


def test_a_lone_excursion_never_explains_what_is_graver():
    tracker = without_episodes()
    (lone,) = tracker.update(40, [finite(step=40)])

    (spike,) = tracker.update(41, [loss_spike()])
    (nan,) = tracker.update(52, [on_rank_3(step=52)])

    assert len({lone.id, spike.id, nan.id}) == 3
    assert not lone.paged


def test_a_series_makes_its_own_incident_graver_while_it_lasts():
    tracker = without_episodes()
    (lone,) = tracker.update(40, [finite(step=40)])

    (raised,) = tracker.update(42, [finite(step=42, severity=Severity.WARNING)])

    assert (raised.id, raised.severity) == (lone.id, Severity.WARNING)


def test_weights_made_nan_by_global_clipping_join_the_incident():
    tracker = without_episodes()
    born = on_rank_3("wgrad", "blocks.1.weight", rank=None, micro_step=None, value_text="inf", site_pos=5)
    norm = on_rank_3("scalar", "grad_norm", rank=None, micro_step=None, value_text="inf")
    (opened,) = tracker.update(41, [norm, born])

    everything = [on_rank_3("param", f"blocks.{i}.weight", 42, micro_step=None) for i in range(4)]
    everything += [on_rank_3("activation", f"blocks.{i}", 42, site_pos=i, rank=r) for i in range(4) for r in range(2)]
    (grown,) = tracker.update(42, everything)

    assert grown.id == opened.id
    assert (grown.root, grown.first_causes) == (born.id, (born.id,))
    assert grown.num_members == 2 + len(everything)


def test_a_nan_elsewhere_after_a_skipped_step_is_another_incident():
    tracker = without_episodes()
    (first,) = tracker.update(41, [on_rank_3(segment="blocks.2")], is_skipped=True)

    (second,) = tracker.update(42, [on_rank_3(name="blocks.7", segment="blocks.7", step=42, rank=1)], is_skipped=True)

    assert first.id != second.id


def test_a_recurrence_seen_from_inside_refines_the_root_and_keeps_its_id():
    tracker = without_episodes()
    border = on_rank_3(border="block_output", segment="blocks.2", site_pos=6)
    (opened,) = tracker.update(41, [border], is_skipped=True)
    inside = on_rank_3(name="blocks.2.mlp.fc1", segment="blocks.2", step=45, site_pos=4, call_id=5)

    (refined,) = tracker.update(45, [msgspec.structs.replace(border, id="again", step=45), inside], is_skipped=True)

    assert opened.module == ""
    assert (refined.id, refined.root, refined.module) == (opened.id, border.id, "blocks.2.mlp.fc1")
    assert refined.title == "NaN born in blocks.2.mlp.fc1 (forward) on rank 3, micro_step 1, step 41"
    assert "refined at step 45" in refined.root_name
    assert any("refined at step 45" in line for line in refined.evidence)


def test_a_rank_hidden_by_an_exchange_is_named_when_modules_are_seen():
    group = {"segment": "blocks.2", "tp_size": 2}
    borders = [on_rank_3(border="block_output", rank=r, place={"tp": r}, site_pos=6, **group) for r in range(2)]
    inside = on_rank_3(name="blocks.2.mlp.fc1", rank=1, place={"tp": 1}, site_pos=4, step=45, **group)
    tracker = without_episodes()

    (opened,) = tracker.update(41, borders, is_skipped=True)
    (refined,) = tracker.update(45, [inside], is_skipped=True)

    assert opened.title == "NaN born in segment blocks.2 (forward) on rank 0 or 1, micro_step 1, step 41"
    assert refined.title == "NaN born in blocks.2.mlp.fc1 (forward) on rank 1, micro_step 1, step 41"


def test_an_explosion_that_overflows_stays_one_incident():
    tracker = without_episodes()
    (opened,) = tracker.update(41, [loss_spike()])

    (grown,) = tracker.update(42, [on_rank_3(step=42, value_text="inf", segment="blocks.2")])

    assert grown.id == opened.id
    assert grown.title.startswith("loss-spike: loss 9 against 1 at step 41; then inf born in blocks.2")


def test_two_open_incidents_that_turn_out_to_be_one_are_merged():
    tracker = without_episodes()
    (first,) = tracker.update(41, [on_rank_3(segment="blocks.2", border="block_output")], is_skipped=True)
    (second,) = tracker.update(45, [on_rank_3(name="blocks.7", segment="blocks.7", step=45)])

    connecting = on_rank_3(name="blocks.2.fc", segment="blocks.2", step=46)
    merged, kept = sorted(tracker.update(46, [connecting]), key=lambda i: i.state)

    assert (merged.id, merged.state, merged.merged_into) == (second.id, "merged", first.id)
    assert (kept.id, kept.state, kept.num_members) == (first.id, "open", 3)
    assert [i.id for i in tracker.open_incidents] == [first.id]


def test_resolves_when_quiet():
    tracker = without_episodes(quiet_steps=3)
    tracker.update(41, [on_rank_3()])

    assert [tracker.update(step, []) for step in (42, 43)] == [[], []]
    (closed,) = tracker.update(44, [])

    assert (closed.state, closed.revision, closed.members) == ("resolved", 2, ())
    assert tracker.update(45, []) == []


def test_stays_open_while_an_episode_lasts():
    tracker = IncidentTracker(IncidentConfig(quiet_steps=3))
    onset = on_rank_3()
    tracker.update(41, [onset])

    assert [tracker.update(step, []) for step in range(42, 80)] == [[]] * 38
    (closed,) = tracker.update(80, [end(onset, 80)])

    assert closed.state == "resolved"


def test_a_level_shift_settles():
    onset = finite(severity=Severity.WARNING)
    tracker = IncidentTracker()
    tracker.update(41, [onset])

    (closed,) = tracker.update(49, [], settled=[onset.id])

    assert closed.state == "settled"


def test_a_new_attempt_closes_what_was_open():
    tracker = without_episodes()
    (opened,) = tracker.update(41, [on_rank_3()])

    closed, again = tracker.update(41, [on_rank_3(attempt=1)], attempt=1)

    assert (closed.id, closed.state) == (opened.id, "ended")
    assert (again.attempt, again.state) == (1, "open")
    assert again.id != opened.id


def test_a_root_that_came_late_is_told_instead():
    tracker = without_episodes()
    root = on_rank_3(site_pos=9, segment="blocks.2")
    (opened,) = tracker.update(41, [root])
    tracker.update(42, [])
    early = on_rank_3(name="blocks.1", site_pos=2, segment="blocks.1", call_id=3)

    (grown,) = tracker.update(41, [early])

    assert (grown.id, grown.root, grown.first_causes) == (opened.id, early.id, (early.id,))
    assert grown.title == "NaN born in blocks.1 (forward) on rank 3, micro_step 1, step 41"
    assert any("came late" in line for line in grown.evidence)


def test_blindness_is_an_incident_of_its_own():
    tracker = without_episodes()
    stale = on_rank_3("health", "rank 5", rule="stale-rank", detector="StaleRank", value_text="", message="rank 5 is silent")

    incidents = tracker.update(41, [stale, on_rank_3()])

    assert len(incidents) == 2


def test_truncated_records_count():
    tracker = without_episodes()
    note = on_rank_3(name="*", event="truncated", count=500, id="t")

    (incident,) = tracker.update(41, [on_rank_3(), note])

    assert incident.num_members == 501


def story(seed):
    """Steps of a random run: (step, anomalies, is_skipped)."""
    rng = random.Random(seed)
    onsets = []
    for step in range(60):
        found = []
        if rng.random() < 0.3:
            for _ in range(rng.randrange(1, 6)):
                name = f"blocks.{rng.randrange(6)}"
                make = rng.choice([on_rank_3, finite, loss_spike])
                found.append(make(step=step) if make is loss_spike else make(name=name, step=step, segment=name))
        found = list({a.id: a for a in found}.values())
        if onsets and rng.random() < 0.3:
            found.append(end(onsets.pop(rng.randrange(len(onsets))), step))
        onsets += [a for a in found if a.event == "onset"]
        yield step, found, rng.random() < 0.5


@pytest.mark.parametrize("seed", range(8))
def test_revisions_are_independent_of_arrival_order_and_survive_a_restart(seed):
    plain, shuffled, restarted = IncidentTracker(), IncidentTracker(), IncidentTracker()
    rng = random.Random(seed)
    for step, found, is_skipped in story(seed):
        other = rng.sample(found, len(found))
        fresh = IncidentTracker()
        fresh.restore(restarted.snapshot())
        restarted = fresh

        expected = plain.update(step, found, is_skipped=is_skipped)

        assert shuffled.update(step, other, is_skipped=is_skipped) == expected
        assert restarted.update(step, found, is_skipped=is_skipped) == expected
        assert restarted.snapshot() == plain.snapshot()


@pytest.mark.parametrize("seed", range(8))
def test_every_anomaly_belongs_to_exactly_one_incident_and_revisions_count_up(seed):
    tracker = IncidentTracker()
    members, revisions, onsets = [], {}, []
    for step, found, is_skipped in [*story(seed), (0, [], None)]:
        onsets += [a.id for a in found if a.event == "onset"]
        # With the next attempt all is over, and told whole.
        made = tracker.update(step, found, is_skipped=bool(is_skipped), attempt=int(is_skipped is None))
        for incident in made:
            members += incident.members
            assert incident.revision == revisions.get(incident.id, 0) + 1
            revisions[incident.id] = incident.revision

    assert sorted(members) == sorted(onsets)


def test_nonsense_is_rejected_by_name():
    with pytest.raises(ConfigError, match=r"incidents\.quiet_steps must be at least 1, got 0"):
        IncidentConfig(quiet_steps=0)


def storm(step, rank=5, **fields):
    """The loss of a rank is no number again and again; fields: place and the like."""
    fields = {
        "rule": "nan-storm", "detector": "NanStorm", "statistic": "value", "micro_step": None, "call_id": None, "rank": rank,
    } | fields  # fmt: skip
    return on_rank_3("scalar", "loss", step, **fields)


REPLICAS = {"dp_size": 2, "place": {"dp": 1}}


def test_what_follows_of_an_episode_that_goes_on_opens_nothing():
    """The rows of the step show the cause; its episode began ten steps ago, and has no record in this one."""
    tracker = IncidentTracker()
    root = on_rank_3("activation", "blocks.2", 41, segment="blocks.2", border="block_output", **REPLICAS)
    (opened,) = tracker.update(41, [root], is_skipped=True, facts=StepFacts(ongoing=frozenset({root.id})))
    for step in range(42, 51):
        tracker.update(step, [], facts=StepFacts())

    notified = tracker.update(51, [storm(51, **REPLICAS)], is_skipped=True, facts=StepFacts(ongoing=frozenset({root.id})))

    assert [one.id for one in notified] == [opened.id]
    assert len(tracker.open_incidents) == 1


@pytest.mark.parametrize(
    ("other", "ongoing"),
    [
        (on_rank_3("activation", "blocks.0", 51, rank=0, segment="blocks.0", dp_size=2, place={"dp": 0}), True),
        (storm(51, rank=1, dp_size=2, place={"dp": 0}), True),
        (storm(51, **REPLICAS), False),
    ],
)
def test_what_an_episode_cannot_have_made_is_an_incident_of_its_own(other, ongoing):
    tracker = IncidentTracker()
    root = on_rank_3("activation", "blocks.2", 41, segment="blocks.2", **REPLICAS)
    tracker.update(41, [root], is_skipped=True, facts=StepFacts(ongoing=frozenset({root.id})))
    for step in range(42, 51):
        tracker.update(step, [], facts=StepFacts())

    tracker.update(51, [other], is_skipped=True, facts=StepFacts(ongoing=frozenset({root.id} if ongoing else ())))

    assert len(tracker.open_incidents) == 2


@pytest.mark.parametrize(
    ("fields", "num"), [({**REPLICAS}, 1), ({"rank": 1, "dp_size": 2, "place": {"dp": 0}}, 2)]
)  # fmt: skip
def test_once_the_module_inside_is_measured_no_more_its_border_says_that_it_goes_on(fields, num):
    """The first cause was seen while all modules were measured; ten steps later the borders alone are, and are bad."""
    tracker = IncidentTracker()
    root = on_rank_3("activation", "blocks.2.fc1", 41, segment="blocks.2", call_id=7, **REPLICAS)
    border = on_rank_3("activation", "blocks.2", 41, segment="blocks.2", border="block_output", call_id=9, **REPLICAS)
    both = frozenset({root.id, border.id})
    tracker.update(41, [root, border], is_skipped=True, facts=StepFacts(ongoing=both))
    (opened,) = tracker.open_incidents
    assert opened.module == "blocks.2.fc1"
    for step in range(42, 51):
        tracker.update(step, [], facts=StepFacts())

    tracker.update(51, [storm(51, **fields)], is_skipped=True, facts=StepFacts(ongoing=frozenset({border.id})))

    assert len(tracker.open_incidents) == num
    assert opened.id in {one.id for one in tracker.open_incidents}


def test_a_consequence_stays_one_after_a_restart():
    def notified(restart):
        tracker = IncidentTracker()
        root = on_rank_3("activation", "blocks.2", 41, segment="blocks.2", **REPLICAS)
        found = tracker.update(41, [root], is_skipped=True, facts=StepFacts(ongoing=frozenset({root.id})))
        if restart:
            state = tracker.snapshot()
            tracker = IncidentTracker()
            tracker.restore(state)
        facts = StepFacts(ongoing=frozenset({root.id}))
        return [*found, *tracker.update(49, [storm(49, **REPLICAS)], is_skipped=True, facts=facts)]

    assert notified(True) == notified(False)


def test_a_value_seen_while_a_rank_was_not_heard_is_not_called_born_there():
    tracker = IncidentTracker()

    (late,) = tracker.update(51, [storm(51, **REPLICAS)], facts=StepFacts(missing=(1,), is_whole=False))
    (whole,) = IncidentTracker().update(51, [storm(51, **REPLICAS)], facts=StepFacts())

    assert "seen in loss on rank 5" in late.title and "rank 1 not heard of that step" in late.title
    assert any("it may have been born there" in line for line in late.evidence)
    assert "born in loss on rank 5" in whole.title


def test_an_incident_that_goes_on_without_a_new_anomaly_says_until_when():
    """A NaN at steps 41 and 51 is one episode and one anomaly: the incident spans both all the same."""
    tracker = IncidentTracker()
    root = on_rank_3("activation", "blocks.2", 41, segment="blocks.2", border="block_output", **REPLICAS)
    (opened,) = tracker.update(41, [root], is_skipped=True, facts=StepFacts(ongoing=frozenset({root.id})))
    for step in range(42, 120):
        facts = StepFacts(ongoing=frozenset({root.id}) if step == 51 else frozenset())
        over = [end(root, 90)] if step == 90 else []
        notified = [one for one in tracker.update(step, over, facts=facts) if one.state == "resolved"]
        if notified:
            break

    (closed,) = notified
    assert (opened.steps, closed.steps, closed.last_step) == ("41 to 41", "41 to 51", 41)


def lost_state(step, **fields):
    return finite("exp_avg_sq", "tok.weight", step, **({"rule": "optimizer-state"} | fields))


def test_a_note_that_turns_grave_is_told_with_what_came_of_it():
    tracker = IncidentTracker()
    note = lost_state(41)
    tracker.update(41, [note])
    (notified,) = tracker.update(42, [finite("param", "tok.weight2", 42, severity=Severity.WARNING), loss_spike(42)])

    revisions = tracker.update(43, [lost_state(43, severity=Severity.WARNING), end(note, 43)])

    merged = [one for one in revisions if one.state == "merged"]
    assert [one.merged_into for one in merged] == [notified.id]
    assert all(one.severity is Severity.INFO for one in merged)
    assert [one.id for one in tracker.open_incidents] == [notified.id]


def test_a_note_of_another_time_that_turns_grave_is_an_incident_of_its_own():
    tracker = IncidentTracker()
    tracker.update(41, [lost_state(41)])
    tracker.update(50, [loss_spike(50)])

    tracker.update(51, [lost_state(51, severity=Severity.WARNING)])

    assert len(tracker.open_incidents) == 2


def test_what_shows_beside_a_series_that_turns_grave_in_this_step_is_of_its_incident():
    tracker = IncidentTracker()
    tracker.update(41, [finite(step=41)])

    graver = finite(step=42, severity=Severity.WARNING, rule="b")
    tracker.update(42, [graver, finite("dgrad", "blocks.0", 42, severity=Severity.WARNING)])

    assert len(tracker.open_incidents) == 1


@pytest.mark.parametrize(("ongoing", "kind", "step", "num"), [
    (True, "activation", 48, 1), (False, "activation", 48, 2), (True, "param", 48, 2), (True, "activation", 68, 2),
])  # fmt: skip
def test_what_comes_after_a_first_cause_that_still_shows_is_of_its_young_incident(ongoing, kind, step, num):
    tracker = IncidentTracker()
    root = finite("param", "tok.weight", 41, severity=Severity.CRITICAL)
    tracker.update(41, [root])

    other = finite(kind, "blocks.3.dropout", step, severity=Severity.INFO, site_pos=9)
    tracker.update(step, [other], facts=StepFacts(ongoing=(root.id,) if ongoing else ()))

    assert len(tracker.open_incidents) == num
