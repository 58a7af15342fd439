"""The message about a hook that failed: its module or probe, the tensors that it was given, and what is not measured."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sentinel.collect.hooks.nesting import tensors_in
from sentinel.exception_words import raised_at

MOST_TENSORS = 4
"""Most tensors whose shapes the message names."""

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
    "waits": "how long this rank waits for others is not known from here on",
    "comm": "rows of this call of torch.distributed are missing",
}
"""Site that is no module and no probe -> what is not measured because of an exception there."""


class Guard(Protocol):
    """Takes an exception of a hook, so that the trainer never sees it: counted, logged once a site, sent as health."""

    def __call__(self, site: str, error: Exception, *, probe: str = "", given: Any = None, lost: str = "") -> None:
        """site: name of the module, or of what else failed; given: what the hook was given, tensors in any nesting. lost:
        what is not measured, in words."""


def describe_error(error: Exception) -> str:
    """Return an exception in one line, with the place in the code of others that raised it."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300] + raised_at(error)


def describe_failure(site: str, error: Exception, *, probe: str = "", given: Any = None, lost: str = "") -> str:
    """Return one line: where a hook failed, on which tensors, with which exception, and what is not measured.

    Arguments as those of `Guard`; lost: what is not measured, in words; empty: as `site` and `probe` imply.
    """
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
    except Exception:  # It is asked for what another exception was about: that one must be reported.
        return ""
    return ", ".join(words) + (f" and {len(found) - MOST_TENSORS} more" if len(found) > MOST_TENSORS else "")


def _layout(tensor: torch.Tensor) -> str:
    return "" if tensor.layout is torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
