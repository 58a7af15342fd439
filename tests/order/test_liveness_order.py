"""Where stale and slow ranks and differing copies stand: between steps in order, inside a step beside the arithmetic."""

from __future__ import annotations

import itertools

import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.incidents.tracker import IncidentTracker
from sentinel.order.causal import happens_before, sort_key
from sentinel.order.causes import first_causes

from ..support.anomalies import an_excursion


def on_rank_1(kind: str, name: str, step: int = 41, **fields: object) -> Anomaly:
    usual = {"rank": 1, "rule": "x", "detector": "X", "severity": Severity.CRITICAL, "value": 1.0, "dp_size": 2}
    return an_excursion(kind, name, step, **(usual | fields))


def stale(step: int = 41, rank: int = 1, **fields: object) -> Anomaly:
    return on_rank_1(
        "health", "blocks.1.mlp", step, rank=rank, ranks=(rank,), call_id=17, statistic="silent_s", rule="stale-rank",
        detector="StaleRank", message=f"rank {rank} is silent", **fields,
    )  # fmt: skip


def slow(step: int = 41, rank: int = 1) -> Anomaly:
    return on_rank_1(
        "health", "step", step, statistic="busy_s", rule="slow-rank", detector="SlowRank", severity=Severity.WARNING,
        message=f"rank {rank} arrives last", rank=rank, ranks=(rank,),
    )  # fmt: skip


def diverged(kind: str = "param", step: int = 41) -> Anomaly:
    return on_rank_1(
        kind, "blocks.1.mlp.weight", step, statistic="checksum", rule="replica-divergence", detector="ReplicaDivergence",
        message="param blocks.1.mlp.weight on rank 1 differs from its 3 copies: 1 against 2",
    )  # fmt: skip


def some(step: int) -> list[Anomaly]:
    nan = {"statistic": "nans", "value": None, "value_text": "nan", "micro_step": 0, "call_id": 9}
    return [
        stale(step), stale(step, rank=0), slow(step), diverged("param", step), diverged("wgrad", step),
        diverged("exp_avg", step), on_rank_1("activation", "blocks.1.mlp", step, site_pos=3, **nan),
        on_rank_1("dgrad", "blocks.1.mlp", step, site_pos=3, **nan), on_rank_1("scalar", "loss", step, statistic="value"),
        on_rank_1("scalar", "grad_norm", step, statistic="value"),
    ]  # fmt: skip


def test_order_is_a_partial_order_with_ranks_that_are_stale_and_copies_that_differ() -> None:
    them = [*some(41), *some(42)]

    for a, b in itertools.product(them, them):
        assert not (happens_before(a, b) and happens_before(b, a))
        if happens_before(a, b):
            assert sort_key(a) < sort_key(b)
            assert all(happens_before(a, c) for c in them if happens_before(b, c))


@pytest.mark.parametrize("of_rank", [stale(), slow()], ids=["stale", "slow"])
def test_a_rank_that_is_stale_or_slow_explains_nothing_inside_its_step(of_rank: Anomaly) -> None:
    others = [one for one in some(41) if one.kind != "health"]

    assert not any(happens_before(of_rank, one) or happens_before(one, of_rank) for one in others)
    assert happens_before(of_rank, some(42)[3]) and happens_before(some(40)[3], of_rank), "the control"


def test_weights_that_differ_come_before_what_is_computed_from_them() -> None:
    nan = on_rank_1("activation", "blocks.1.mlp", statistic="nans", value=None, value_text="nan", micro_step=0, call_id=9)

    assert happens_before(diverged("param"), nan)
    assert happens_before(nan, diverged("wgrad"))
    assert happens_before(diverged("wgrad"), diverged("exp_avg"))
    assert [one.statistic for one in map([diverged("param"), nan].__getitem__, first_causes([diverged("param"), nan]))] == [
        "checksum"
    ]


def test_ill_ranks_are_incidents_of_their_own_beside_that_of_the_numbers() -> None:
    tracker = IncidentTracker()
    nan = on_rank_1("activation", "blocks.1.mlp", statistic="nans", value=None, value_text="nan", micro_step=0, call_id=9)
    (of_numbers,) = tracker.update(41, [nan])
    (of_rank,) = tracker.update(41, [stale()])
    (of_speed,) = tracker.update(41, [slow()])
    (of_another,) = tracker.update(41, [slow(rank=2)])

    assert (of_rank.title, of_rank.ranks, of_rank.paged) == ("rank 1 is silent", (1,), True)
    assert (of_speed.id, of_speed.title) == (of_rank.id, "rank 1 is silent"), "one rank is one subject"
    assert (of_another.title, of_another.paged) == ("rank 2 arrives last", False)
    assert len({of_numbers.id, of_rank.id, of_another.id}) == 3


def test_what_differs_in_many_weights_is_one_incident() -> None:
    tracker = IncidentTracker()
    many = [on_rank_1("param", f"blocks.{n}.weight", statistic="checksum", message="differs") for n in range(50)]

    (incident,) = tracker.update(41, many)

    assert (incident.num_members, incident.severity, incident.paged) == (50, Severity.CRITICAL, True)
