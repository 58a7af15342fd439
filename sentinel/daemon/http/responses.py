"""The shapes of an answer: JSON values, lines of JSON that are at hand, and a refusal or a failure in words."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response


def plain(value: Any, status: int = 200) -> Response:
    """Return a value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def lines(name: str, items: list[bytes]) -> Response:
    """Return {name: [...]} of items that are JSON already."""
    body = b'{"' + name.encode() + b'":[' + b",".join(items) + b"]}"
    return Response(body, media_type="application/json")


def problem(status: int, reason: str) -> Response:
    """Return {"error": reason}; of 401 with what is asked for."""
    extra = {"WWW-Authenticate": 'Bearer, Basic realm="sentinel", charset="UTF-8"'} if status == 401 else {}
    return JSONResponse({"error": reason}, status, headers=extra)
