"""Live tensors on the page: pictures of what ranks trace, for whoever has a token."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sentinel.command import TraceTensors
from sentinel.control.command_files import CommandFiles
from sentinel.daemon.http.tokens import load_tokens

from ..daemon.test_daemon import daemon, url
from ..support.browser import Looked
from ..support.serving import small_run
from ..support.traces import TracingRank
from ..support.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.server, pytest.mark.slow]
RUN, EVIL = "train", "<img src=x onerror=alert(1)>layers.0"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("runs")
    small_run(directory / RUN).write(3)
    with daemon(directory) as one:
        wait_for(one.api.is_ready)
        yield directory


def test_pictures_come_while_it_trains_and_only_with_a_token(browser: Browser, runs: Path) -> None:
    tokens = load_tokens(runs / ".daemon")
    with Looked(browser, url(runs)) as looked:
        page = looked.go(f"/#/runs/{RUN}/tensors", "a token is needed")
        page.get_by_label("token", exact=True).fill(str(tokens.control))
        page.get_by_text("nothing is traced: order it").wait_for()
        page.get_by_role("textbox", name="modules").fill("layers.0, lm_head")
        page.get_by_role("combobox", name="what").select_option("attention")
        page.get_by_role("button", name="Order").click()
        page.get_by_text("Ordered; the ranks obey").wait_for()
        [order] = [one for _, one in CommandFiles(runs / RUN / "control").fresh() if isinstance(one, TraceTensors)]
        assert (order.kinds, order.targets, order.for_steps) == (("attention",), ("layers.0", "lm_head"), 100)

        ranks = [TracingRank(runs / RUN, rank, EVIL) for rank in range(2)]
        for rank in ranks:
            rank.step(5)
        page.get_by_text(re.compile("step 5")).first.wait_for()
        page.locator("canvas.picture").first.wait_for()
        assert page.locator("section.traced h2").first.inner_text().startswith("<img src=x onerror=alert(1)>layers.0")
        ranks[0].step(6)
        page.get_by_text(re.compile("step 6")).first.wait_for()
        page.get_by_text("1 of 2 ranks that trace; 1 are not shown").wait_for()
        page.get_by_role("textbox", name="ranks").fill("1")
        page.get_by_role("textbox", name="ranks").press("Enter")
        page.get_by_text(re.compile("step 5")).first.wait_for()
        page.get_by_role("textbox", name="ranks").fill("0-1")
        page.get_by_role("textbox", name="ranks").press("Enter")
        page.get_by_role("heading", name="Rank 0, step 6").wait_for()
        page.get_by_role("heading", name="Rank 1, step 5").wait_for()
        page.get_by_text("2 of 2 ranks that trace").wait_for()
        assert looked.violations_here() == {}
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Withdrawn.").wait_for()
        assert looked.complaints == []
    for rank in ranks:
        rank.writer.thread.close(10.0)
