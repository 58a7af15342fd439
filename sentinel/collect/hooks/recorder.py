"""What hooks use: the instruments that they measure with, and the listeners to forwards and backwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch.utils.hooks import RemovableHandle

from sentinel.collect.accelerator import is_capturing
from sentinel.collect.hooks.failures import Guard
from sentinel.collect.hooks.sites import Sites
from sentinel.collect.rows.recording import Recording

if TYPE_CHECKING:
    from sentinel.collect.hooks.chunk import Chunk


class Recorder:
    """The instruments that all hooks of a monitor share, and whether they may measure now."""

    def __init__(self, recording: Recording, sites: Sites, guard: Guard) -> None:
        """guard: where an exception of a hook ends."""
        self.is_capturing = is_capturing
        """Whether the current stream records a CUDA graph: then nothing is measured, for it would be at every replay."""
        self.recording = recording
        self.sites = sites
        self.guard = guard
        self.is_alive = True
        """False once the monitor was detached, and in a forked child: hooks that are still called do nothing."""
        self.is_paused = False
        """Forwards belong to no step now: the trainer makes a dry run, say."""
        self.ended_steps = 0
        """Steps that ended so far in this process: a gradient of a step that is over is not measured in the next."""
        self.keeps: object = None
        """Objects kept alive while the model has hooks, so that measuring goes on where the result of `attach` was
        dropped."""


class PassListener(Protocol):
    """What is called at the training forwards and backwards of a chunk."""

    def before_forward(self, chunk: Chunk) -> None:
        """Called before a training forward of a chunk; the one call in which a step may end."""

    def captured_forward(self) -> None:
        """Called instead where the forward is recorded as a CUDA graph, whose replays no hook will see."""

    def after_forward(self, chunk: Chunk) -> None: ...

    def forward_failed(self, chunk: Chunk) -> None: ...

    def after_backward_hook(self, chunk: Chunk) -> None:
        """Called when a gradient of a chunk arrives: a backward runs."""

    def keep_until_step_ends(self, handle: RemovableHandle) -> None: ...
