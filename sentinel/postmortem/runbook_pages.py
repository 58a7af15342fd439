"""Which pages of the runbooks that come with Sentinel are about an incident."""

from __future__ import annotations

from sentinel.incident import Incident

BY_DETECTOR = {
    "AnomalyNan": "non-finite", "NanStorm": "non-finite", "LossSpike": "loss-spike", "GradNormSpike": "loss-spike",
    "HiddenNan": "loss-spike", "Drift": "loss-spike", "StaleRank": "stale-rank", "SlowRank": "stale-rank",
    "ReplicaDivergence": "replica-divergence", "LostRows": "rows-lost", "ImpossibleFrame": "rows-lost",
    "RunEnded": "run-ended",
}  # fmt: skip
"""Detector -> page; of all others `tensor-health`."""
DIAGNOSES = frozenset({"batch", "model", "precision", "hardware", "program", "unknown"})


def pages_of(incident: Incident) -> list[str]:
    """Return the names of the pages, what it is before what is suspected."""
    pages = [BY_DETECTOR.get(one, "tensor-health") for one in incident.detectors]
    if incident.suspected in DIAGNOSES:
        pages.append(f"diagnosis-{incident.suspected}")
    return list(dict.fromkeys(pages)) or ["index"]
