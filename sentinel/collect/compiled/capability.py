"""Whether this torch keeps the ops of compiled graphs: known of the versions that the tests ran on, tried on others.

What makes ops effectful is private to torch and changes. A graph that cannot be compiled would end the training; a small one
that fails first only leaves the inside of compiled modules unmeasured.
"""

from __future__ import annotations

from functools import cache

import torch

from sentinel.collect.compiled.ops import IS_FIRST, NO_TICKET, Ticket, enlist, new_serial, observe, unavailable

TESTED = ("2.13",)


class _CapabilityListener:
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.site = enlist(self)
        self.passed: list[float] = []
        self.answered: list[int] = []

    def tensor_passes(self, tensor: torch.Tensor, former: Ticket, path: str, how: int) -> Ticket:
        self.passed.append(float(tensor.sum()))
        return Ticket(int(self.site), 0, len(self.passed), 0, new_serial())

    def gradient_passes(self, gradient: torch.Tensor, ticket: Ticket) -> None:
        self.answered.append(ticket.micro_step)

    def forward_begins(self) -> None:
        """Never: no chunk is tried out."""

    def forward_ends(self) -> Ticket:
        return NO_TICKET

    def guard_op(self, error: Exception) -> None:
        self.answered.append(-1)


def is_tested() -> bool:
    """Return whether the tests ran on this version of torch."""
    return ".".join(torch.__version__.split(".")[:2]) in TESTED


@cache
def why_unusable() -> str:
    """Return why this torch cannot measure inside compiled modules, in words; empty: it can. Tries a version once."""
    if unavailable or is_tested():
        return unavailable
    return try_out()


def try_out() -> str:
    """Compile a small graph, run two forwards and their backwards; return what went wrong, in words; empty: nothing."""
    witness = _CapabilityListener()

    def graph(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x * weight
        observe(y, witness.site, None, "", IS_FIRST)
        return y.sin()

    try:
        with torch.enable_grad():
            weight = torch.ones(2, device="cpu", requires_grad=True)
            call = torch.compile(graph, backend="aot_eager", fullgraph=True)
            losses = [call(torch.full((2,), value, device="cpu"), weight).sum() for value in (1.0, 2.0)]
            for loss in losses:
                loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return f"torch {torch.__version__} does not compile effectful ops: {type(error).__name__}"
    if witness.passed != [2.0, 4.0] or witness.answered != [1, 2]:
        return f"torch {torch.__version__} lost ops of a compiled graph: {witness.passed}, {witness.answered}"
    return ""
