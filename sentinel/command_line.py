"""A command line as it may be written down: in one visible line, and without what looks like a secret."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from sentinel.printable import printable

MAX_CHARS = 4000
"""Most characters that are written down; a bound, for some command lines hold a data set."""
HIDDEN = "***"

_SECRET = r"[\w.-]*(?:secret|token|passw|credential|api[_-]?key|access[_-]?key|private[_-]?key|auth)[\w.-]*"
_OPTION = re.compile(rf"-*{_SECRET}", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(-*{_SECRET}\s*[=:]\s*).+", re.IGNORECASE | re.DOTALL)
_IN_ADDRESS = re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)")
_INNOCENT = re.compile(
    r"-*(?:[\w.-]*(?:tokens|tokeniz|tokenis|token[_-]?(?:ids?|len|length|num|count))[\w.-]*|auto[\w.-]*|author[\w.-]*)", re.I
)
"""Options of every language model that have the word in them, and hold no secret."""


def command_words(arguments: Sequence[str]) -> str:
    """Return a command as a shell takes it, each value that looks like a secret as `***`; at most MAX_CHARS characters.

    An option is taken for one that holds a secret by its name: `--api-key X`, `--hf_token=X`, `PASSWORD=X`; a password in an
    address is left out too. What is not called so is written down as it was typed.
    """
    found: list[str] = []
    hides_next = False
    for one in arguments:
        if hides_next and not one.startswith("-"):
            found.append(HIDDEN)
            hides_next = False
            continue
        name = re.split(r"[=:\s]", one, maxsplit=1)[0]
        is_secret = _OPTION.fullmatch(name) is not None and _INNOCENT.fullmatch(name) is None
        if is_secret:
            found.append(_ASSIGNED.sub(rf"\g<1>{HIDDEN}", one))
        else:
            found.append(_IN_ADDRESS.sub(rf"\g<1>{HIDDEN}", one))
        hides_next = is_secret and one.startswith("-") and name == one
    words = printable(" ".join(one if one == HIDDEN else shlex.quote(one) for one in found))
    return words if len(words) <= MAX_CHARS else words[: MAX_CHARS - 3] + "..."
