"""Hugging Face Accelerate: `attach` for a loop that goes through an Accelerator.

    monitor = sentinel.attach_accelerate(accelerator, model, optimizer)

Steps are found as in a plain loop. Accelerate says the rest: the loss in `accelerator.backward`, what `accelerator.log`
is given, when `save_state` saves and `load_state` goes back, and that `end_training` is the end.
"""

from __future__ import annotations

import functools
import json
import logging
import numbers
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from sentinel.collect.attach import attach
from sentinel.collect.monitor import Monitor
from sentinel.collect.unmeasured import Unmeasured
from sentinel.monitor_config import MonitorConfig

log = logging.getLogger("sentinel")

STATE_FILE = "sentinel_state.json"
"""In the folder of `save_state`. Not an object registered for checkpointing: those are numbered, and `load_state` raises
when their number differs, so that a checkpoint from before Sentinel, or from after it, could not be loaded."""
LOGGED_AS = {
    "loss": ("loss", "train_loss", "train/loss", "training_loss", "loss/train", "step_loss"),
    "lr": ("lr", "learning_rate", "train/lr", "train/learning_rate"),
    "grad_norm": ("grad_norm", "gradient_norm", "train/grad_norm"),
}
"""Our scalar -> names under which users log it; the first one found counts."""


def attach_accelerate(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any = None,
    config: MonitorConfig | Mapping[str, Any] | str | Path | None = None,
    first_step: int = 0,
) -> Monitor | Unmeasured:
    """Attach Sentinel to what `accelerator.prepare` returned, and follow the accelerator; else as `sentinel.attach`.

    first_step: the number that the loop gives to its first step. One process takes over a higher one that it receives in
    `accelerator.log(..., step=...)`; of several processes none does, for only one may log, and all must agree. With
    DeepSpeed the engine's own count is used.
    """
    monitor = attach_prepared(model, optimizer, config, first_step, accelerator.gradient_accumulation_steps)
    if isinstance(monitor, Monitor) and not any(
        getattr(undo, "follows", None) is accelerator for undo in monitor.port.undoing
    ):
        try:
            monitor.port.at_end(Follower(accelerator, monitor, optimizer).install())
        except Exception as error:
            monitor.port.guard("attach_accelerate", error)
    return monitor


class Follower:
    """Listens to one accelerator, for one incarnation. It hands on every call as it came."""

    def __init__(self, accelerator: Accelerator, monitor: Monitor, optimizer: Any) -> None:
        self._accelerator = accelerator
        self._monitor = monitor
        optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._optimizer = optimizers[0] if optimizers else None
        self._loss: torch.Tensor | None = None
        """Sum over the micro-steps of step `_loss_step`."""
        self._loss_step = -1
        self._last_logged: int | None = None
        self._first_step = monitor.current_step
        self._is_reported = False
        self._is_engine = accelerator.distributed_type == DistributedType.DEEPSPEED
        """The engine's own adapter notes loss and learning rate."""

    def install(self) -> Callable[[], None]:
        """Wrap the accelerator's methods on this instance; returns what undoes it."""
        accelerator = self._accelerator
        undo = [
            _wrap(accelerator, "backward", self._backward),
            _wrap(accelerator, "log", self._log),
            _wrap(accelerator, "end_training", self._end_training),
            accelerator.register_save_state_pre_hook(self._save).remove,
            accelerator.register_load_state_pre_hook(self._load).remove,
        ]

        def remove() -> None:
            for one in undo:
                one()

        remove.follows = accelerator  # type: ignore[attr-defined]
        return remove

    # -- what the loop calls -------------------------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        began = [chunk.had_backward for chunk in self._monitor.port.chunks]
        result = original(loss, *args, **kwargs)
        try:
            if not self._is_engine:
                self._note(loss, began)
        except Exception as error:
            self._monitor.port.guard("accelerator.backward", error)
        return result

    def _log(self, original: Callable[..., Any], values: Any, step: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            if isinstance(values, Mapping):
                self._follow(values, step)
        except Exception as error:
            self._monitor.port.guard("accelerator.log", error)
        return original(values, step, *args, **kwargs)

    def _end_training(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._monitor.detach()
        return original(*args, **kwargs)

    def _save(self, models: Any, weights: Any, output_dir: str) -> None:
        """Put the number of the next step beside what `save_state` is about to write."""
        monitor, accelerator = self._monitor, self._accelerator
        try:
            monitor.activity("checkpoint")
            on_each_node = accelerator.project_configuration.save_on_each_node
            if accelerator.is_local_main_process if on_each_node else accelerator.is_main_process:
                path = Path(output_dir) / STATE_FILE
                draft = path.with_suffix(".draft")
                draft.write_text(json.dumps(monitor.state_dict()) + "\n", encoding="utf-8")
                draft.replace(path)
        except Exception as error:
            monitor.port.guard("accelerator.save_state", error)

    def _load(self, models: Any, input_dir: str) -> None:
        """Go on with the numbers of a checkpoint; one from before Sentinel has none."""
        monitor = self._monitor
        try:
            path = Path(input_dir) / STATE_FILE
            if path.is_file():
                monitor.flush()  # A step that is over keeps its number, also where the loop goes back.
                monitor.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
                self._first_step, self._last_logged = monitor.current_step, None
        except Exception as error:
            monitor.port.guard("accelerator.load_state", error)

    # -- scalars -------------------------------------------------------------------------------------------------------

    def _note(self, loss: Any, began: list[bool]) -> None:
        """Note loss and learning rate of the running step, when this backward was one of our model."""
        monitor, accelerator = self._monitor, self._accelerator
        ours = [chunk.had_backward and not before for chunk, before in zip(monitor.port.chunks, began, strict=True)]
        if not any(ours) and any(chunk.num_forwards for chunk in monitor.port.chunks):
            return
        if self._loss_step != monitor.current_step:
            self._loss, self._loss_step = None, monitor.current_step
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
            loss = loss / accelerator.gradient_accumulation_steps if accelerator.gradient_accumulation_steps > 1 else loss
            self._loss = loss if self._loss is None else self._loss + loss
            monitor.noticed(loss=self._loss)
        groups = getattr(self._optimizer, "param_groups", None)
        if groups:
            monitor.noticed(lr=groups[0].get("lr"))

    def _follow(self, values: Mapping[str, Any], step: Any) -> None:
        """Take what the trackers are given: it belongs to the step that runs, or that the optimizer has just ended."""
        monitor = self._monitor
        found = {ours: values[theirs] for ours, names in LOGGED_AS.items() for theirs in names[::-1] if theirs in values}
        if "loss" in found:
            if isinstance(step, numbers.Integral):
                self._number(int(step))
            is_average = self._last_logged is not None and monitor.current_step > self._last_logged + 1
            if is_average and (self._loss is not None or self._is_engine):
                # Logged now and then, it may stand for all the steps since: the loss of the step itself is another.
                found["logged_loss"] = found.pop("loss")
            self._last_logged = monitor.current_step
        monitor.log(**found)

    def _number(self, step: int) -> None:
        monitor = self._monitor
        if step == monitor.current_step:
            return
        is_first = monitor.current_step == self._first_step
        if self._accelerator.num_processes == 1 and (step > monitor.current_step or (is_first and step >= 0)):
            monitor.set_step(step)
            self._loss_step = step
            self._first_step = step if is_first else self._first_step
        elif self._accelerator.num_processes > 1 and is_first and not self._is_reported:
            self._is_reported = True
            log.warning(
                "sentinel: accelerator.log calls step %d what is step %d here; attach_accelerate(..., first_step=%d) makes "
                "them agree", step, monitor.current_step, step,
            )  # fmt: skip


def attach_prepared(model: Any, optimizer: Any, config: Any, first_step: int, grad_acc_steps: int) -> Monitor | Unmeasured:
    """Attach to what `accelerator.prepare` returned: a DeepSpeed engine keeps parameters and steps in its own way.

    A micro-batch may go through the model several times before its backward: one micro-step all the same.
    """
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine):
        from sentinel.collect.adapters.deepspeed import attach_deepspeed

        return attach_deepspeed(model, config)
    return attach(model, optimizer, config, first_step=first_step, grad_acc_steps=max(1, grad_acc_steps))


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Put `around(original, ...)` in the place of a method, on this instance; returns what undoes it."""
    had, original = name in owner.__dict__, getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)

    def undo() -> None:
        if owner.__dict__.get(name) is wrapped:
            if had:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

    return undo
