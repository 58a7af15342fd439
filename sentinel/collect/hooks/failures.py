"""What is said of a hook that failed: the module and the probe, the tensors that it was given, and what is lost by it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sentinel.collect.hooks.nesting import tensors_in

MOST_TENSORS = 4
"""Tensors whose shapes are named."""

_LOST = {
    "optimizer": "gradients and update of this optimizer step may be missing",
    "backward": "changes of gradients after the backward may go unseen in this step",
    "clip_grad": "gradients of this step may be read after clipping, or not at all",
    "zero_grad": "gradients of a step that was skipped may be missing",
    "gradients_ready": "gradients of this step may be missing",
    "step": "the step's end was not noted",
    "set_step": "the step keeps the number that it had",
    "flush": "rows of the last step may be missing",
    "close": "rows of the last step may be missing",
    "loss_scale": "gradients of this step may still carry the loss scale",
    "topology": "this rank is taken to stand where it stood before",
    "log": "this value was not logged",
    "noticed": "this value was not logged",
    "comm": "rows of this call of torch.distributed are missing",
}
"""What an exception costs that ended at a site which is no module and no probe."""


class Guard(Protocol):
    """Where an exception of a hook ends: counted, logged once per site, shipped."""

    def __call__(self, site: str, error: Exception, *, probe: str = "", given: Any = None, lost: str = "") -> None:
        """site: name of the module, or of what else failed; given: what the hook looked at, tensors in any nesting."""


def describe_error(error: Exception) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def describe_failure(site: str, error: Exception, *, probe: str = "", given: Any = None, lost: str = "") -> str:
    """Return where a hook failed, on what, with what, and what is missing because of it, in one line."""
    where = [f"probe {probe}"] if probe else []
    if probe and site != probe:
        where.append(f"at {site or 'the model itself'}")
    elif not probe:
        where.append(site or "the model itself")
    shapes = shapes_of(given)
    if shapes:
        where.append(f"given {shapes}")
    if not lost:
        is_own = probe and site != probe
        lost = _LOST.get(site.partition("(")[0].partition(" ")[0], "") if not probe else ""
        lost = lost or (
            f"the rows of {probe} at {site or 'the model itself'} are missing from this step" if is_own
            else f"rows of {probe} are missing from this step" if probe
            else "what it would have noted in this step is missing"
        )  # fmt: skip
    return f"{', '.join(where)}: {describe_error(error)}; {lost}; training goes on"


def shapes_of(given: Any) -> str:
    """Return shape and dtype of the tensors in a hook's arguments, in words; empty where there are none."""
    try:
        found = [given] if isinstance(given, torch.Tensor) else [tensor for _, tensor in tensors_in(given)]
        words = [f"{list(one.shape)} {str(one.dtype).removeprefix('torch.')}{_layout(one)}" for one in found[:MOST_TENSORS]]
    except Exception:  # It is asked for what another exception was about: that one must be told.
        return ""
    return ", ".join(words) + (f" and {len(found) - MOST_TENSORS} more" if len(found) > MOST_TENSORS else "")


def _layout(tensor: torch.Tensor) -> str:
    return "" if tensor.layout is torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
