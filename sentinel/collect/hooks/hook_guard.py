"""HookGuard: the one place that exceptions of hooks end at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sentinel.collect.hooks.failures import describe_failure
from sentinel.collect.rows.recording import Recording
from sentinel.record import Flag


class HookGuard:
    """Counts an exception, logs it once for each site, ships it, and marks the rows of its site as degraded."""

    def __init__(self, recording: Recording, step: Callable[[], int]) -> None:
        """step: returns the number of the running step."""
        self._recording = recording
        self._step = step

    def __call__(self, site: str, error: Exception, *, probe: str = "", given: Any = None, lost: str = "") -> None:
        """As `failures.Guard`."""
        message = describe_failure(site, error, probe=probe, given=given, lost=lost)
        named = f"{site}:{probe}" if probe and probe != site else site
        self._recording.report("hook_failed", message, named, self._step())
        if self._recording.at is not None:
            self._recording.at.flags |= int(Flag.DEGRADED)
