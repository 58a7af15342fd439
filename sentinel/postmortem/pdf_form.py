"""A post-mortem as PDF: the HTML of it, printed by a Chromium of the system.

Chosen over a library of PyPI: the browser prints the very page that was read, with its drawings, in whatever script names
are written, and nothing is added to what Sentinel needs. A library lays out tables and SVG in a way of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sentinel.errors import ConfigError, StoreError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
LIMIT_S = 120.0
"""Seconds that printing may take; a bound. Some two are usual."""


def find_browser() -> str:
    """Return the path of a browser that prints. ConfigError, with what to install, where there is none."""
    for name in BROWSERS:
        if (path := shutil.which(name)) is not None:
            return path
    raise ConfigError(
        f"PDF needs one of {', '.join(BROWSERS)}, found none; apt-get install chromium, or write .html and print that"
    )


def as_pdf(html: str) -> bytes:
    """Return the page as PDF. ConfigError where there is no browser, StoreError where it does not print."""
    browser = find_browser()
    with tempfile.TemporaryDirectory(prefix="sentinel-report-") as private:
        page, target = Path(private) / "report.html", Path(private) / "report.pdf"
        page.write_text(html, "utf-8")
        command = [
            browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-sync",
            "--disable-background-networking", "--no-pdf-header-footer", f"--user-data-dir={private}/profile",
            # Its sandbox cannot be made by root. The page holds no script and loads nothing.
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            f"--print-to-pdf={target}", page.as_uri(),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired as error:
            raise StoreError(
                f"{browser} did not print the report within {LIMIT_S:g} s; write .html and print that"
            ) from error
        except OSError as error:
            raise StoreError(
                f"{browser} cannot be started: {error.strerror or error}; write .html and print that"
            ) from error
        try:
            return target.read_bytes()
        except OSError as error:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise StoreError(f"{browser} printed no report: {said[0][:300]}; write .html and print that") from error
