"""Which changes of an incident make a revision: what goes on is written ever more seldom, what is news at once."""

from __future__ import annotations

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.incident import Incident
from sentinel.incidents.open_incident import OpenIncident
from sentinel.incidents.publishing import MAX_WAITING, published
from sentinel.incidents.tracker import IncidentTracker
from sentinel.order.origin import origin

from ..support.anomalies import a_nan


def an_open_incident(**fields: object) -> OpenIncident:
    root = a_nan("wgrad", "blocks.0.fc.weight", 3)
    incident = Incident(
        id="i0123456789ab", revision=1, run="run", attempt=0, state="open", opened_step=3, last_step=3,
        severity=Severity.WARNING, title="fc is NaN", root=root.id,
    )  # fmt: skip
    incident = msgspec.structs.replace(incident, **fields)
    return OpenIncident(
        incident=incident, nature="nonfinite", root=root, origin=origin(root, [root]), causes=[root], last_bad_step=3
    )


def changed(one: OpenIncident, joined: list[str] | None = None, **fields: object) -> Incident | None:
    """Change an incident as a step would, and return the revision that is written of it."""
    before = one.incident
    one.incident = msgspec.structs.replace(before, num_members=before.num_members + len(joined or ()), **fields)
    return published(one, joined or [], before, 0.0)


def test_numbers_that_change_in_each_step_make_ever_fewer_revisions():
    one = an_open_incident()

    steps = [step for step in range(30_000) if changed(one, evidence=(f"well for {step} steps: 1, 2, {step}",))]

    assert 20 < len(steps) < 80
    assert steps[:8] == list(range(8))


def test_no_member_is_lost_between_revisions_that_are_seldom():
    one, told = an_open_incident(), []
    num_revisions = 0
    for number in range(20_000):
        revision = changed(one, [f"a{number}"])
        num_revisions += revision is not None
        told += revision.members if revision else ()
        assert len(one.unpublished) < MAX_WAITING
    last = changed(one, state="resolved")

    assert num_revisions < 110
    assert last is not None
    assert [*told, *last.members] == [f"a{number}" for number in range(20_000)]
    assert last.num_members == 20_000


@pytest.mark.parametrize(
    "news",
    [
        {"severity": Severity.CRITICAL}, {"state": "resolved"}, {"title": "loss is NaN"}, {"suspected": "batch"},
        {"paged": True}, {"module": "blocks.3"}, {"skip_steps": (7,)}, {"evidence": ("well for 3 steps", "then not")},
        {"evidence": ("ill for 3 steps",)},
    ],
    ids=lambda news: next(iter(news)),
)  # fmt: skip
def test_what_a_reader_would_act_on_is_written_at_once(news):
    one = an_open_incident(evidence=("well for 3 steps",))
    for step in range(1000):
        changed(one, active_step=step)
    assert changed(one, active_step=1000) is None

    revision = changed(one, **news)

    assert revision is not None
    assert revision.revision == one.incident.revision


def test_a_step_that_changes_nothing_writes_nothing():
    one = an_open_incident()
    assert changed(one, active_step=1) is not None

    assert changed(one) is None


def test_what_waits_for_a_revision_survives_a_restart():
    def nan(number: int):
        return a_nan("activation", f"blocks.{number}", 10 + number, rank=number)

    plain, restarted = IncidentTracker(), IncidentTracker()
    for number in range(60):
        expected = plain.update(10 + number, [nan(number)])
        fresh = IncidentTracker()
        fresh.restore(restarted.snapshot())
        restarted = fresh

        assert restarted.update(10 + number, [nan(number)]) == expected
