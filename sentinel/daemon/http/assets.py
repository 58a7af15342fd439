"""The built files of the page, as they lie in `sentinel/web/`; read once, when the server begins."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import sentinel

FOLDER = Path(sentinel.__file__).parent / "web"
MEDIA_TYPES = {"app.js": "text/javascript", "app.css": "text/css", "icon.svg": "image/svg+xml"}


class Asset(NamedTuple):
    """A file of the page."""

    body: bytes
    media_type: str
    etag: str
    """Names its content: a browser that has it asks for nothing more."""


def read_assets() -> Mapping[str, Asset]:
    """Return name -> file."""
    bodies = {name: (FOLDER / name).read_bytes() for name in MEDIA_TYPES}
    return {
        name: Asset(body, MEDIA_TYPES[name], f'"{hashlib.sha256(body).hexdigest()[:32]}"') for name, body in bodies.items()
    }


ASSETS = read_assets()
