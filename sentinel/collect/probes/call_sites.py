"""Where in the user's code a call comes from: the first frame outside of torch, of Python's own library, and of us."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

import sentinel

_OUTSIDE, _INSIDE, _PLUMBING = range(3)
"""User's code; torch's; the layers of torch that every collective passes, which say nothing."""

_STDLIB = sysconfig.get_paths()["stdlib"] + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(sentinel.__file__).parent) + "/"
_PLUMBING_FILES = ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py", "_contextlib.py")
MAX_KNOWN = 65536
"""Code objects remembered; programs that make code all the time begin anew."""
MAX_DEPTH = 400


class CallSite(NamedTuple):
    """A line of code: `pkg/file.py`, its number, and the function it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class CallSites:
    """Finds call sites; remembers what each code object is."""

    def __init__(self) -> None:
        self._kinds: dict[CodeType, int] = {}
        self._sites: dict[tuple[CodeType, int], CallSite] = {}

    def here(self, skipped: frozenset[str] = frozenset()) -> CallSite | None:
        """Return the site that calls; None when a function of torch whose name is in `skipped` stands in between.

        Where no frame is the user's (a backward on a thread of its own) the innermost telling frame of torch answers.
        """
        frame: FrameType | None = sys._getframe(1)
        inner: FrameType | None = None
        kinds = self._kinds
        for _ in range(MAX_DEPTH):
            if frame is None:
                break
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = self._classify(code)
            if kind == _OUTSIDE:
                return self._site(code, frame.f_lineno)
            if code.co_name in skipped:
                return None
            if kind == _INSIDE and inner is None:
                inner = frame
            frame = frame.f_back
        return CallSite("?", 0, "?") if inner is None else self._site(inner.f_code, inner.f_lineno)

    def stack(self, most: int) -> list[CallSite]:
        """Return the user's frames that lead here, innermost first."""
        frame: FrameType | None = sys._getframe(1)
        found: list[CallSite] = []
        while frame is not None and len(found) < most:
            code = frame.f_code
            kind = self._kinds.get(code)
            if (self._classify(code) if kind is None else kind) == _OUTSIDE:
                found.append(self._site(code, frame.f_lineno))
            frame = frame.f_back
        return found

    def _classify(self, code: CodeType) -> int:
        name = code.co_filename
        if name.startswith(_TORCH):
            kind = _PLUMBING if name.endswith(_PLUMBING_FILES) else _INSIDE
        elif name.startswith(("<frozen", _OURS)) or (name.startswith(_STDLIB) and "-packages/" not in name):
            kind = _PLUMBING
        else:
            kind = _OUTSIDE
        if len(self._kinds) >= MAX_KNOWN:
            self._kinds.clear()
            self._sites.clear()
        self._kinds[code] = kind
        return kind

    def _site(self, code: CodeType, line: int) -> CallSite:
        site = self._sites.get((code, line))
        if site is None:
            # Two parts tell files apart and are the same on all ranks, wherever the code lies.
            file = "/".join(code.co_filename.replace("\\", "/").split("/")[-2:])
            site = self._sites[code, line] = CallSite(file, line, getattr(code, "co_qualname", code.co_name))
        return site
