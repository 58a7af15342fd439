"""Lightning: `Trainer(callbacks=[sentinel.LightningCallback()])`, of `lightning.pytorch` and of `pytorch_lightning` alike.

Lightning runs forward, zero_grad, backward and clipping inside a closure of `optimizer.step`, so gradients are read in
`on_before_optimizer_step`, which lies between the backward and the clipping. A micro-step is one call of `training_step`:
it is what every strategy runs, whether or not the module's own `forward` is called in it. Steps have the number that
Lightning's loggers print: batches that stepped, 0-based; in manual optimisation loggers count every batch.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sentinel.collect.attach import attach
from sentinel.collect.environment import read_environment
from sentinel.collect.hooks.optimizers import InstanceWrap
from sentinel.collect.monitor import Monitor
from sentinel.collect.unmeasured import Unmeasured
from sentinel.monitor_config import ConfigSource, MonitorConfig, read_source
from sentinel.run_name import given_name

log = logging.getLogger("sentinel")

FLAVOURS = ("lightning.pytorch", "pytorch_lightning")
LOGGED_AS = {
    "loss": ("loss", "train_loss", "train/loss", "training_loss", "loss/train"),
    "lr": ("lr", "learning_rate", "train/lr"),
    "grad_norm": ("grad_norm", "gradient_norm", "train/grad_norm", "grad_norm_total", "grad_2.0_norm_total"),
}
"""Our scalar -> names under which users log it; the first one found counts."""
MAX_FOLLOWED = 32
"""Logged values of a step that are recorded under their own names; a bound on scalars: users log a norm per parameter."""


def _callback_bases() -> tuple[type, ...]:
    """Return the Callback of each flavour that the program uses; of the first one installed where it uses none yet."""
    loaded = [name for name in FLAVOURS if name in sys.modules]
    if not loaded:
        try:
            importlib.import_module(FLAVOURS[0])
            loaded = [FLAVOURS[0]]
        except ModuleNotFoundError:
            importlib.import_module(FLAVOURS[1])
            loaded = [FLAVOURS[1]]
    return tuple(sys.modules[name].Callback for name in loaded)


_Callback: Any = type("Callback", _callback_bases(), {})


def _guarded(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep what goes wrong in a hook of ours away from the trainer."""

    @functools.wraps(hook)
    def safe(self: LightningCallback, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            if isinstance(self.monitor, Monitor):
                self.monitor.port.guard(hook.__name__, error)
            else:
                log.warning("sentinel: %s failed", hook.__name__, exc_info=True)

    return safe


class LightningCallback(_Callback):
    """Measures every `fit` of the trainer it is given to; `validate`, `test` and `predict` are left alone."""

    def __init__(self, config: MonitorConfig | Mapping[str, Any] | str | Path | None = None) -> None:
        """config: as `sentinel.attach` takes it. Raises ConfigError for an unknown key."""
        super().__init__()
        self.config = config if read_environment().is_disabled else read_source(config)
        self.monitor: Monitor | Unmeasured | None = None
        """Of the running fit, or of the last one."""
        self._undo: list[Callable[[], None]] = []
        self._run = ""
        self._saved: dict[str, Any] = {}
        self._optimizers: list[Any] = []
        self._losses: list[torch.Tensor] = []
        self._had_backward = self._was_zeroed = self._accumulates = False

    def __getstate__(self) -> dict[str, Any]:
        # A spawned process gets the callback by pickle; what it measures is its own.
        return {**self.__dict__, "monitor": None, "_undo": [], "_optimizers": [], "_losses": []}

    # -- course of a fit -----------------------------------------------------------------------------------------------

    @_guarded
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: the checkpoint is restored, and the sanity check and the tuners' trial steps are over."""
        self._end("detached")
        step = TrainingStep(pl_module)
        config = self.config
        if self._run and isinstance(config, ConfigSource):
            config = config.with_run(self._run)  # A further fit goes on in the run of the first.
        monitor = attach(step, list(trainer.optimizers), config, first_step=_number(trainer))
        self.monitor = monitor
        if not isinstance(monitor, Monitor):
            return
        self._run = given_name(monitor.run)
        if self._saved:
            monitor.load_state_dict(self._saved)
        monitor.port.steps.is_explicit = True
        self._undo.append(step.put_in())
        self._watch_optimizers(trainer, monitor)
        self._begin()

    def _watch_optimizers(self, trainer: Any, monitor: Monitor) -> None:
        self._optimizers = list(trainer.optimizers)
        for optimizer in trainer.strategy._lightning_optimizers:
            self._undo.append(_before_zero_grad(optimizer, functools.partial(self._zeroed, monitor)))

    @_guarded
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach: what callbacks saved at the end of training has our state in it."""
        self._end("detached")

    @_guarded
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach where the fit ended without `on_fit_end`."""
        self._end("detached")

    @_guarded
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Bring to disk what there is of the running step, and say that it ended with an exception."""
        if self.monitor is not None:
            self.monitor.flush()
        self._end("exception")

    def _end(self, reason: str) -> None:
        if self.monitor is not None and self.monitor.is_alive:
            self._saved = {}
            self.monitor.detach(reason)
        while self._undo:
            self._undo.pop()()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._losses = []
        self._had_backward = self._was_zeroed = False

    @_guarded
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Give the step its number: the one that loggers print beside this batch's values."""
        monitor = self.monitor
        if not isinstance(monitor, Monitor) or not monitor.is_alive:
            return
        monitor.set_step(_number(trainer))
        if [id(one) for one in trainer.optimizers] != [id(one) for one in self._optimizers]:
            monitor.port.steps.watch(trainer.optimizers)  # Callbacks may exchange them between epochs.
            self._watch_optimizers(trainer, monitor)

    @_guarded
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Note that gradients exist that somebody may throw away."""
        self._had_backward = True
        if isinstance(self.monitor, Monitor):
            self.monitor.port.steps.mark_backward()

    @_guarded
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Read this optimizer's gradients: reduced, unscaled and not clipped yet."""
        monitor = self.monitor
        if monitor is None or not monitor.is_alive:
            return
        groups = optimizer.param_groups
        monitor.gradients_ready([p for group in groups for p in group["params"]])
        at = next((at for at, one in enumerate(trainer.optimizers) if one is optimizer), 0)
        # Read here: schedulers have moved on when the batch ends.
        monitor.log(**{"lr" if at == 0 else f"lr_{at}": groups[0].get("lr") if groups else None})
        # The scale as a tensor: get_scale() waits for the device.
        monitor.log(loss_scale=getattr(getattr(trainer.precision_plugin, "scaler", None), "_scale", None))

    def _zeroed(self, monitor: Monitor, optimizer: Any) -> None:
        self._was_zeroed = True
        monitor.port.steps.zeroed_by(optimizer)

    @_guarded
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the step, unless the next batch adds to the same gradients."""
        monitor = self.monitor
        if not isinstance(monitor, Monitor) or not monitor.is_alive:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())
        has_stepped = not monitor.port.steps.was_skipped
        is_automatic = pl_module.automatic_optimization
        if self._goes_on(trainer, is_automatic, has_stepped):
            return
        if not has_stepped:
            monitor.gradients_ready()
        try:
            if self._losses:
                total = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()
                # In automatic optimisation Lightning has divided each batch's loss by their number.
                monitor.log(loss=total if is_automatic else total / len(self._losses))
            monitor.log(**followed(trainer))
        finally:
            monitor.step(is_skipped=not has_stepped or (is_automatic and not self._had_backward))
            self._begin()

    def _goes_on(self, trainer: Any, is_automatic: bool, has_stepped: bool) -> bool:
        if is_automatic:
            return bool(trainer.fit_loop._should_accumulate())
        if has_stepped:
            return False
        # Manual optimisation: gradients that nobody used or cleared in this batch are added to in the next one. Clearing
        # without a step is a step that the user skipped; or the begin of an accumulation, if there ever was one.
        self._accumulates |= not self._was_zeroed
        return self._accumulates

    # -- pauses and checkpoints --------------------------------------------------------------------------------------

    def _activity(self, name: str) -> None:
        if self.monitor is not None and self.monitor.is_alive:
            self.monitor.activity(name)

    @_guarded
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Say why the run is quiet."""
        self._activity("eval")

    @_guarded
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Say that training goes on."""
        self._activity("train")

    @_guarded
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Say why the run is quiet; the next step says that training goes on."""
        self._activity("checkpoint")

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into Lightning's checkpoint."""
        return self.monitor.state_dict() if self.monitor is not None else dict(self._saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a checkpoint has; numbers of steps are the trainer's, restored by itself."""
        self._saved = dict(state_dict)


class TrainingStep(nn.Module):
    """Stands around a LightningModule as the model that is called: one call is one `training_step`.

    Lightning calls `training_step`, not the module, so hooks on the module itself may never run (or run twice, under DDP).
    """

    def __init__(self, pl_module: Any) -> None:
        super().__init__()
        self._orig_mod = pl_module  # A name that strip_wrappers takes away again.
        self._step: Callable[..., Any] = pl_module.training_step

    @property
    def training(self) -> bool:
        """True: a module that a user keeps in evaluation mode (frozen norms) is trained all the same."""
        return True

    @training.setter
    def training(self, mode: bool) -> None: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's `training_step`."""
        return self._step(*args, **kwargs)

    def put_in(self) -> Callable[[], None]:
        """Have Lightning call this instead of `training_step`; return what undoes it."""
        owner = self._orig_mod
        former = owner.__dict__.get("training_step")
        ours = owner.__dict__["training_step"] = _WrappedTrainingStep(owner, self)

        def undo() -> None:
            if owner.__dict__.get("training_step") is ours:
                if former is None:
                    del owner.__dict__["training_step"]
                else:
                    owner.__dict__["training_step"] = former

        return undo


class _WrappedTrainingStep(InstanceWrap):
    """`training_step` on its way through a TrainingStep; a copy of the LightningModule has the plain one."""

    def __init__(self, owner: Any, step: TrainingStep) -> None:
        super().__init__(owner, "training_step", _nothing)
        # Lightning looks one layer deep for the arguments that the user's function takes.
        self.__wrapped__ = getattr(self.__wrapped__, "__wrapped__", self.__wrapped__)
        self._through = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(*args, **kwargs)


def _nothing() -> None: ...


def _before_zero_grad(optimizer: Any, zeroed: Callable[[Any], None]) -> Callable[[], None]:
    """Watch `zero_grad` of a LightningOptimizer, which does not call that of the optimizer inside; return what undoes it."""
    wrap = InstanceWrap(optimizer, "zero_grad", functools.partial(zeroed, optimizer.optimizer))
    optimizer.__dict__["zero_grad"] = wrap

    def undo() -> None:
        if optimizer.__dict__.get("zero_grad") is wrap:
            del optimizer.__dict__["zero_grad"]

    return undo


def _number(trainer: Any) -> int:
    """Return the number that Lightning's loggers give to the running batch."""
    number = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", None)
    return int(trainer.global_step if number is None else number)


def followed(trainer: Any) -> dict[str, Any]:
    """Return what `self.log` said in this batch, by its own name and as loss, lr and grad_norm; tensors, not synchronised.

    Not `trainer.callback_metrics`: reading that turns what is on the progress bar into numbers, which waits for the device.
    """
    results: Any = trainer._results
    items: Iterable[Any] = (item for _, item in results.valid_items()) if results is not None else ()
    logged = {
        item.meta.name: item._forward_cache
        for item in items
        if item.meta.on_step and isinstance(item._forward_cache, torch.Tensor) and item._forward_cache.numel() == 1
    }
    found = dict(list(logged.items())[:MAX_FOLLOWED])
    for ours, theirs in LOGGED_AS.items():
        name = next((name for name in theirs if name in logged), None)
        if name is not None:
            found[ours] = logged[name]
    return found
