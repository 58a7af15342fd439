"""What becomes of a hook that is pickled with its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Inert:
    """What a pickled hook becomes: a hook that does nothing, called itself or by a method."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
