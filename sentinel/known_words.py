"""What somebody may have meant who wrote a word that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def near(word: str, known: Collection[str]) -> str:
    """Return `; did you mean "x"?` for the nearest known word, or nothing."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not found:
        lower = {item.lower(): item for item in known}
        found = [lower[match] for match in difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)]
    return f'; did you mean "{found[0]}"?' if found else ""


def nearest(word: str, known: Collection[str]) -> str:
    """Return `; did you mean "x"?`, or the list of what is known when nothing is near."""
    return near(word, known) or f"; known: {', '.join(known)}"
