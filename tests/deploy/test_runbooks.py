"""A page for whoever is woken: of each alert, each diagnosis, and each rule that is sent to people."""

import re
from pathlib import Path

import pytest

from sentinel.rules.language.loader import load_pack

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
PAGES = sorted(path for path in RUNBOOKS.glob("*.md") if path.name != "index.md")
DIAGNOSES = ("batch", "model", "precision", "hardware", "program", "unknown")


def test_each_diagnosis_has_its_page():
    said = (RUNBOOKS.parents[1] / "sentinel" / "incidents" / "diagnosis" / "diagnose.py").read_text()

    assert all(f"`{name}`" in said.partition('"""')[2].partition("\n")[0] for name in DIAGNOSES)
    assert {page.stem.removeprefix("diagnosis-") for page in PAGES if page.stem.startswith("diagnosis-")} == set(DIAGNOSES)


def test_each_rule_that_pages_is_on_the_page_of_its_incident():
    named = {rule for page in PAGES if page.stem.islower() for rule in re.findall(r"`([a-z-]+)`", page.read_text())}
    graver = {rule.name for rule in load_pack().rules if rule.severity.value == "critical"}

    assert graver and graver <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_says_what_it_means_how_to_look_what_to_do_and_when_it_is_harmless(page):
    text = page.read_text()

    meaning, *parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)

    assert parts[::2] == ["Check", "Do", "When it is harmless"]
    assert all(len(part.strip()) > 20 for part in (meaning, *parts[1::2]))
    # Something to type, with the indentation of a block of code.
    assert re.search(r"^    \S", parts[1], re.MULTILINE)


def test_the_first_page_leads_to_all_others():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (RUNBOOKS / "index.md").read_text()))

    assert linked == {page.name for page in PAGES}


@pytest.mark.parametrize("page", [*PAGES, RUNBOOKS.parent / "daemon.md"], ids=lambda page: page.stem)
def test_what_is_asked_over_http_is_asked_with_a_token(page):
    """Without one `/healthz` names nothing, and all else is refused, where other people use the machine too."""
    text = page.read_text()
    asked = re.findall(r"^    curl .*$", text, re.MULTILINE)

    assert all('-H "Authorization: Bearer TOKEN"' in line for line in asked)
    assert not asked or "tokens.json" in text
