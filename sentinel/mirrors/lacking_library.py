"""Whether a mirror's library is there, found out without importing it."""

from __future__ import annotations

from importlib.util import find_spec


def lacking_library(module: str, extra: str) -> str:
    """Return `tensorboard is not installed; pip install 'sentinel[tensorboard]'`; empty: it is.

    module: as `import` names it; of one inside another the outer ones are imported. extra: of Sentinel, which brings it.
    """
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    return "" if is_there else f"{module} is not installed; pip install 'sentinel[{extra}]'"
