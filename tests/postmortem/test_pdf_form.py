"""The PDF of a post-mortem: printed by a browser where there is one, and where there is none the words for that."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sentinel.errors import ConfigError, StoreError
from sentinel.postmortem.pdf_form import as_pdf, find_browser


def test_without_a_browser_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match=r"found none; apt-get install chromium, or write \.html"):
        find_browser()


@pytest.mark.slow
def test_a_browser_that_prints_nothing_is_an_error_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho no display here >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(StoreError, match=r"printed no report: no display here; write \.html"):
        as_pdf("<p>hello</p>")


@pytest.mark.server
@pytest.mark.slow
def test_a_page_is_printed() -> None:
    if not any(shutil.which(name) for name in ("chromium", "google-chrome")):
        pytest.skip("chromium is not installed: apt-get install chromium")

    assert as_pdf("<!doctype html><title>t</title><p>hello").startswith(b"%PDF-")
