"""The runbook that a report names is the one that the runbooks' own table gives for the rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sentinel.postmortem.runbook_pages import BY_DETECTOR, DIAGNOSES, pages_of
from sentinel.rules.language.loader import load_pack

from ..support.anomalies import an_incident

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"


def test_each_detector_has_the_page_of_its_rules() -> None:
    table = re.findall(
        r"^\| \[[^\]]+\]\(([\w-]+)\.md\) \| (`.*`) \|$", (RUNBOOKS / "index.md").read_text("utf-8"), re.MULTILINE
    )
    pack = load_pack(())
    expected = {pack.rule(rule).detector: page for page, rules in table for rule in re.findall(r"`([\w-]+)`", rules)}

    assert expected == BY_DETECTOR


@pytest.mark.parametrize("suspected", sorted(DIAGNOSES))
def test_every_page_that_is_named_exists(suspected: str) -> None:
    incident = an_incident(detectors=("AnomalyNan", "AnomalyTurbulence"), suspected=suspected)

    assert pages_of(incident) == ["non-finite", "tensor-health", f"diagnosis-{suspected}"]
    assert all((RUNBOOKS / f"{page}.md").is_file() for page in pages_of(incident))
