"""What somebody may have meant who wrote a word that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest(word: str, known: Sequence[str]) -> str:
    """Return `; did you mean "x"?`, or the list of what is known when nothing is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not near:
        lower = {item.lower(): item for item in known}
        near = [lower[match] for match in difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)]
    return f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(known)}"
