"""What this process has open: a test asks for its own files, for others come and go meanwhile."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def open_files(part: str) -> list[str]:
    """Return what every open descriptor leads to, where it has a part in it: a folder, or `[pidfd]`."""
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # It was closed since it was listed, as the listing's own is.
            found.append(str(one.readlink()))
    return sorted(one for one in found if part in one)
