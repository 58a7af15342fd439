"""What an incident explains, and what it does not: subject, lineage, age and size."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.errors import ConfigError
from sentinel.incident import Incident, IncidentAct
from sentinel.incidents.peers import IncidentConfig
from sentinel.incidents.tracker import IncidentTracker
from sentinel.report.alert import RouteConfig, change_of
from sentinel.run_end import RunEnd

from ..support.anomalies import an_excursion

INFO, WARNING, CRITICAL = Severity.INFO, Severity.WARNING, Severity.CRITICAL


def turbulent(kind: str, name: str, step: int, severity: Severity = WARNING, **fields: object) -> Anomaly:
    usual = {"rule": "turbulent-norm", "value": 2.0, "score": None, "time": 0.0}
    return an_excursion(kind, name, step, severity=severity, **(usual | fields))


def slow(rank: int, step: int, busy_s: float, severity: Severity = WARNING, usual_s: float = 0.03) -> Anomaly:
    return turbulent(
        "health", "step", step, severity, rank=rank, ranks=(rank,), statistic="busy_s", rule="slow-rank",
        detector="SlowRank", value=busy_s, baseline=usual_s, message=f"rank {rank} works {busy_s} s",
    )  # fmt: skip


def silent(rank: int, step: int) -> Anomaly:
    return turbulent(
        "health", "heartbeat", step, CRITICAL, rank=rank, ranks=(rank,), statistic="silent_s", rule="stale-rank",
        detector="StaleRank", value=30.0, baseline=30.0, message=f"rank {rank} is silent",
    )  # fmt: skip


def loss(step: int, value: float, severity: Severity = CRITICAL) -> Anomaly:
    return turbulent(
        "scalar", "loss", step, severity, statistic="value", rule="loss-spike", detector="LossSpike", value=value
    )


class Notified:
    """A tracker, and what a sink that hears warnings and pages is told of its revisions."""

    def __init__(self, **config: object) -> None:
        self.tracker = IncidentTracker(IncidentConfig(episode_quiet_steps=0, **config))  # type: ignore[arg-type]
        self.newest: dict[str, Incident] = {}
        self.messages: list[tuple[int, str, str]] = []
        """(step, change, title)"""

    def step(self, step: int, *anomalies: Anomaly, **more: object) -> None:
        self.take(step, self.tracker.update(step, anomalies, **more))  # type: ignore[arg-type]

    def take(self, step: int, revisions: list[Incident]) -> None:
        for one in revisions:
            change = change_of(self.newest.get(one.id), one, RouteConfig())
            self.newest[one.id] = one
            if change is not None:
                self.messages.append((step, change, one.title))

    def worst(self) -> Incident:
        return max(self.newest.values(), key=lambda one: one.severity.level)

    def quiet(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.step(step)


def test_an_older_note_about_one_rank_does_not_hide_a_true_straggler_elsewhere() -> None:
    notified = Notified()
    notified.step(16, slow(1, 16, 0.139, INFO))
    notified.quiet(17, 21)
    notified.step(22, slow(0, 22, 0.141, INFO))
    notified.quiet(23, 40)

    for step in range(41, 50):
        notified.step(step, *([slow(3, step, 4.0)] if step == 43 else []))

    assert notified.messages == [(43, "opened", "rank 3 works 4.0 s")]


def test_the_same_ranks_older_note_does_not_hide_it_either() -> None:
    notified = Notified()
    notified.step(30, slow(3, 30, 0.139, INFO))
    notified.quiet(31, 42)

    notified.step(43, slow(3, 43, 4.0))

    assert notified.messages == [(43, "opened", "rank 3 works 4.0 s")]


def test_a_note_that_lasts_becomes_the_warning_and_tells_its_own_figures() -> None:
    notified = Notified()
    notified.step(41, slow(3, 41, 0.139, INFO))
    notified.step(42)
    notified.step(43, slow(3, 43, 2.0))

    (incident,) = notified.tracker.open_incidents
    assert notified.messages == [(43, "opened", "rank 3 works 2.0 s")]
    assert incident.root == slow(3, 43, 2.0).id
    assert any("told before: rank 3 works 0.139 s" in line for line in incident.evidence)


def test_two_slow_ranks_are_two_incidents() -> None:
    notified = Notified()
    notified.step(41, slow(1, 41, 2.0), slow(3, 41, 3.0))

    assert sorted(title for _, _, title in notified.messages) == ["rank 1 works 2.0 s", "rank 3 works 3.0 s"]


def test_what_is_several_times_worse_is_told_once_with_its_own_figures() -> None:
    notified = Notified()
    notified.step(41, slow(3, 41, 0.06))
    notified.quiet(42, 45)
    notified.step(46, slow(3, 46, 2.0))
    notified.quiet(47, 49)
    notified.step(50, slow(3, 50, 2.2))
    notified.quiet(51, 55)

    assert notified.messages == [(41, "opened", "rank 3 works 0.06 s"), (46, "worse", "rank 3 works 2.0 s")]


def test_an_explosion_is_one_more_message_however_many_steps_it_grows() -> None:
    notified = Notified()
    for step, value in enumerate([1.5, 6.0, 40.0, 900.0, 901.0, 902.0], start=41):
        notified.step(step, loss(step, value))
    notified.quiet(47, 52)

    assert [change for _, change, _ in notified.messages] == ["opened", "worse"]
    assert "901" in notified.messages[1][2] or "900" in notified.messages[1][2]


def test_a_slow_rank_that_falls_silent_is_told_as_silent() -> None:
    notified = Notified()
    notified.step(41, slow(3, 41, 2.0))
    notified.step(44, silent(3, 44))

    assert notified.messages == [(41, "opened", "rank 3 works 2.0 s"), (44, "opened", "rank 3 is silent")]


def test_a_slow_rank_that_falls_silent_at_once_is_the_same_incident_and_told_as_silent() -> None:
    notified = Notified()
    notified.step(41, slow(3, 41, 2.0))
    notified.step(42, silent(3, 42))

    assert notified.messages == [(41, "opened", "rank 3 works 2.0 s"), (42, "raised", "rank 3 is silent")]


def test_ill_timing_and_ill_numbers_never_share_an_incident() -> None:
    notified = Notified()
    notified.step(41, slow(3, 41, 2.0), loss(41, 9.0))

    assert len(notified.tracker.open_incidents) == 2


def test_a_note_does_not_take_in_other_tensors_and_grow_grave_by_them() -> None:
    notified = Notified()
    notified.step(26, turbulent("wgrad", "blocks.0.fc.weight", 26, INFO))
    for step in (36, 38, 40):
        notified.step(step, turbulent("activation", "blocks.5.attn", step, INFO))
    notified.step(42, turbulent("activation", "blocks.5.attn", 42, WARNING))

    assert [(step, change) for step, change, _ in notified.messages] == [(42, "opened")]
    (first,) = [one for one in notified.tracker.open_incidents if one.opened_step == 26]
    assert (first.severity, first.num_members) == (INFO, 1)


def test_what_follows_of_a_spike_in_the_next_steps_is_not_told_again() -> None:
    notified = Notified()
    notified.step(41, loss(41, 9.0))
    notified.step(42, turbulent("wgrad", "blocks.0.fc.weight", 42), turbulent("exp_avg", "blocks.0.fc.weight", 42))
    notified.step(44, turbulent("param", "blocks.0.fc.weight", 44))
    notified.step(55, turbulent("exp_avg_sq", "blocks.0.fc.weight", 55))

    assert [change for _, change, _ in notified.messages] == ["opened"]


def test_a_skipped_step_carries_nothing_on() -> None:
    notified = Notified()
    notified.step(41, loss(41, 9.0), is_skipped=True)
    notified.step(42, turbulent("activation", "blocks.7", 42))

    assert [change for _, change, _ in notified.messages] == ["opened", "opened"]


def test_an_old_incident_explains_of_its_step_only_what_a_path_leads_to() -> None:
    notified = Notified(quiet_steps=10)
    early = {"rank": 0, "micro_step": 0, "call_id": 3, "depth": 0, "site_pos": 1, "place": {"dp": 0}, "dp_size": 2}
    other = early | {"rank": 1, "place": {"dp": 1}}
    for step in range(41, 71, 5):
        notified.step(step, turbulent("activation", "blocks.1", step, **early))
    notified.step(71, turbulent("activation", "blocks.1", 71, **early), turbulent("activation", "blocks.4", 71, **other))

    assert [(step, change) for step, change, _ in notified.messages] == [(41, "opened"), (71, "opened")]


def test_one_ranks_deviation_is_not_explained_by_anothers() -> None:
    notified = Notified()
    skew = {"rule": "rank-skew", "detector": "RankSkew", "statistic": "value"}
    notified.step(41, turbulent("scalar", "loss", 41, rank=1, ranks=(1,), **skew))
    notified.step(43, turbulent("scalar", "loss", 43, rank=3, ranks=(3,), **skew))

    assert [change for _, change, _ in notified.messages] == ["opened", "opened"]


def test_a_mask_of_minus_infinity_explains_no_nan() -> None:
    notified = Notified()
    bad = {"rule": "non-finite", "detector": "AnomalyNan", "value": None, "baseline": None, "rank": 0, "micro_step": 0}
    mask = turbulent("activation", "attn.scores", 41, INFO, statistic="infs", value_text="-inf", **bad)
    nan = turbulent("activation", "attn.out", 42, CRITICAL, statistic="nans", value_text="nan", **bad)
    notified.step(41, mask)
    notified.step(42, nan)

    assert [(step, change) for step, change, _ in notified.messages] == [(42, "opened")]
    assert notified.messages[0][2].startswith("NaN born in attn.out")


def test_the_end_of_a_run_ends_what_is_open_and_whoever_heard_of_it_hears_that() -> None:
    notified = Notified()
    notified.step(41, loss(41, 9.0), slow(2, 41, 0.05, INFO))
    notified.step(41, ended=RunEnd(how="signal", rank=2, step=41, detail="SIGKILL"))
    notified.quiet(42, 43)

    assert [(change) for _, change, _ in notified.messages] == ["opened", "ended"]
    assert {one.state for one in notified.newest.values()} == {"ended"}
    assert notified.tracker.open_incidents == []
    assert any("the run ended (signal, rank 2 first): SIGKILL" in line for line in notified.worst().evidence)


def act(incident: Incident, what: str, **fields: object) -> IncidentAct:
    return IncidentAct(incident=incident.id, act=what, who="ana", why="known", time=5.0, **fields)  # type: ignore[arg-type]


def test_people_acknowledge_close_and_reopen_and_each_is_told_once() -> None:
    notified = Notified()
    notified.step(41, loss(41, 9.0))
    (incident,) = notified.tracker.open_incidents

    for what in ("ack", "resolve", "reopen"):
        notified.take(42, notified.tracker.act(act(incident, what)))
    notified.quiet(43, 50)

    assert [change for _, change, _ in notified.messages] == ["opened", "acknowledged", "closed", "reopened"]
    (now,) = notified.tracker.open_incidents
    assert [one.act for one in now.acts] == ["ack", "resolve", "reopen"]
    notified.quiet(51, 61)
    assert notified.messages[-1][:2] == (61, "resolved")


def test_an_acknowledgement_runs_out() -> None:
    notified = Notified()
    notified.step(41, loss(41, 9.0))
    (incident,) = notified.tracker.open_incidents

    notified.take(42, notified.tracker.act(act(incident, "ack", until=100.0)))

    (now,) = notified.tracker.open_incidents
    assert now.acknowledged(99.0) is not None
    assert now.acknowledged(100.0) is None


@pytest.mark.parametrize(
    ("before", "what", "says"),
    [
        ((), "reopen", "expected an incident that is over, this one is open"),
        (("resolve",), "resolve", "expected an open incident, this one is closed already"),
        (("resolve",), "ack", "expected an open incident, this one is closed already"),
    ],
)
def test_acts_that_cannot_be_are_refused_and_change_nothing(before: tuple[str, ...], what: str, says: str) -> None:
    notified = Notified()
    notified.step(41, loss(41, 9.0))
    (incident,) = notified.tracker.open_incidents
    for one in before:
        notified.tracker.act(act(incident, one))
    snapshot = notified.tracker.snapshot()

    with pytest.raises(ConfigError, match=says):
        notified.tracker.act(act(incident, what))

    assert notified.tracker.snapshot() == snapshot


def test_an_unknown_incident_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected an open incident, or one of the last 64 that ended"):
        IncidentTracker().act(IncidentAct(incident="i0", act="ack", who="ana"))


def test_acts_survive_a_restart() -> None:
    notified = Notified()
    notified.step(41, loss(41, 9.0))
    (incident,) = notified.tracker.open_incidents
    notified.tracker.act(act(incident, "resolve"))
    fresh = IncidentTracker(IncidentConfig(episode_quiet_steps=0))
    fresh.restore(notified.tracker.snapshot())

    reopening = act(incident, "reopen")
    (again,) = fresh.act(reopening)

    assert again == notified.tracker.act(reopening)[0]
    assert again.state == "open"
    assert msgspec.structs.asdict(again)["acts"][-1].act == "reopen"
