"""Anomalies and incidents that no rule found: whole, with what a test is about said and the rest as usual."""

from __future__ import annotations

from typing import Any

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.incident import Incident


def a_nan(kind: str = "activation", name: str = "blocks.0", step: int = 5, **fields: Any) -> Anomaly:
    """Return an anomaly with the identity that a rule would give it: a critical NaN of rank 0's first micro-step.

    fields: those of `Anomaly` that differ; with a `value` there is no text for one.
    """
    given: dict[str, Any] = {
        "run": "r", "attempt": 0, "rank": 0, "micro_step": 0, "pp_stage": 0, "vpp_stage": 0, "call_id": None,
        "statistic": "nans", "rule": "nan", "detector": "AnomalyNan", "severity": Severity.CRITICAL, "value": None,
        "value_text": "nan" if fields.get("value") is None else "", "time": float(step),
    } | fields  # fmt: skip
    series = f"{name}/{kind}/{given['statistic']}/{given['call_id']}"
    identity = (given["run"], given["attempt"], step, given["micro_step"], given["rank"], series, given["rule"])
    return Anomaly(**{"id": anomaly_id(*identity), "tag_name": name, "kind": kind, "step": step, **given})


def an_excursion(kind: str = "activation", name: str = "blocks.0", step: int = 5, **fields: Any) -> Anomaly:
    """Return an anomaly of a finite value that all ranks share: a norm that a warning finds turbulent, unless said."""
    usual = {
        "rank": None, "micro_step": None, "statistic": "norm", "rule": "turbulence", "detector": "AnomalyTurbulence",
        "severity": Severity.WARNING, "value": 9.0, "baseline": 1.0, "score": 2.0,
    }  # fmt: skip
    return a_nan(kind, name, step, **(usual | fields))


def an_incident(number: int = 1, **fields: Any) -> Incident:
    """Return the first revision of an open incident `i<number>` of step 7, a warning, with the fields that differ."""
    usual: dict[str, Any] = {
        "id": f"i{number}", "revision": 1, "run": "r", "attempt": 0, "state": "open", "opened_step": 7, "last_step": 7,
        "severity": Severity.WARNING, "title": "NaN in blocks.3", "root": "a1", "time": 100.0,
    }  # fmt: skip
    return Incident(**(usual | fields))
