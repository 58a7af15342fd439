"""What the page shows of a run that goes on: told by the daemon, and asked for every few seconds where it cannot be told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.daemon import Daemon
from sentinel.history.config import HistoryConfig
from sentinel.testing import LossJump, SyntheticRun

from ..daemon.test_daemon import daemon, url
from ..support.browser import Looked
from ..support.serving import small_run
from ..support.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.server, pytest.mark.slow]

EVENTS = "**/api/v1/events"
OPEN = "the stream of the page"


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[tuple[str, SyntheticRun, Daemon]]:
    """A run of 40 steps that may go on, its loss jumping at step 50."""
    source = small_run(tmp_path / "run", pp=1, dp=1).plant(LossJump(step=50, factor=30.0))
    source.write(40)
    (tmp_path / "run").chmod(0o700)
    with daemon(tmp_path, DaemonConfig(history=HistoryConfig(enabled=True, flush_s=0.2))) as one:
        found = url(tmp_path)
        wait_for(lambda: one.api.is_ready() and (tmp_path / "run" / "history" / "manifest.json").is_file())
        yield found, source, one


def num_streams(one: Daemon) -> int:
    streams = None if one._http is None else one._http._streams
    return 0 if streams is None else streams.num_open


def row(page: Page, text: str) -> None:
    page.locator("table.runs tbody tr", has_text=text).wait_for()


def test_an_event_has_the_page_ask_at_once_and_nothing_else_does(
    browser: Browser, live_run: tuple[str, SyntheticRun, Daemon]
) -> None:
    found, source, one = live_run
    with Looked(browser, found) as looked:
        page, asked = looked.page, list[str]()
        page.on("request", lambda request: asked.append(request.url.partition("/api/v1/")[2].partition("?")[0]))
        page.clock.install()
        looked.go("/", "Open incidents")
        row(page, "39")
        wait_for(lambda: num_streams(one) == 1, OPEN)
        page.clock.pause_at(page.evaluate("Date.now()") + 1000)
        page.clock.run_for(6000)  # What the first event of a stream has it ask for again.
        page.wait_for_load_state("networkidle")
        asked.clear()
        for _ in range(20):
            page.clock.run_for(1000)
        assert [path for path in asked if path in ("runs", "incidents", "series")] == [], "it polls every 3 s elsewhere"

        source.write(20)
        # Its clock stands while nobody moves it: what waits for the page itself would wait for ever.
        for text, place in (("59", "table.runs tbody"), ("loss", "ul.incidents")):
            wait_for(lambda: page.clock.run_for(500) or text in "".join(page.locator(place).all_inner_texts()), text)  # noqa: B023
        assert {"runs", "incidents"} <= set(asked) and asked.count("events") == 0

        page.close()
        wait_for(lambda: num_streams(one) == 0, "the end of the stream with its tab")
    assert looked.complaints == []


def test_where_it_cannot_be_told_the_page_asks_every_few_seconds(
    browser: Browser, live_run: tuple[str, SyntheticRun, Daemon]
) -> None:
    found, source, one = live_run
    with Looked(browser, found) as looked:
        looked.page.route(EVENTS, lambda route: route.fulfill(status=503, body="{}"))
        page = looked.go("/", "Open incidents")
        row(page, "39")
        source.write(5)
        row(page, "44")
        assert num_streams(one) == 0
    assert looked.complaints and all("events" in one or "503" in one for one in looked.complaints), "of the stream alone"


def test_tabs_of_one_browser_share_few_streams_and_leave_room_for_its_questions(
    browser: Browser, live_run: tuple[str, SyntheticRun, Daemon]
) -> None:
    """A browser has six connections to one server: with a stream in each of many tabs nothing would be answered."""
    found, source, one = live_run
    with Looked(browser, found) as looked:
        pages = [looked.page, *(looked.page.context.new_page() for _ in range(4))]
        for page in pages:
            page.goto(found)
            row(page, "39")
        wait_for(lambda: num_streams(one) == 3, "as many streams as there are slots")
        source.write(5)
        for page in pages:
            row(page, "44")
        for page in pages[:3]:
            page.close()
        pages[3].reload()
        row(pages[3], "44")
        wait_for(lambda: num_streams(one) == 1, "the slots of closed tabs are free again")


def test_a_daemon_that_was_started_anew_is_followed_again_and_its_links_lead_to_the_same_place(
    browser: Browser, tmp_path: Path
) -> None:
    source = small_run(tmp_path / "run", pp=1, dp=1)
    source.write(5)
    (tmp_path / "run").chmod(0o700)
    with daemon(tmp_path) as one:
        first = url(tmp_path)
        wait_for(one.api.is_ready)
        with Looked(browser, first) as looked:
            page = looked.go("/#/runs/run/pipeline?step=3", "step 3: nothing was found in it")
            wait_for(lambda: num_streams(one) == 1, OPEN)
            one.stop()
            wait_for(lambda: one._http is not None and not one._http._thread.is_alive(), "the end of the first")
            with daemon(tmp_path, port=int(first.rpartition(":")[2])) as again:
                wait_for(lambda: num_streams(again) == 1, "the stream to the new daemon")
                page.reload()
                page.get_by_text("step 3: nothing was found in it").wait_for()
