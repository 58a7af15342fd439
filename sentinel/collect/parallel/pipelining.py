"""Shape inference of torch.distributed.pipelining: a real forward on uninitialised memory, recognised here."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from sentinel.collect.hooks.interception import Interception

STAGE_MODULE = "torch.distributed.pipelining.stage"

INFERENCE = (
    "_shape_inference",  # torch 2.5 to 2.11
    "_forward_metadata_inference",  # torch 2.12 on
    "_backward_metadata_inference",
    "_prepare_forward_infra",  # calls one of the above in every version seen
    "_prepare_backward_infra",
)
"""Private methods of a pipeline stage that run the model without training it."""
SCALING = ("scale_grads", "perform_reduce_grad")
"""Methods of a stage that change gradients after the backward, as part of it."""


class _InferenceGuard(threading.local):
    depth = 0
    """Calls of this thread that are inside a stage's shape inference."""


INFERENCE_GUARD = _InferenceGuard()


def in_inference() -> bool:
    """Return whether this thread is inside a stage's shape inference."""
    return INFERENCE_GUARD.depth > 0


class PipelineWatch:
    """Wraps the stage classes while at least one monitor is installed, and reports stages seen and gradients scaled to
    it."""

    def __init__(self, on_stage: Callable[[Any], None], on_scaled: Callable[[Any], None]) -> None:
        self.on_stage = on_stage
        self.on_scaled = on_scaled
        self.problem = ""

    def install(self) -> bool:
        """Wrap the classes if torch.distributed.pipelining is loaded; True when it is. May be called again and again."""
        _stages.join(self)
        is_loaded = STAGE_MODULE in sys.modules
        if is_loaded and not _stages.names.intersection(INFERENCE):
            self.problem = "this torch has no known shape inference methods: pipeline warm-up may be counted as training"
        return is_loaded

    def remove(self) -> None:
        """Undo `install`; the classes are as before when the last monitor is gone."""
        _stages.leave(self)


def _replace_all(stages: Interception[PipelineWatch]) -> None:
    for class_name in ("_PipelineStageBase", "_PipelineStage", "PipelineStage"):
        owner = getattr(sys.modules.get(STAGE_MODULE), class_name, None)
        for name in INFERENCE + SCALING:
            original = vars(owner).get(name) if owner is not None else None
            if original is not None:
                stages.replace(owner, name, _guarded(original) if name in INFERENCE else _announced(original))


_stages: Interception[PipelineWatch] = Interception(_replace_all)


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def inference(stage: Any, *args: Any, **kwargs: Any) -> Any:
        for user in list(_stages.users):
            user.on_stage(stage)
        INFERENCE_GUARD.depth += 1
        try:
            return original(stage, *args, **kwargs)
        finally:
            INFERENCE_GUARD.depth -= 1

    return inference


def _announced(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scaling(stage: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(stage, *args, **kwargs)
        for user in list(_stages.users):
            user.on_scaled(stage)
        return result

    return scaling
