"""The frame of every page, HTML that the server makes, a policy that lets nothing run, and the escape of every text."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from sentinel.printable import printable_lines

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1c2024;background:#fcfcfd}
h1{font-size:1.3rem;margin:0 0 .2rem}h2{font-size:1.05rem;margin:2rem 0 .4rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.35rem .7rem;border-bottom:1px solid #e4e6ea;
vertical-align:top}th{font-weight:600;color:#60646c;font-size:.85rem}
.critical{color:#b3191f;font-weight:600}.warning{color:#a05b00;font-weight:600}.info{color:#60646c}
a{color:inherit}.ok{color:#1d7a3c}.muted{color:#60646c}code{font:13px ui-monospace,monospace}
@media(prefers-color-scheme:dark){body{background:#15171a;color:#e6e8eb}th,td{border-color:#30343a}
.critical{color:#ff8488}.warning{color:#f0b35c}.ok{color:#6fd08c}.muted,.info,th{color:#a0a6ae}}
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

PAGE_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""The Content-Security-Policy of the page: nothing runs and nothing is fetched, whatever text got into it."""


def whole_page(title: str, body: str, *, refresh_s: int = 0) -> str:
    """Return a page. title: plain text. body: HTML whose texts are escaped. refresh_s: 0: it stays as it is."""
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">{refresh}'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def text(value: object) -> str:
    """Return any value as text of a page or of an attribute."""
    return escape("" if value is None else printable_lines(str(value)), quote=True)
