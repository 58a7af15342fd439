"""A post-mortem as Markdown: the same parts in the same order; a curve is a line of letters and its words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sentinel.postmortem.curve_shape import sparkline
from sentinel.postmortem.report_document import (
    Block,
    Curve,
    Grid,
    Items,
    NamedTexts,
    Preformatted,
    Prose,
    ReportDocument,
    ReportPart,
)
from sentinel.printable import printable
from sentinel.report.message import Link

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~!$&@])")
_LINE_BEGIN = re.compile(r"^(\d*)([-+=.)])(?=[\s=-]|$)")
"""What would begin a list, a rule or a heading."""
_FENCE = re.compile(r"`{3,}")


def as_markdown(document: ReportDocument) -> str:
    """Return the text; what others made is escaped, so that it is neither markup nor HTML."""
    lines = [f"# {_escaped(document.title)}", "", _escaped("; ".join(document.about))]
    for notice in document.notices:
        lines += ["", f"> {_escaped(notice)}"]
    for part in document.parts:
        lines += _part(part, 2)
    return "\n".join(lines) + "\n"


def _part(part: ReportPart, level: int) -> Iterator[str]:
    yield from ("", f"{'#' * level} {_escaped(part.title)}")
    for block in part.blocks:
        yield ""
        yield from _block(block)
    for inner in part.parts:
        yield from _part(inner, level + 1)


def _block(block: Block) -> Iterator[str]:
    match block:
        case Prose():
            words = _escaped(block.text)
            yield f"*{words}*" if block.tone in ("missing", "note") else f"**{words}**" if block.tone else words
        case Items():
            for at, item in enumerate(block.items, 1):
                words = f"[{_escaped(item.name)}](<{_address(item.url)}>)" if isinstance(item, Link) else _escaped(item)
                yield f"{at}. {words}" if block.is_numbered else f"- {words}"
        case NamedTexts():
            for name, text in block.pairs:
                yield f"- **{_escaped(name)}**: {_escaped(text)}"
        case Grid():
            yield f"| {' | '.join(map(_escaped, block.heads))} |"
            yield f"|{'---|' * len(block.heads)}"
            for row in block.rows:
                yield f"| {' | '.join(map(_escaped, row))} |"
            if block.caption:
                yield from ("", _escaped(block.caption))
        case Preformatted():
            yield from _fenced(list(block.lines))
        case Curve():
            yield from _fenced([block.title, sparkline(block), block.caption])


def _fenced(lines: list[str]) -> Iterator[str]:
    given = [printable(line) for line in lines]
    longest = max((len(found[0]) for line in given for found in _FENCE.finditer(line)), default=2)
    fence = "`" * max(3, longest + 1)
    yield from (f"{fence}text", *given, fence)


def _escaped(text: str) -> str:
    """Return a text in one line that Markdown shows letter by letter."""
    return _LINE_BEGIN.sub(r"\1\\\2", _MARKUP.sub(r"\\\1", printable(text)))


def _address(url: str) -> str:
    return re.sub(r"[<>\s\\]", lambda found: f"%{ord(found[0]):02X}", printable(url))
