"""Ranks as people write them: numbers and ranges, `0,8-15`."""

from __future__ import annotations

import re

from sentinel.errors import ConfigError

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def ranks_in(text: str, where: str, most: int) -> tuple[int, ...]:
    """Return the ranks that a text names, rising, each once. ConfigError, which begins with `where`, names the word that is
    none, and where there are more than `most`."""
    found: set[int] = set()
    for word in filter(None, (one.strip() for one in text.split(","))):
        part = _PART.fullmatch(word) if word.isascii() else None
        if part is None:
            raise ConfigError(f'{where}: expected ranks and ranges of them, as in 0,8-15, got "{word[:40]}"')
        first, last = int(part[1]), int(part[2] or part[1])
        if last < first:
            raise ConfigError(f'{where}: expected a range that rises, got "{word}"')
        if len(found) + last - first >= most:
            # A range that is counted out could be of any size.
            raise ConfigError(f'{where}: expected at most {most} ranks, got more with "{word}"; name fewer')
        found.update(range(first, last + 1))
    return tuple(sorted(found))
