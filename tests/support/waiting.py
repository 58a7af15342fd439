"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait_for(is_so: Callable[[], Any], what: str = "", *, timeout_s: float = 150.0, interval_s: float = 0.02) -> Any:
    """Return the first true value of `is_so`, asked every `interval_s`; fails after `timeout_s`, and says for what."""
    until = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < until, f"waited {timeout_s:g} s for {what or 'something that did not happen'}"
        time.sleep(interval_s)
    return found


def wait_for_words(path: Path, *words: str) -> str:
    """Return the text of a file as soon as it is there and has all of these words."""

    def read() -> str:
        text = path.read_text() if path.exists() else ""
        return text if all(word in text for word in words) else ""

    return str(wait_for(read, f"{words} in {path}", interval_s=0.01))
