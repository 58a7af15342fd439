"""Where in the user's code a call comes from: the first frame outside of torch, of Python's own library, and of us.

What only wraps a function stands in between and is passed over: decorators of packages (torch marks what it deprecates with
those of typing_extensions), and functions of packages that were put in the place of torch's own. A wrapper that is no
installed package is the user's code.
"""

from __future__ import annotations

import gc
import itertools
import operator
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed

import sentinel

_OUTSIDE, _INSIDE, _PLUMBING = range(3)
"""User's code; torch's; the layers of torch that every collective passes, which identify no call."""

_STDLIB = sysconfig.get_paths()["stdlib"] + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(sentinel.__file__).parent) + "/"
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/(.*)")
"""The path of an installed package; what is in the group is where it lies among the others."""
_DECORATORS = (
    "typing_extensions.py", "deprecated/", "deprecation.py", "decorator.py", "decorators/", "wrapt/", "makefun/", "boltons/",
    "typeguard/", "beartype/", "jaxtyping/", "nvtx/", "tenacity/",
)  # fmt: skip
"""Packages whose functions stand around others, as decorators do."""
_TYPED_IN = ("<stdin>", "<string>", "<console>", "<ipython-input", "<python-input", "<doctest")
"""Names of code that is no file and yet the user's; any other name like these is of code that a package has made."""
_OF_TORCH = ("<eval_with_key>", "<torch_package_")
MAX_WRAPPED = 16
"""Decorators on one function that are looked through."""
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
        """Return the user's line that leads to this call; None: a function of torch named in `skipped` lies in between.

        Without a frame of the user's (a backward on a thread of its own): the innermost frame of torch that is no plumbing.
        """
        frame: FrameType | None = sys._getframe(1)
        inner: FrameType | None = None
        passed: list[FrameType] = []
        kinds = self._kinds
        for _ in range(MAX_DEPTH):
            if frame is None:
                break
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = self._classify(code, passed)
            if kind == _OUTSIDE:
                return self._site(code, frame.f_lineno)
            if code.co_name in skipped:
                return None
            if kind == _INSIDE and inner is None:
                inner = frame
            passed.append(frame)
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

    def of_thread(self, thread_id: int) -> CallSite | None:
        """Return the innermost of the user's frames of a thread; None: it is gone, or runs none of the user's code."""
        for frame in _frames_of(thread_id):
            code = frame.f_code
            kind = self._kinds.get(code)
            if (self._classify(code) if kind is None else kind) == _OUTSIDE:
                return self._site(code, frame.f_lineno)
        return None

    def _classify(self, code: CodeType, passed: list[FrameType] | None = None) -> int:
        """Return what a code object is. passed: the frames that lie between the call and this one."""
        name = code.co_filename
        if name.startswith(_TORCH):
            kind = _PLUMBING if name.endswith(_PLUMBING_FILES) else _INSIDE
        elif name.startswith(_OF_TORCH):
            kind = _INSIDE
        else:
            kind = _PLUMBING if _is_between(code, passed or ()) else _OUTSIDE
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


def _frames_of(thread_id: int) -> list[FrameType]:
    """Return the frames of a thread that goes on meanwhile, innermost first; none: it is gone.

    Python before 3.12 may collect garbage wherever it makes an object, and what dies may let other threads run. Where that
    happens while it makes the frames of another thread, that thread may leave the very frame that is made; and before 3.11.9
    a lock of the interpreter is held, for which who begins a thread waits with the GIL, so that all wait for ever (cpython
    gh-106883). So no garbage is collected here. All of it is one call into C, and up to `gc.enable` no other thread runs:
    one that wants no garbage collected for reasons of its own would have it collected again.
    """
    found = deque[Any]()
    innermost = map(operator.methodcaller("get", thread_id), map(operator.call, (sys._current_frames,)))
    frames = itertools.accumulate(itertools.chain(innermost, itertools.repeat("f_back", MAX_DEPTH)), getattr)
    try:
        found.extend(itertools.chain(map(operator.call, (gc.isenabled, gc.disable)), frames))
    except AttributeError:
        pass  # behind the outermost frame: None has none
    finally:
        if found and found[0]:
            gc.enable()
    return [one for one in itertools.islice(found, 2, None) if one is not None]


def _is_between(code: CodeType, passed: Iterable[FrameType]) -> bool:
    """Return whether code outside of torch only stands between the user's and torch's."""
    name = code.co_filename
    if name.startswith("<"):
        return not name.startswith(_TYPED_IN)
    installed = _PACKAGES.fullmatch(name)
    if installed is None:
        return name.startswith((_OURS, _STDLIB))
    return name.startswith(_OURS) or installed[1].startswith(_DECORATORS) or _stands_for_torch(code, passed)


def _stands_for_torch(code: CodeType, passed: Iterable[FrameType]) -> bool:
    """Return whether this is the code of what stands, under its name, where torch has a function that was passed."""
    for frame in passed:
        if not frame.f_code.co_filename.startswith(_TORCH):
            continue
        for names in (frame.f_globals, vars(torch.distributed)):
            found = names.get(frame.f_code.co_name)
            for _ in range(MAX_WRAPPED):
                if getattr(found, "__code__", None) is code:
                    return True
                found = getattr(found, "__wrapped__", None)
    return False
