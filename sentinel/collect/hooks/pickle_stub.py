"""What a hook is pickled as with its model: objects of Python's own library that do nothing.

A model that is saved while it is watched loads where Sentinel is not installed.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any


def stub_hook() -> tuple[Any, ...]:
    """Return what `__reduce__` of a hook that is called itself returns: a callable that takes anything and returns None."""
    return getattr, (contextlib.nullcontext(), "__exit__")


def stub_methods(kind: type) -> tuple[Any, ...]:
    """Return what `__reduce__` of an object returns whose methods are hooks: an object with methods of those names."""
    names = {name for one in kind.__mro__[:-1] for name, value in vars(one).items() if isinstance(value, types.FunctionType)}
    nothing = contextlib.nullcontext().__exit__
    return types.SimpleNamespace, (), {name: nothing for name in sorted(names) if not name.startswith("__")}
