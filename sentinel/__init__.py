"""Sentinel watches deep-learning training runs. `import sentinel` imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sentinel.version import VERSION as __version__

if TYPE_CHECKING:
    from sentinel.cli.opening import open as open
    from sentinel.collect.adapters.moe_tracker import MoETracker
    from sentinel.collect.attach import attach
    from sentinel.collect.monitor import Monitor
    from sentinel.explain.skip_list import skip_list

# `open` is not among them: `from sentinel import *` must leave Python's own as it is.
__all__ = ["MoETracker", "Monitor", "__version__", "attach", "skip_list"]

ADAPTERS = {
    "HuggingFaceCallback": "huggingface",
    "LightningCallback": "lightning",
    "OlmoCoreCallback": "olmo_core",
    "attach_accelerate": "accelerate",
    "attach_deepspeed": "deepspeed",
    "attach_megatron": "megatron",
    "attach_torchtitan": "torchtitan",
}
"""Name in this package -> module of `sentinel.collect.adapters` that has it; imported when it is first asked for."""

ADAPTER_ENTRY_POINTS = "sentinel.adapters"
"""Group of entry points: a name in this package -> what another package attaches its trainer with."""


def __getattr__(name: str) -> Any:
    if name in ADAPTERS:
        module = importlib.import_module(f"sentinel.collect.adapters.{ADAPTERS[name]}")
        return getattr(module, name)
    if name == "attach":
        from sentinel.collect.attach import attach

        return attach
    if name == "open":
        from sentinel.cli.opening import open

        return open
    if name == "skip_list":
        from sentinel.explain.skip_list import skip_list

        return skip_list
    if name == "Monitor":
        from sentinel.collect.monitor import Monitor

        return Monitor
    if name == "MoETracker":
        from sentinel.collect.adapters.moe_tracker import MoETracker

        return MoETracker
    if not name.startswith("_"):
        return _outside_adapter(name)
    raise AttributeError(f"module 'sentinel' has no attribute {name!r}")


def _outside_adapter(name: str) -> Any:
    """Return what another package offers under a name; AttributeError where none does, or it cannot be loaded."""
    from sentinel.entry_points import outside_parts
    from sentinel.errors import ConfigError

    for part in outside_parts(ADAPTER_ENTRY_POINTS):
        if part.name == name:
            try:
                return part.load()
            except ConfigError as error:
                raise AttributeError(f"sentinel.{name}: {part.where} {error}") from error
    raise AttributeError(f"module 'sentinel' has no attribute {name!r}")
