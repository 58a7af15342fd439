"""A real browser, and what it complains of while a page is looked at."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page


BROWSERS = ("chromium-headless-shell", "chromium")
"""The first that is there is taken: without a window a page costs 0.25 s of processor time, in place of 2."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Yield the Chromium of the system; the test skips itself where there is none, or no playwright."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium-headless-shell")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=120_000)
        try:
            yield browser
        finally:
            browser.close()


class Looked:
    """A page that is looked at, and what the browser complained of: errors, what its policy refused, what was not found."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        """url: of the daemon. options: of the browser's context: `viewport`, `java_script_enabled`, ..."""
        self._context = browser.new_context(base_url=url, **{"viewport": {"width": 1200, "height": 900}, **options})
        self._context.set_default_timeout(120_000)
        self._has_script = options.get("java_script_enabled", True)
        self.page: Page = self._context.new_page()
        self.complaints: list[str] = []
        self.page.add_init_script(
            "addEventListener('securitypolicyviolation', (one) => console.error('policy: ' + one.violatedDirective))"
        )
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda one: self.complaints.append(f"page error: {one}"))
        self.page.on("dialog", lambda one: (self.complaints.append(f"dialog: {one.message}"), one.dismiss()))

    def _said(self, one: ConsoleMessage) -> None:
        if one.type in ("error", "warning"):
            self.complaints.append(f"{one.text} ({one.location.get('url')})")

    def __enter__(self) -> Looked:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def go(self, path: str, seen: str) -> Page:
        """Open a path of the daemon, and return the page once it shows a text."""
        # Where only what stands behind the # differs a browser would not load anything.
        self.page.goto("about:blank")
        self.page.goto(path)
        if self._has_script:
            # The server's own page says much of the same until the script takes it away.
            self.page.locator("main#content").wait_for()
        self.page.get_by_text(seen).first.wait_for()
        return self.page

    def violations(self, views: Mapping[str, str]) -> dict[tuple[str, str, str], list[str]]:
        """Return what axe finds wrong in views: (path, scheme, rule) -> elements.

        views: path -> a text that stands there.
        """
        found = {}
        for path, seen in views.items():
            self.go(path, seen)
            found.update({(path, *what): nodes for what, nodes in self.violations_here().items()})
        return found

    def violations_here(self) -> dict[tuple[str, str], list[str]]:
        """Return what axe finds wrong in what is seen: (scheme, rule) -> elements.

        In the dark its rules of contrast alone: nothing else is another one there.
        """
        axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
        found = {}
        for scheme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
            self.page.emulate_media(color_scheme=scheme)
            for one in axe.run(self.page, options={"resultTypes": ["violations"], **rules}).response["violations"]:
                nodes = one["nodes"][:3]
                found[scheme, one["id"]] = [f"{node['html'][:200]} {node['failureSummary'][:300]}" for node in nodes]
        self.page.emulate_media(color_scheme="light")
        return found
