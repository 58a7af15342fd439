"""DeepSpeed: `sentinel.attach_deepspeed(engine)` after `deepspeed.initialize`, ZeRO stages 0 to 3 and its pipelines.

One method of the engine updates the model, whoever calls it (`engine.step` at an accumulation boundary, or a pipeline's
schedule): before it gradients are reduced, and neither unscaled nor clipped; in it the step is counted. So it is wrapped, on
this engine alone. Steps have the number that DeepSpeed prints beside `lr` and `skipped`: the first one is 1.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import bwc_tensor_model_parallel_rank

from sentinel.collect.adapters.deepspeed_storage import DeepSpeedStorage
from sentinel.collect.attach import attach
from sentinel.collect.hooks.aliases import Aliases
from sentinel.collect.monitor import Monitor
from sentinel.collect.unmeasured import Unmeasured
from sentinel.errors import ConfigError
from sentinel.monitor_config import MonitorConfig
from sentinel.place import Place

log = logging.getLogger("sentinel")

HANDS_ON = frozenset({"PreBackwardFunctionForModuleBackward", "PostBackwardFunctionModuleBackward"})
"""Through these ZeRO-3 hands every output and input of a module on, to learn when its backward begins and ends.

Source: deepspeed/runtime/zero/parameter_offload.py, _register_deepspeed_module."""
SAVED_AS = "sentinel"
"""Key of our state in the client state of DeepSpeed's checkpoints."""


def attach_deepspeed(
    engine: Any, config: MonitorConfig | Mapping[str, Any] | str | Path | None = None
) -> Monitor | Unmeasured:
    """Attach Sentinel to the engine that `deepspeed.initialize` returned; before or after its checkpoint is loaded.

    Returns the monitor, or one that measures nothing, as `sentinel.attach` does. Raises ConfigError for what only the
    caller can mend: an unknown key, an engine that is none.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise ConfigError(
            f"attach_deepspeed: expected the engine that deepspeed.initialize returns first, got {type(engine).__name__}"
        )
    monitor = _attach(engine, config)
    if isinstance(monitor, Monitor):
        try:
            Followed(engine, monitor)
        except Exception as error:  # The trainer never dies for Sentinel: an engine that nobody foresaw trains unmeasured.
            log.warning("sentinel: attach_deepspeed failed", exc_info=True)
            monitor.detach()
            return Unmeasured(f"{type(error).__name__}: {error}")
    return monitor


def _attach(engine: Any, config: Any) -> Monitor | Unmeasured:
    optimizer = engine.optimizer if isinstance(engine.optimizer, torch.optim.Optimizer) else None  # DeepSpeed's own are none
    try:
        place = _place(engine)
    except Exception:  # Of another version, say: then torch is asked.
        log.warning("sentinel: where DeepSpeed placed this rank is not known", exc_info=True)
        place = None
    return attach(engine.module, optimizer, config, place=place, first_step=int(engine.global_steps) + 1)


class Followed:
    """What is wrapped on one engine, and what is known of its running step."""

    def __init__(self, engine: Any, monitor: Monitor) -> None:
        self._engine = engine
        self._monitor = monitor
        self._storage = DeepSpeedStorage(engine.optimizer, monitor.place, self._report)
        self._loss: torch.Tensor | None = None
        """Of the micro-steps of this step so far, each divided by their number as DeepSpeed does."""
        self._scales_losses = isinstance(engine.optimizer, ZeROOptimizer)
        """Whether losses were multiplied by the optimizer's loss scale: without ZeRO only its own `backward` does that."""
        self._undo: list[Callable[[], None]] = []
        monitor.port.steps.is_explicit = True
        monitor.port.tensors.storage = self._storage
        monitor.port.at_end(self._restore)
        monitor.port.steps.follow(getattr(engine.optimizer, "optimizer", None))
        log.info("sentinel: step boundary: the engine's step")
        if engine.zero_optimization_partition_weights():
            for chunk in monitor.port.chunks:
                chunk.seen.aliases = Aliases(HANDS_ON)
        self._wrap("_take_model_step", self._around_update)
        self._wrap("backward", self._around_backward)
        self._wrap("step", self._around_step)
        self._wrap("save_checkpoint", self._around_save)
        self._wrap("load_checkpoint", self._around_load)
        if hasattr(engine, "train_batch"):
            self._wrap("train_batch", self._around_step)
        if not self._scales_losses and hasattr(engine.optimizer, "backward"):
            self._wrap("backward", self._around_scaling, engine.optimizer)

    def _wrap(self, name: str, around: Callable[..., Any], owner: Any = None) -> None:
        owner = self._engine if owner is None else owner
        original = getattr(owner, name)
        former = owner.__dict__.get(name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if self._monitor.is_alive else original(*args, **kwargs)

        def undo() -> None:
            if owner.__dict__.get(name) is wrapped:
                if former is None:
                    del owner.__dict__[name]
                else:
                    owner.__dict__[name] = former

        owner.__dict__[name] = wrapped
        self._undo.append(undo)

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _report(self, code: str, message: str) -> None:
        self._monitor.port.report(code, message)

    def _safely(self, site: str, do: Callable[..., None], *args: Any) -> None:
        """Keep what goes wrong in Sentinel away from the engine."""
        try:
            do(*args)
        except Exception as error:
            self._monitor.port.guard(site, error)

    def _or_flush(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call DeepSpeed; where it raises, bring to disk what there is of the running step."""
        try:
            return original(*args, **kwargs)
        except BaseException:
            self._safely("flush", self._note_loss)
            self._monitor.flush()
            raise

    # -- a step ------------------------------------------------------------------------------------------------------

    def _around_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._safely("backward", self._before_backward)
        loss = self._or_flush(original, *args, **kwargs)
        self._safely("backward", self._after_backward, loss)
        return loss

    def _before_backward(self) -> None:
        self._note_scale()
        if self._engine.fp16_enabled():
            self._monitor.noticed(loss_scale=getattr(self._engine.optimizer, "loss_scale", None))

    def _note_scale(self) -> None:
        """Note what DeepSpeed multiplied the step's losses by; torch's own scalers are watched elsewhere."""
        if self._scales_losses:
            self._monitor.port.tensors.losses_multiplied(float(getattr(self._engine.optimizer, "loss_scale", 1.0)))

    def _around_scaling(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._scales_losses = True
        return original(*args, **kwargs)

    def _after_backward(self, loss: Any) -> None:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            part = loss.detach().float()
            self._loss = part.clone() if self._loss is None else self._loss + part
        # DeepSpeed averages `.grad` over the ranks after autograd's end: no write of somebody else's.
        self._monitor.port.tensors.gradients_written()

    def _around_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._or_flush(original, *args, **kwargs)

    def _around_update(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._safely("before_update", self._before_update)
        result = original(*args, **kwargs)
        self._safely("scalars", self._note_scalars)
        self._safely("after_update", self._after_update)
        return result

    def _before_update(self) -> None:
        monitor = self._monitor
        self._note_loss()
        try:
            self._storage.open()
            # A model whose forward was never seen (compiled after attach) has its step begin here, which is said.
            monitor.port.steps.is_explicit = False
            monitor.gradients_ready()
        finally:
            monitor.port.steps.is_explicit = True
            self._storage.close()
        self._note_scale()
        monitor.port.tensors.wgrads_read_early()
        if monitor.current_step != self._engine.global_steps + 1:
            monitor.set_step(self._engine.global_steps + 1)  # Somebody counts for the engine.

    def _note_scalars(self) -> None:
        lrs = self._engine.get_lr()
        self._monitor.noticed(lr=lrs[0] if lrs else None, grad_norm=self._engine.get_global_grad_norm())

    def _after_update(self) -> None:
        engine, monitor = self._engine, self._monitor
        # torch's own scaler leaves the optimizer alone without a word to DeepSpeed.
        scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
        is_skipped = None if scaler is not None else bool(getattr(engine.optimizer, "overflow", False))
        if any(chunk.num_forwards for chunk in monitor.port.chunks):
            monitor.port.steps.finish(is_skipped=is_skipped)
        else:
            monitor.step(is_skipped=is_skipped)  # No forward will tell where the next one begins.

    def _note_loss(self) -> None:
        loss, self._loss = self._loss, None
        if self._engine.pipeline_parallelism and isinstance(getattr(self._engine, "total_loss", None), torch.Tensor):
            loss = self._engine.total_loss.detach() / self._engine.micro_batches
        if loss is not None:
            self._monitor.noticed(loss=loss)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _around_save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._monitor.activity("checkpoint")
        try:
            bound = inspect.signature(original).bind(*args, **kwargs)
            state = bound.arguments.get("client_state") or {}
            bound.arguments["client_state"] = {SAVED_AS: self._monitor.state_dict(), **state}
            args, kwargs = bound.args, bound.kwargs
        except Exception as error:
            self._monitor.port.guard("save_checkpoint", error)
        try:
            return original(*args, **kwargs)
        finally:
            self._monitor.activity("train")

    def _around_load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._monitor.activity("checkpoint")
        result = original(*args, **kwargs)
        self._monitor.activity("train")
        self._safely("load_checkpoint", self._after_load, result)
        return result

    def _after_load(self, result: Any) -> None:
        monitor = self._monitor
        monitor.flush()  # A step that was under way is over, or went no further.
        state = result[1].pop(SAVED_AS, None) if isinstance(result, tuple) and isinstance(result[1], dict) else None
        if isinstance(state, Mapping):
            monitor.load_state_dict(state)
        monitor.set_step(self._engine.global_steps + 1)
        self._loss = None


def _place(engine: Any) -> Place | None:
    """Return this rank's place where DeepSpeed knows of more axes than data parallelism; None: it is read from torch."""
    if not dist.is_initialized():
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    fields: dict[str, Any] = {}
    if engine.pipeline_parallelism:
        grid = engine.grid
        fields.update(pp_rank=int(grid.get_stage_id()), pp_size=int(grid.pipe_parallel_size))
        fields.update(dp_rank=int(grid.get_data_parallel_id()), dp_size=int(grid.data_parallel_size))
        fields.update(tp_rank=int(grid.get_slice_parallel_rank()), tp_size=int(grid.slice_parallel_size), schedule="1f1b")
    else:
        dp, tp, cp = int(engine.dp_world_size), int(engine.mp_world_size), int(engine.sequence_parallel_size)
        if tp * cp <= 1 or dp * tp * cp != world:
            return None
        from deepspeed.utils import groups

        fields.update(dp_rank=int(groups._get_data_parallel_rank()), dp_size=dp)
        if tp > 1:
            fields.update(tp_rank=int(bwc_tensor_model_parallel_rank(engine.mpu)), tp_size=tp)
        if cp > 1:
            fields.update(cp_rank=int(groups._get_sequence_parallel_rank()), cp_size=cp)
    return Place(rank=rank, world_size=world, **fields)
