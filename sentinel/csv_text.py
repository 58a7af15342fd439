"""Text in the cells of a CSV file: spreadsheets take what begins like a formula for one, and run it."""

from __future__ import annotations

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a cell of text begins with that spreadsheets take for a formula (OWASP, CSV injection)."""
_GUARD = "'"


def guarded(text: str) -> str:
    """Return text as it may stand in a cell: an apostrophe before what looks like a formula, which spreadsheets hide.

    Text that has that apostrophe already gets another one, so that `unguarded` gives back every text.
    """
    return _GUARD + text if text.startswith(FORMULA) or _is_guarded(text) else text


def unguarded(text: str) -> str:
    """Return what `guarded` was given."""
    return text[1:] if _is_guarded(text) else text


def _is_guarded(text: str) -> bool:
    return text[:1] == _GUARD and text[1:].startswith((*FORMULA, _GUARD))
