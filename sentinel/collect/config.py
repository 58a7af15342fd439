"""The configuration's former place: adapters in the making look for it here."""

from __future__ import annotations

from sentinel.monitor_config import COMMANDS, MEASURED, MODULE_KINDS, MonitorConfig, SpoolConfig, load_config, near

__all__ = ["COMMANDS", "MEASURED", "MODULE_KINDS", "MonitorConfig", "SpoolConfig", "load_config", "near"]
