"""What may go wrong in a synthetic run, and when."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nan:
    """A non-finite value is born at one module, on one rank, in one micro-step, and goes where the arithmetic carries it.

    Forward: the module's output is bad, and all behind it, on all later stages of that replica, its loss, its gradients,
    and every weight gradient. Backward: the module's output gradient is still clean, what it hands to its input is bad,
    and all before it. Weight gradients are reduced, so they are bad on every replica; then the gradient norm is.
    """

    step: int
    module: str
    """Canonical: `layers.3.attn`, `embed`, `head`."""
    rank: int | None = None
    """Where it is born; None: on the first rank that holds the module."""
    micro_step: int = 0
    phase: str = "forward"
    """`forward`, `backward`, or `wgrad` (the weight gradient alone)."""
    value: str = "nan"
    """`nan`, `inf` or `-inf` where it is born; behind that everything is NaN."""
    is_skipped: bool = True
    """The optimizer skips the step; else every weight is NaN from the next step on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlowUp:
    """The values of one tensor kind at one module, and of the modules behind it, are larger by a factor."""

    step: int
    module: str
    factor: float = 100.0
    for_steps: int = 1
    kind: str = "activation"
    """`activation`, `dgrad` (then what is before the module grows), `wgrad` or `param` (then the module's alone)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSpike:
    """The loss is larger by a factor, on every rank that reports it, or on one."""

    step: int
    factor: float = 3.0
    for_steps: int = 1
    rank: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitFlip:
    """From a step on, a bit of the first weight of a module is another one on one rank: nothing else shows it."""

    step: int
    module: str
    rank: int
    for_steps: int = 2**40


Fault = Nan | BlowUp | LossSpike | BitFlip
