"""The Markdown of a post-mortem: the same parts as the HTML has, and no name is markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sentinel.postmortem.composing import postmortem
from sentinel.postmortem.html_form import as_html
from sentinel.postmortem.markdown_form import as_markdown
from sentinel.postmortem.report_document import Items, Preformatted, Prose, ReportDocument, ReportPart
from sentinel.postmortem.run_material import Standing

from .test_html_form import Parsed, evil_document


def without_fences(text: str) -> str:
    """The lines that a reader of Markdown takes for markup: those outside of fences, each as long as it opened."""
    found, fence = [], ""
    for line in text.splitlines():
        if not fence and (opened := re.match(r"(`{3,})text$", line)):
            fence = opened[1]
        elif fence and line == fence:
            fence = ""
        elif not fence:
            found.append(line)
    assert not fence, "a fence is open at the end"
    return "\n".join(found)


def test_no_text_of_any_block_becomes_markup() -> None:
    shown = without_fences(as_markdown(evil_document()))

    assert "alert(1)" in shown
    assert not re.search(r"(?<!\\)<(?!https://example\.org/)", shown), "no HTML"
    assert "\nERROR forged line" not in shown and "\x1b" not in shown


@pytest.mark.parametrize(
    "name", ["# a", "- a", "1. a", "+ a", "= a", "---", "===", "> a", "| a |", "* a", "[a](b)", "~~~", "```"]
)
def test_a_name_is_no_heading_list_rule_or_table(name: str) -> None:
    lines = as_markdown(
        ReportDocument(title="t", about=("a",), parts=(ReportPart(title="p", blocks=(Prose(name), Items((name,)))),))
    ).splitlines()

    assert lines[-3].startswith("\\") or lines[-3].startswith("1\\."), lines[-3]
    assert lines[-1].removeprefix("- ").startswith("\\") or lines[-1] == "- 1\\. a", lines[-1]


def test_a_date_and_a_number_are_left_as_they_are() -> None:
    document = ReportDocument(title="2026-11-27 08:30", about=("1.5",), parts=())

    assert as_markdown(document) == "# 2026-11-27 08:30\n\n1.5\n"


def test_no_line_of_a_listing_ends_its_fence() -> None:
    lines = Preformatted(("```", "````` text", "# no heading"))
    document = ReportDocument(title="t", about=("a",), parts=(ReportPart(title="p", blocks=(lines, Prose("after"))),))

    assert without_fences(as_markdown(document)).split() == ["#", "t", "a", "##", "p", "after"]


def test_it_has_the_headings_that_the_page_has(judged: Path) -> None:
    document = postmortem(judged, None, 1.8e9, Standing())
    headings = re.findall(r"^#{2,4} (.*)$", as_markdown(document), re.MULTILINE)
    page = as_html(document)

    shown = [Parsed(one).text for one in re.findall(r"<h[2-4][^>]*>(.*?)</h[2-4]>", page)]
    assert [re.sub(r"\\(.)", r"\1", one) for one in headings] == shown
    assert len(shown) > 15
