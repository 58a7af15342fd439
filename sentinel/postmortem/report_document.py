"""ReportDocument: a post-mortem as values, which `html_form` and `markdown_form` write each in its own way.

All texts are plain: whoever writes them out escapes them. What is not recorded is a `Prose` whose tone is MISSING.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from sentinel.report.message import Link, visible

NOTE, MISSING, CRITICAL, WARNING, INFO = "note", "missing", "critical", "warning", "info"
"""Tones of a paragraph: what stands apart, what the run did not record, and the three severities."""

MAX_TEXT = 2000
"""Most characters of a paragraph or an item; a bound on the file: names come from trainers and may be a megabyte."""
MAX_CELL = 300
"""The same of a cell of a table."""


class Prose(msgspec.Struct, frozen=True):
    """A paragraph."""

    text: str
    tone: str = ""


class Items(msgspec.Struct, frozen=True):
    """A list of sentences, or of addresses."""

    items: tuple[str | Link, ...]
    is_numbered: bool = False


class NamedTexts(msgspec.Struct, frozen=True):
    """Names, and what is said under each."""

    pairs: tuple[tuple[str, str], ...]


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """A table."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    tones: tuple[str, ...] = ()
    """One a row, of the severities; empty: none has any."""
    caption: str = ""


class Preformatted(msgspec.Struct, frozen=True):
    """Lines whose letters stand below one another: a drawing, commands, a configuration."""

    lines: tuple[str, ...]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A value over steps, before and after."""

    title: str
    steps: tuple[int, ...]
    """Rising; of a column of several steps its first."""
    least: tuple[float | None, ...]
    """As long as `steps`; None: no finite value there."""
    greatest: tuple[float | None, ...]
    bad_steps: tuple[int, ...] = ()
    """Steps in which something was not finite."""
    marked: tuple[int, int]
    """First and last step of what it is about."""
    caption: str
    """The same in words, for who does not see it."""


Block: TypeAlias = Prose | Items | NamedTexts | Grid | Preformatted | Curve


class ReportPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part under a heading; parts of it stand behind its own blocks."""

    title: str
    blocks: tuple[Block, ...] = ()
    parts: tuple[ReportPart, ...] = ()


class ReportDocument(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, in the order in which a person who was paged reads."""

    title: str
    tone: str = ""
    """Severity of what it is about; empty: nothing was found."""
    about: tuple[str, ...]
    """What it is, of when, by which version: short texts under the title."""
    notices: tuple[str, ...] = ()
    """What a reader has to know before all else: that the run is live, that files were torn."""
    parts: tuple[ReportPart, ...]


def missing(text: str) -> Prose:
    """Return the line that says that something is not recorded."""
    return Prose(f"Not recorded: {text}", MISSING)


def shown(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text that others made, in one visible line of bounded length."""
    return visible(text, limit)


def cells(*values: object) -> tuple[str, ...]:
    """Return a row of a table; None is an empty cell."""
    return tuple("" if value is None else shown(str(value), MAX_CELL) for value in values)


def listed(texts: Iterable[str], most: int) -> tuple[str, ...]:
    """Return the first `most` texts, and how many there are beyond them."""
    given = [shown(text) for text in texts]
    return (*given[:most], *([f"and {len(given) - most} more"] if len(given) > most else []))


def with_count(blocks: Sequence[Block], num_hidden: int, what: str) -> tuple[Block, ...]:
    """Return blocks, and behind them how many of what they list are left out."""
    return (*blocks, *([Prose(f"{num_hidden:,} more {what} are not listed here.", NOTE)] if num_hidden > 0 else []))
