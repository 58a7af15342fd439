"""The views of one run beside its values, in a real Chromium: its pipeline, and its experts and heads."""

from __future__ import annotations

import functools
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sentinel.testing import Nan

from ..support.browser import Looked
from ..support.expert_run import IDLE_EXPERT, expert_run, write_with_vectors
from ..support.hostile_run import EVIL, write_hostile_run
from ..support.waiting import wait_for
from .shown_runs import LONG_S, shown_runs

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.server, pytest.mark.slow]

RUN, HOSTILE = "moe-1f1b", "hostile"
STEPS, BAD, MICRO_STEP = 40, 30, 2
shown = functools.partial(wait_for, timeout_s=LONG_S, interval_s=0.1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline under 1F1B, with a NaN, whose router bears a hostile name; and a hostile run without vectors."""
    directory = tmp_path_factory.mktemp("runs")
    source = expert_run(
        directory / RUN, router=f"{EVIL}router", pp=4, dp=1, micro_steps=4, per_micro_step=True, schedule="1f1b"
    )
    source.plant(Nan(step=BAD, module="layers.1.attn", micro_step=MICRO_STEP))
    write_with_vectors(source, STEPS)
    write_hostile_run(directory / HOSTILE, is_skipped=False)
    return directory


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """The daemon's, once all is judged and in the histories."""
    with shown_runs(runs, {RUN: STEPS - 1, HOSTILE: 11}) as found:
        yield found


@pytest.fixture(scope="module")
def incident(address: str) -> str:
    with urllib.request.urlopen(f"{address}/api/v1/incidents?run={RUN}", timeout=LONG_S) as answer:
        return next(one["id"] for one in json.load(answer)["incidents"] if "layers.1.attn" in one["title"])


def readout(page: Page) -> str:
    return page.locator(".pipeline .readout").inner_text()


def test_the_incident_is_walked_along_the_causal_order_by_keyboard_and_by_buttons(looked: Looked, incident: str) -> None:
    page = looked.go(f"/#/runs/{RUN}/pipeline?incident={incident}", "in the causal order")
    rows = page.locator("table.events tbody tr")
    first = rows.first.inner_text()
    assert "rank 1" in first and "forward" in first and "came first" in first and "layers.1.attn" in first
    shown(lambda: readout(page).startswith("1 of ") and f"micro-step {MICRO_STEP}" in readout(page), "the first cause")
    assert page.get_by_role("button", name="Previous").is_disabled()

    canvas = page.locator(".pipeline canvas")
    canvas.focus()
    canvas.press("ArrowRight")
    canvas.press("ArrowRight")
    page.wait_for_url(re.compile("at=2"))
    shown(lambda: readout(page).startswith("3 of "), "the third")
    page.get_by_role("button", name="Previous").click()
    page.wait_for_url(re.compile("at=1"))
    canvas.press("End")
    shown(lambda: page.get_by_role("button", name="Next", exact=True).is_disabled(), "the end")
    assert page.locator("table.events tr[aria-current=true]").count() == 1
    page.get_by_role("button", name="First").click()
    page.wait_for_url(re.compile("at=0"))

    # The link leads back to the same place, and to the incident's story.
    again = looked.go(f"{page.url.replace('at=0', 'at=3')}", "in the causal order")
    shown(lambda: readout(again).startswith("4 of "), "the fourth, by its address")
    again.get_by_role("link", name="its story").click()
    again.get_by_role("link", name="how it spread").click()
    again.wait_for_url(re.compile(f"pipeline\\?incident={incident}"))


def test_passes_are_drawn_in_the_order_of_the_schedule_and_said_in_a_table(looked: Looked) -> None:
    page = looked.go(f"/#/runs/{RUN}/pipeline?step=5", "nothing was found in it")

    page.get_by_text("the order alone is drawn").wait_for()
    page.get_by_text("No rank recorded how long it waited").wait_for()
    page.get_by_role("cell", name="F0 B0 F1 B1 F2 B2 F3 B3").wait_for()
    canvas = page.locator(".pipeline canvas")
    box = canvas.bounding_box()
    assert box is not None
    # The last of four rows, at the fourth of fourteen columns: the first forward of the last stage.
    canvas.hover(position={"x": box["width"] * 3.5 / 14, "y": box["height"] * 0.9})
    page.locator(".pipeline .readout", has_text="rank 3, forward of micro-step 0").wait_for()
    page.get_by_role("button", name="Step behind").click()
    page.wait_for_url(re.compile("step=6"))
    page.get_by_label("step", exact=True).fill(str(BAD))
    page.get_by_role("button", name="Show").click()
    page.get_by_text(re.compile(rf"in the causal order; step {BAD}")).wait_for()
    page.get_by_label("incident what was found").select_option(index=1)
    page.wait_for_url(re.compile("incident=i"))
    page.get_by_text("The way it took").wait_for()


TYPED_AT_ONCE = """() => new Promise((resolve) => {
  const field = document.querySelector('form.inline input');
  const type = () => {
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, '30');
    field.dispatchEvent(new Event('input', { bubbles: true }));
    requestAnimationFrame(() => setTimeout(() => resolve(field.value), 200));
  };
  addEventListener('hashchange', () => queueMicrotask(() => queueMicrotask(type)), { once: true });
  document.querySelector('button[aria-label="Step behind"]').click();
})"""


def test_what_is_typed_as_soon_as_another_step_is_shown_stays(looked: Looked) -> None:
    page = looked.go(f"/#/runs/{RUN}/pipeline?step=5", "nothing was found in it")

    assert page.evaluate(TYPED_AT_ONCE) == "30"
    page.wait_for_url(re.compile("step=6"))


def test_a_step_that_is_gone_says_so_and_what_is_drawn_in_its_place(looked: Looked) -> None:
    page = looked.go(f"/#/runs/{RUN}/pipeline?step=99999", "Step 99999 is no longer in the spool")

    page.get_by_text(f"schedule of step {STEPS - 1}").wait_for()


def test_experts_without_tokens_come_first_and_heads_are_those_of_a_rank(looked: Looked) -> None:
    page = looked.go(f"/#/runs/{RUN}/experts", "1 without a token")
    cells = page.locator("table tbody tr").first.locator("td").all_inner_texts()
    canvas = page.locator(".heat canvas")

    assert cells[0] == str(IDLE_EXPERT) and cells[5] == f"none since step {STEPS // 2 - 1}"
    name = page.locator(".toolbar select").nth(1).inner_text()
    assert "<script>alert(1)</script>" in name and name.strip().endswith("router:load") and "\x00" not in name
    assert page.locator("figure.plot").count() == 3
    canvas.focus()
    canvas.press("ArrowDown")
    page.locator(".readout", has_text=re.compile(rf"expert 1, step {STEPS - 1}: [\d.]+ % of the tokens")).wait_for()
    page.get_by_label("what").select_option("attention")
    page.get_by_text("4 heads of rank 0").wait_for()
    page.wait_for_url(re.compile("kind=attention"))
    looked.go(page.url, "4 heads of rank 0")


def test_a_run_without_vectors_says_what_to_switch_on(looked: Looked) -> None:
    looked.go(f"/#/runs/{HOSTILE}/experts", "probes: {router: {step_interval: 10}}")
    looked.go(f"/#/runs/{HOSTILE}/experts?kind=attention", "probes: {attention: {step_interval: 100}}")


def test_hostile_names_are_shown_escaped_in_the_pipeline(looked: Looked) -> None:
    page = looked.go(f"/#/runs/{HOSTILE}/pipeline?step=8", "in the causal order")
    page.get_by_text("per_micro_step: true").wait_for()

    text = page.locator("table.events").inner_text()
    assert "<script>alert(1)</script>" in text and "\\u001b" in text and "\x1b" not in text and "\u202e" not in text
    assert page.evaluate("document.querySelectorAll('main script, [style*=expression]').length") == 0


@pytest.mark.parametrize("view", ["pipeline", "experts"])
def test_a_phone_shows_these_views_within_its_width(browser: Browser, address: str, incident: str, view: str) -> None:
    with Looked(browser, address, viewport={"width": 390, "height": 800}, color_scheme="dark") as looked:
        page = looked.go(f"/#/runs/{RUN}/{view}?incident={incident}", "Experts and heads")
        page.locator("canvas").first.wait_for()
        page.locator("table").first.wait_for()

        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert looked.complaints == []


def test_these_views_are_accessible_by_the_rules_of_axe(looked: Looked, incident: str) -> None:
    views = {
        f"/#/runs/{RUN}/pipeline?incident={incident}": "The way it took",
        f"/#/runs/{RUN}/experts": "1 without a token",
        f"/#/runs/{HOSTILE}/experts": "trainer's configuration",
    }

    assert looked.violations(views) == {}
