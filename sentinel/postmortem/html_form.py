"""A post-mortem as one file of HTML: no scripts, nothing from elsewhere, and a policy that allows neither."""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from sentinel.postmortem.curve_shape import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, shape_of
from sentinel.postmortem.report_document import Block, Curve, ReportDocument, ReportPart
from sentinel.printable import printable_lines

FOLDER = Path(__file__).parent
BOX = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}


def as_html(document: ReportDocument) -> str:
    """Return the page. Every text is escaped by the template's engine, whoever made it."""
    style, digest = _style()
    return _template().render(
        document={
            "title": document.title, "tone": document.tone, "about": document.about, "notices": document.notices,
            "parts": [_part(one, f"p{at}") for at, one in enumerate(document.parts, 1)],
        },
        box=BOX, style=Markup(style),
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
    )  # fmt: skip


def _part(part: ReportPart, anchor: str) -> dict[str, Any]:
    return {
        "title": part.title,
        "anchor": anchor,
        "blocks": [_block(one) for one in part.blocks],
        "parts": [_part(one, f"{anchor}-{at}") for at, one in enumerate(part.parts, 1)],
    }


def _block(block: Block) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": type(block).__name__, **msgspec.structs.asdict(block)}
    if isinstance(block, Curve):
        found["shape"] = shape_of(block)
    return found


@functools.cache
def _style() -> tuple[str, str]:
    """Return the style sheet, and the hash by which the policy allows it and no other."""
    text = (FOLDER / "report.css").read_text("utf-8")
    return text, base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        # What cannot be seen, and surrogates that no encoding has, reach no page.
        finalize=lambda value: printable_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )  # fmt: skip
    return environment.get_template("report.html.jinja")
