"""The page over runs of many ranks, series and incidents: what it is answered and what it draws stay bounded."""

from __future__ import annotations

import functools
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest

from ..support.browser import Looked
from ..support.large_run import BAD, write_deep_run, write_wide_run
from ..support.waiting import wait_for
from .shown_runs import LONG_S, shown_runs

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.server, pytest.mark.slow]

"""Longest time for what the daemon does on a machine on which much else runs."""
MOST_NODES = 6000
"""Nodes of a page at once; what is drawn on a canvas is none."""
MOST_ANSWER = 4 * 2**20
"""Bytes of one answer."""
shown = functools.partial(wait_for, timeout_s=LONG_S, interval_s=0.2)


class Scale(NamedTuple):
    """How large it all is."""

    ranks: int
    series: int
    incidents: int


class Served(NamedTuple):
    """A daemon over a wide and a deep run."""

    address: str
    scale: Scale
    incident: str


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(Scale(128, 1000, 80), id="small"),
        pytest.param(Scale(2048, 10_000, 500), id="large", marks=pytest.mark.long),
    ],
)
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    scale: Scale = request.param
    runs = tmp_path_factory.mktemp("runs")
    write_wide_run(runs / "wide", num_ranks=scale.ranks, num_scalars=scale.series, num_incidents=scale.incidents)
    write_deep_run(runs / "deep", num_tensors=scale.series)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sentinel.daemon.pipeline_api.READ_S", LONG_S)
        with shown_runs(runs, {"deep": 9}) as found:
            with urllib.request.urlopen(f"{found}/api/v1/incidents?run=wide&limit=1000", timeout=LONG_S) as answer:
                incidents = json.load(answer)["incidents"]
            assert len(incidents) >= scale.incidents
            born = next(one["id"] for one in incidents if "born" in one["title"])
            yield Served(found, scale, born)


@pytest.fixture
def looked(browser: Browser, large: Served) -> Iterator[Looked]:
    """A page whose nodes and answers are bounded, and which complains of nothing."""
    with Looked(browser, large.address) as one:
        sizes: dict[str, int] = {}
        one.page.on("response", lambda answer: sizes.update({answer.url: int(answer.headers.get("content-length", 0))}))
        yield one
        nodes = one.page.evaluate("document.querySelectorAll('*').length")
        assert nodes < MOST_NODES and max(sizes.values()) < MOST_ANSWER, (
            nodes,
            max(sizes.items(), key=lambda item: item[1]),
        )
        assert one.complaints == []


def test_the_overview_shows_some_of_many_incidents_and_how_many_there_are(looked: Looked, large: Served) -> None:
    page = looked.go("/", "Open incidents")

    page.get_by_role("row", name=re.compile("^wide")).wait_for()
    page.get_by_text("Incidents that are over").click()
    assert page.locator("ul.incidents li").count() <= 300


def test_a_run_with_many_values_shows_the_first_and_offers_more(looked: Looked, large: Served) -> None:
    page = looked.go("/#/runs/wide", "Incidents")

    page.locator("figure.plot").first.wait_for()
    page.get_by_role("button", name=re.compile("more value")).click()
    shown(lambda: page.locator("figure.plot").count() == 12, "twelve plots")
    assert page.locator("ul.incidents li").count() <= 100


def test_ranks_that_did_alike_share_rows_of_the_pipeline(looked: Looked, large: Served) -> None:
    page = looked.go(f"/#/runs/wide/pipeline?incident={large.incident}", "in the causal order")

    assert page.locator(".heat .labels span").count() <= 64
    first = page.locator("table.events tbody tr").first.inner_text()
    assert "came first" in first and f"{BAD}" in first
    canvas = page.locator(".pipeline canvas")
    canvas.focus()
    for _ in range(5):
        canvas.press("ArrowRight")
    page.locator(".pipeline .readout", has_text=re.compile("^6 of ")).wait_for()
    page.get_by_text("F0 B0 F1 B1 F2 B2 F3 B3").first.wait_for()


def test_many_tensors_share_rows_of_the_heat_map(looked: Looked, large: Served) -> None:
    page = looked.go("/#/runs/deep/layers?kind=activation", "in the order of the forward")

    page.locator(".heat canvas").wait_for()
    page.get_by_text("What stands out").wait_for()
    assert page.locator("table tbody tr").count() <= 12
    looked.go("/#/search?q=attn", "Tensors")
