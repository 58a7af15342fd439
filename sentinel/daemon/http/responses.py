"""The shapes of an answer: JSON values, lines of JSON that are at hand, a page, and a refusal or a failure in words."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response

from sentinel.daemon.http.html_frame import PAGE_POLICY


def plain(value: Any, status: int = 200) -> Response:
    """Return a value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def html(body: str) -> Response:
    """Return a page, with the policy of pages."""
    return Response(body, headers={"Content-Security-Policy": PAGE_POLICY}, media_type="text/html")


def saved(name: str, body: bytes) -> Response:
    """Return a page that is saved as a file. name: without what a header or a file name may not hold.

    Its own policy stands in it; opened from here all the same, it can do no more than show its style.
    """
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox; frame-ancestors 'none'",
    }
    return Response(body, headers=headers, media_type="text/html")


def lines(name: str, items: list[bytes]) -> Response:
    """Return {name: [...]} of items that are JSON already."""
    body = b'{"' + name.encode() + b'":[' + b",".join(items) + b"]}"
    return Response(body, media_type="application/json")


def problem(status: int, reason: str) -> Response:
    """Return {"error": reason}; of 401 with what is asked for."""
    extra = {"WWW-Authenticate": 'Bearer, Basic realm="sentinel", charset="UTF-8"'} if status == 401 else {}
    return JSONResponse({"error": reason}, status, headers=extra)
