"""The frame of every page: plain HTML in which every text is escaped, and the script that replaces it where it runs."""

from __future__ import annotations

from html import escape

from sentinel.printable import printable_lines

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'"
)
"""The Content-Security-Policy of the page: its own files and its own server, and nothing else. No text that got into it runs
or sets a style."""


def whole_page(title: str, body: str, *, root: str = "", refresh_s: int = 0) -> str:
    """Return a page. title: plain text. body: HTML whose texts are escaped.

    root: relative path to where the daemon is reached, empty or ending with a slash: it may lie behind a proxy, under any
    path. refresh_s: for readers without a script; 0: it stays as it is.
    """
    refresh = f'<noscript><meta http-equiv="refresh" content="{refresh_s}"></noscript>' if refresh_s else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">{refresh}'
        f'<link rel="icon" href="{root}assets/icon.svg"><link rel="stylesheet" href="{root}assets/app.css">'
        f'<script type="module" src="{root}assets/app.js"></script></head><body><div id="app">{body}</div></body></html>\n'
    )


def text(value: object) -> str:
    """Return any value as text of a page or of an attribute."""
    return escape("" if value is None else printable_lines(str(value)), quote=True)
