"""What to do is about what was found: a stopped rank is continued, and a router that collapsed is evened."""

from __future__ import annotations

from typing import Any

import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.incidents.diagnosis.advice import advice
from sentinel.incidents.diagnosis.claim import Diagnosis
from sentinel.incidents.diagnosis.evidence import Evidence
from sentinel.incidents.tracker import IncidentTracker

from ..support.anomalies import an_excursion


def of_detector(kind: str, name: str, statistic: str, detector: str, **fields: Any) -> Anomaly:
    return an_excursion(
        kind, name, 40, statistic=statistic, detector=detector, rule=detector.lower(), severity=Severity.CRITICAL,
        **({"ranks": (0, 1)} | fields),
    )  # fmt: skip


def test_a_rank_that_is_stopped_is_to_be_continued_and_not_called_late() -> None:
    stopped = of_detector("health", "heartbeat", "stopped_s", "StaleRank", rank=1, message="rank 1 is stopped")

    (incident,) = IncidentTracker().update(40, [stopped])

    notified = " ".join(incident.evidence)
    assert "kill -CONT" in notified
    assert "py-spy" not in notified and "late or silent" not in notified


def test_of_a_rank_whose_node_is_not_heard_the_machine_is_to_be_looked_at() -> None:
    unheard = of_detector("health", "heartbeat", "unheard_s", "StaleRank", rank=1, message="rank 1 is silent")

    (incident,) = IncidentTracker().update(40, [unheard])

    notified = " ".join(incident.evidence)
    assert "see whether the machine of that node lives" in notified and "py-spy" not in notified


@pytest.mark.parametrize(
    ("kind", "name", "is_router"),
    [
        ("router", "layers.1.mlp.gate:inactive", True),
        ("param", "layers.1.mlp.gate.bias", True),
        ("param", "layers.1.mlp.router.weight", True),
        ("param", "layers.1.mlp.gate_proj.weight", False),
        ("wgrad", "layers.1.mlp.gate.bias", False),
    ],
)
def test_a_router_that_collapsed_is_not_mended_by_a_lower_learning_rate(kind: str, name: str, is_router: bool) -> None:
    evidence = Evidence(opened=40, is_liveness=False)
    exploded = of_detector(kind, name, "norm", "ExplodingTensor")
    evidence.join([exploded, of_detector("scalar", "loss", "value", "LossSpike")], None)

    text = advice(evidence, Diagnosis(suspected="model"))

    assert ("loads of the router layers.1.mlp." in text) == is_router
    assert ("learning rate" in text) == (not is_router)
