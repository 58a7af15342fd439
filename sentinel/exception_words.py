"""An exception of somebody else's code in one line: its type, its message, and the file and line that raised it."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path

from sentinel.printable import printable

_OTHERS = (str(Path(importlib.__file__).parent), str(Path(__file__).parent), "<")
"""How the files begin that only hand their code on: the import system, this package, what is no file."""
_LIBRARIES = ("/site-packages/torch/", "/site-packages/numpy/")
"""In the files of libraries that many call: who called them is the place to look at."""


def described(error: BaseException) -> str:
    """Return `TypeError: no number (/site/their_package/sensor.py:12)`: one printable line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text += raised_at(error)
    return printable(text)


def raised_at(error: BaseException) -> str:
    """Return ` (FILE:LINE)`: the innermost place outside of Sentinel, the import system and torch; empty: there is none."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    theirs = [
        (file, line) for file, line in places if not file.startswith(_OTHERS) and not any(a in file for a in _LIBRARIES)
    ]
    return " ({}:{})".format(*theirs[-1]) if theirs else ""
