"""constraints.txt is the lock: every package that is installed has one exact version there."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
TOOLS = {"pip", "setuptools", "wheel", "sentinel"}
"""What installs, and what is installed from here."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    return {normal(line.partition("==")[0]): line.partition("==")[2] for line in lines if line}


def test_every_line_pins_one_exact_version() -> None:
    assert all(re.fullmatch(r"[0-9A-Za-z.!+-]+", version) for version in pinned().values())


def test_whatever_is_installed_is_pinned_to_what_it_is() -> None:
    pins = pinned()
    installed = {normal(one.name): one.version for one in importlib.metadata.distributions()}

    others = {
        name: (version, pins.get(name, "not there"))
        for name, version in installed.items()
        if name not in TOOLS and version.partition("+")[0] != pins.get(name)
    }

    assert others == {}
