"""Recorder: what taps need of the monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.hooks import RemovableHandle

from sentinel.collect.hooks.sites import Sites
from sentinel.collect.rows.recording import Recording

if TYPE_CHECKING:
    from sentinel.collect.hooks.chunk import Chunk


class Recorder(Protocol):
    """What taps need of the monitor."""

    is_alive: bool
    is_paused: bool
    ended_steps: int
    sites: Sites
    recording: Recording

    def before_forward(self, chunk: Chunk) -> None:
        """A training forward of a chunk begins: the one place where a step may end."""

    def after_forward(self, chunk: Chunk) -> None: ...

    def forward_failed(self, chunk: Chunk) -> None: ...

    def after_backward_hook(self, chunk: Chunk) -> None:
        """A gradient arrived: a backward runs."""

    def keep_until_step_ends(self, handle: RemovableHandle) -> None: ...

    def guard(self, site: str, error: Exception, *, probe: str = "", given: Any = None, lost: str = "") -> None:
        """Count and tell an exception that stops here."""
