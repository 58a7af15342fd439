"""The monitor that measures nothing: training goes on as if Sentinel were not there, and the log says why."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Self

from sentinel.kinds import MODULE_KINDS

log = logging.getLogger("sentinel")


class Unmeasured:
    """Has every method of Monitor; none does anything."""

    is_alive = False

    def __init__(self, reason: str, *, is_wanted: bool = False) -> None:
        self.reason = reason
        log.log(logging.INFO if is_wanted else logging.WARNING, "sentinel: this run is not measured: %s", reason)

    def log(self, **scalars: Any) -> None:
        """Accept and forget."""

    def noticed(self, **scalars: Any) -> None:
        """Accept and forget."""

    def step(self, *, is_skipped: Any = None) -> None:
        """Do nothing."""

    def set_step(self, step: int) -> None:
        """Do nothing."""

    def gradients_ready(self, params: Any = None) -> None:
        """Do nothing."""

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Do nothing; there is nothing to wait for."""
        return True

    def enable(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def disable(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def gradients(self) -> dict[str, Any]:
        """Return nothing measured."""
        return {"reduced": {}, "unreduced": {}}

    def activations(self) -> dict[str, Any]:
        """Return nothing measured."""
        return {kind.label: {} for kind in MODULE_KINDS}

    def activity(self, name: str) -> None:
        """Do nothing."""

    def requests(self) -> list[Any]:
        """Return nothing: nobody asks."""
        return []

    def answer(self, request: Any, *, is_done: bool = True, why: str = "") -> None:
        """Accept and forget."""

    def is_open(self, request: Any) -> bool:
        """Return that nothing is asked."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return nothing to resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    def detach(self, reason: str = "detached") -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Let what was raised pass."""
