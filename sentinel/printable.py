"""Text that others made, as it may be shown: every character that is none to see is written as an escape.

Names of modules, values, runs and files come from trainers and may hold what moves a terminal's cursor, ends a log line or
turns the direction of writing.
"""

from __future__ import annotations

import re
from typing import Any, TextIO

_UNSEEN_IN_LINES = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
"""Control characters, C1 too, but tab and line feed; line and paragraph separators, marks of direction, surrogates."""


def printable(text: str) -> str:
    r"""Return text in one visible line: `\u001b` stands for what cannot be seen, as JSON writes it."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def printable_lines(text: str) -> str:
    """Return text in which tabs and line feeds stay, and what else cannot be seen is escaped."""
    return _UNSEEN_IN_LINES.sub(lambda found: _escaped(found[0]), text)


class PrintableLines:
    """A text stream that writes lines to another one, with what cannot be seen in them escaped. JSON stays the same JSON."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.unfiltered: TextIO = getattr(stream, "unfiltered", stream)
        """Where what was made printable may be written with colours."""

    def write(self, text: str) -> int:
        """Write text, and return how much of it was taken: all."""
        self._stream.write(printable_lines(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def _escaped(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
