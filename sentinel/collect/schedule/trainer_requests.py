"""What the trainer is asked for and takes up itself: held until it asks, answered by it, over when it says so."""

from __future__ import annotations

import time
from collections.abc import Callable

from sentinel.command import RequestAction
from sentinel.errors import ConfigError
from sentinel.messages import Ack

MAX_OPEN = 100
"""Requests that may be open at once; a bound on memory."""


class TrainerRequests:
    """Held and handed out on the training thread; withdrawn on the writer thread."""

    def __init__(self, acknowledge: Callable[[Ack], object], step: Callable[[], int]) -> None:
        """acknowledge: sends an answer. step: returns the running step, or the next."""
        self.are_taken = False
        """Whether the trainer ever asked: one that never does refuses every request."""
        self._acknowledge = acknowledge
        self._step = step
        self._held: dict[str, RequestAction] = {}
        self._open: dict[str, float] = {}
        """Those handed out -> when they are over by themselves, monotonic seconds."""

    def refusal(self) -> str:
        """Return why no request can be held now; empty: one can."""
        if not self.are_taken:
            return "this trainer does not call monitor.requests()"
        if len(self._held) + len(self._open) >= MAX_OPEN:
            return f"{MAX_OPEN} requests are open that the trainer never answered"
        return ""

    def hold(self, request: RequestAction) -> None:
        """Keep a request whose step has come until the trainer asks."""
        self._held[request.id] = request

    def withdraw(self, request: str) -> None:
        """Forget one; a pause is over. Runs on the writer thread."""
        self._held.pop(request, None)
        self._open.pop(request, None)

    def forget_late(self, step: int) -> None:
        """Answer for those that the trainer did not ask for in time."""
        for request in list(self._held.values()):
            if step >= request.at_step + request.for_steps and self._held.pop(request.id, None) is not None:
                reason = f"the trainer did not ask for requests from step {request.at_step} to {step - 1}"
                self._answer(request.id, "missed", reason)

    def take(self) -> list[RequestAction]:
        """Return what is asked for now, in the order in which it was asked; each is handed out once."""
        self.are_taken = True
        taken = []
        for request in sorted(self._held.values(), key=lambda one: (one.at_step, one.seq)):
            if self._held.pop(request.id, None) is not None:
                self._open[request.id] = time.monotonic() + (request.for_s or float("inf"))
                taken.append(request)
                self._answer(request.id, "applied")
        return taken

    def is_open(self, request: RequestAction) -> bool:
        """Return whether a request that was handed out is neither answered nor withdrawn nor, a pause, over by itself."""
        return time.monotonic() < self._open.get(request.id, 0.0)

    def answer(self, request: RequestAction, *, is_done: bool, why: str) -> None:
        """Send the trainer's answer. ConfigError for what is no request."""
        if not isinstance(request, RequestAction):
            raise ConfigError(f"answer: expected a request that monitor.requests() returned, got {type(request).__name__}")
        # One that another rank was handed, and passed on, is answered by those as well that never held it.
        self._held.pop(request.id, None)
        self._open.pop(request.id, None)
        self._answer(request.id, "ended" if is_done else "refused", why)

    def _answer(self, request: str, state: str, reason: str = "") -> None:
        self._acknowledge(Ack(command=request, state=state, step=self._step(), reason=reason[:1000]))
