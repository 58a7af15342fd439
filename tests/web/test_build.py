"""The files of the page are what their sources make, and few bytes."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

import pytest

from sentinel.daemon.http.assets import ASSETS, FOLDER

SOURCES = Path(__file__).parents[2] / "web"
MOST_BYTES = 250_000
"""Of all files, compressed."""


def test_the_page_is_small() -> None:
    assert sum(len(gzip.compress(one.body)) for one in ASSETS.values()) < MOST_BYTES


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    text = b"".join(one.body for one in ASSETS.values())

    assert b"eval(" not in text and b"new Function" not in text and b"@import" not in text
    assert b"://" not in text.replace(b"http://www.w3.org/", b""), "names of namespaces alone"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_building_it_again_makes_the_same_bytes(tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "web", ignore=shutil.ignore_patterns("node_modules"))
    fetched = subprocess.run(
        ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=tmp_path / "web", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if fetched.returncode:
        pytest.skip(f"npm ci cannot fetch what builds the page: {fetched.stderr[-300:]}")

    subprocess.run(["node", "build.mjs", str(tmp_path / "built")], cwd=tmp_path / "web", check=True, timeout=300)

    built = {one.name: one.read_bytes() for one in (tmp_path / "built").iterdir()}
    assert built == {one.name: one.read_bytes() for one in FOLDER.iterdir()}
