"""What may go wrong in a synthetic run, and when."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nan:
    """A non-finite value is born at one module, on one rank, in one micro-step, and goes where the arithmetic carries it.

    Forward: the module's output is bad, and all behind it, on all later stages of that replica, its loss, its gradients,
    and every weight gradient. Backward: the module's output gradient is still clean, what it hands to its input is bad,
    and all before it. Weight gradients are reduced, so they are bad on every replica; then the gradient norm is.
    Ranks of one tensor-parallel group catch it from each other where they sum their parts: at the end of attn, mlp and
    embed in forward, at the beginning of attn, mlp and head in backward.
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
    """The optimizer skips the step; else, as gradients are clipped by their global norm, all that it writes is NaN, and
    every weight from the next step on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlowUp:
    """The values of one tensor kind at one module, and of the modules behind it, are larger by a factor.

    What follows may keep less of it: `spread` and the like are exponents of the factor, 1 for all and 0 for none of it.
    """

    step: int
    module: str
    factor: float = 100.0
    for_steps: int = 1
    kind: str = "activation"
    """`activation`, `dgrad` (then what is before the module grows), `wgrad` or `param` (then the module's alone).
    `dgrad_in`: the module's output gradient is still as it was, what it hands to its input is larger, and all before."""
    rank: int | None = None
    """The replica of this rank alone; None: all."""
    micro_step: int | None = None
    """None: all."""
    spread: float = 1.0
    """What is left of the factor in the modules behind."""
    in_gradients: float = 0.0
    """What of it the backward shows, and the weight gradients."""
    in_loss: float = 0.0
    """What of it the loss and the gradient norm show."""

    def is_on(self, step: int) -> bool:
        """Whether it strikes at a step."""
        return self.step <= step < self.step + self.for_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossJump:
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


Fault = Nan | BlowUp | LossJump | BitFlip
