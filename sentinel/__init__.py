"""Sentinel watches deep-learning training runs. `import sentinel` imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sentinel.version import VERSION as __version__

if TYPE_CHECKING:
    from sentinel.collect import attach
    from sentinel.collect.monitor import Monitor

__all__ = ["Monitor", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    if name == "attach":
        from sentinel.collect import attach

        return attach
    if name == "Monitor":
        from sentinel.collect.monitor import Monitor

        return Monitor
    raise AttributeError(f"module 'sentinel' has no attribute {name!r}")
