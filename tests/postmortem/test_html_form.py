"""The HTML of a post-mortem: harmless whatever names are in it, whole by itself, readable in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sentinel.postmortem.composing import postmortem
from sentinel.postmortem.html_form import as_html
from sentinel.postmortem.report_document import (
    Curve,
    Grid,
    Items,
    NamedTexts,
    Preformatted,
    Prose,
    ReportDocument,
    ReportPart,
)
from sentinel.postmortem.run_material import Standing
from sentinel.printable import printable
from sentinel.report.message import Link

from ..support.browser import chromium
from ..support.hostile_run import EVIL, write_hostile_run
from ..support.serving import judge_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TAGS = {
    "a", "b", "body", "caption", "circle", "code", "dd", "div", "dl", "dt", "figcaption", "figure", "h1", "h2", "h3", "h4",
    "head", "html", "li", "line", "main", "meta", "nav", "ol", "p", "path", "pre", "rect", "section", "style", "svg",
    "table", "tbody", "td", "text", "th", "thead", "title", "tr", "ul",
}  # fmt: skip
"""All that a report is made of: nothing that runs, loads or sends."""
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]")


class Parsed(HTMLParser):
    """What a browser would see: tags, attributes, the style sheet, and the text of everything else."""

    def __init__(self, body: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.style = self.text = ""
        self._tag = ""
        self.feed(body)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self._tag == "style" and data.strip():
            self.style += data
        else:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""


def evil_document(name: str = EVIL) -> ReportDocument:
    """A document in which every text is hostile."""
    curve = Curve(
        title=name,
        caption=name,
        steps=(1, 2, 3),
        least=(1.0, None, 2.0),
        greatest=(1.5, None, 2.0),
        bad_steps=(2,),
        marked=(2, 2),
    )
    blocks = (
        Prose(name, "critical"), Items((name, Link(name, "https://example.org/?a=1&b=\"'><script>"))),
        NamedTexts(((name, name),)), Grid(heads=(name,), rows=((name,),), tones=("critical",), caption=name),
        Preformatted((name, "`````", name)), curve,
    )  # fmt: skip
    return ReportDocument(
        title=name, tone="critical", about=(name,), notices=(name,),
        parts=(ReportPart(title=name, blocks=blocks, parts=(ReportPart(title=name, blocks=blocks),)),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a run whose names are all hostile."""
    run_dir = tmp_path_factory.mktemp("hostile") / "run"
    write_hostile_run(run_dir)
    judge_run(run_dir)
    return as_html(postmortem(run_dir, None, 1.8e9, Standing(lines=(EVIL,)), ()))


def assert_harmless(body: str) -> None:
    seen = Parsed(body)
    assert seen.tags <= TAGS, seen.tags - TAGS
    assert UNSEEN.search(body) is None
    for tag, name, value in seen.attributes:
        assert not name.startswith("on") and name not in ("style", "src", "srcset", "action", "formaction"), (tag, name)
        assert name != "href" or value.startswith(("#p", "https://example.org/")), value


def test_no_name_becomes_markup(hostile: str) -> None:
    assert_harmless(hostile)
    assert printable(EVIL) in Parsed(hostile).text, "and it is shown as it is"


def test_no_text_of_any_block_becomes_markup() -> None:
    body = as_html(evil_document())

    assert_harmless(body)
    assert body.count("&lt;script&gt;") > 20


def test_lone_surrogates_are_written_as_escapes() -> None:
    assert r"\udcff" in as_html(evil_document("a\udcffb")).encode().decode()


def test_the_policy_allows_its_own_style_sheet_and_nothing_else(hostile: str) -> None:
    seen = Parsed(hostile)
    (policy,) = (
        value for tag, name, value in seen.attributes if tag == "meta" and name == "content" and "default-src" in value
    )
    digest = base64.b64encode(hashlib.sha256(seen.style.encode()).digest()).decode()

    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in seen.style and "@import" not in seen.style
    assert not re.search(r"https?://", hostile), "nothing leads elsewhere where nobody configured an address"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.mark.server
@pytest.mark.slow
def test_a_browser_shows_it_on_a_phone_in_the_dark_and_complains_of_nothing(
    browser: Browser, judged: Path, hostile: str, tmp_path: Path
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    good = as_html(postmortem(judged, "worst", 1.8e9, Standing()))
    for name, body in (("good", good), ("hostile", hostile)):
        (tmp_path / f"{name}.html").write_text(body, "utf-8")
        for scheme, width in (("light", 1200), ("dark", 375)):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            complaints: list[str] = []
            page.on("console", lambda one, said=complaints: said.append(one.text))
            page.on("request", lambda one, said=complaints: one.url.startswith("file:") or said.append(one.url))
            page.goto((tmp_path / f"{name}.html").as_uri())
            back = page.evaluate("getComputedStyle(document.body).backgroundColor")

            assert complaints == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than the screen"
            assert back == {"light": "rgb(252, 252, 253)", "dark": "rgb(20, 23, 26)"}[scheme]
            assert axe.run(page).response["violations"] == []
            page.close()
