"""Hugging Face Trainer: a callback that gives steps the Trainer's own numbers and follows its log.

    trainer.add_callback(sentinel.HuggingFaceCallback())

One `train()` is one incarnation: attached when it begins, detached when it ends, however it ends. The order of events, read
in
transformers 5.23: step_begin, (training_step, substep_end)*, clip, pre_optimizer_step, optimizer.step, optimizer_step,
scheduler.step, zero_grad, `global_step += 1`, step_end, log, evaluate, save.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from sentinel.collect.adapters.accelerate import attach_prepared
from sentinel.collect.environment import read_environment
from sentinel.collect.monitor import Monitor
from sentinel.collect.unmeasured import Unmeasured
from sentinel.errors import ConfigError
from sentinel.monitor_config import ConfigSource, MonitorConfig, read_source
from sentinel.run_name import given_name

log = logging.getLogger("sentinel")

_training: list[Trainer] = []
"""Trainers whose `train()` runs now, innermost last."""


def _guarded(event: Callable[..., None]) -> Callable[..., None]:
    """An event that runs while an incarnation is measured, and keeps what goes wrong in it away from the Trainer."""

    @functools.wraps(event)
    def guarded(self: HuggingFaceCallback, *args: Any, **kwargs: Any) -> None:
        monitor = self.monitor
        if not isinstance(monitor, Monitor) or not monitor.is_alive:
            return
        try:
            event(self, monitor, *args, **kwargs)
        except Exception as error:
            monitor.port.guard(event.__name__, error)

    return guarded


class HuggingFaceCallback(TrainerCallback, ExportableState):
    """Attaches Sentinel for as long as `trainer.train()` runs. `monitor` is the running, or the last, incarnation.

    Scalars of a step: `loss`, the step's own (before the Trainer averages over `logging_steps` and filters NaN), `lr`,
    `grad_norm`, and `logged_loss` where the Trainer logs an average over several steps. None is synchronised.
    """

    def __init__(self, config: MonitorConfig | Mapping[str, Any] | str | Path | None = None) -> None:
        _watch_train()
        self.config = ConfigSource() if read_environment().is_disabled else read_source(config)
        self.config_path = self.config.path
        self.monitor: Monitor | Unmeasured | None = None
        self.run: str | None = None
        """The run of the last incarnation here, or of the checkpoint: the next one is another attempt of it."""
        self._loss: torch.Tensor | None = None
        """Sum over the micro-steps of the running step, on the device."""
        self._has_own_loss = False
        self._is_logging = False
        """The step is over but for the Trainer's log of it."""
        self._last_logged = 0
        self._num_steps = 0

    # -- the Trainer's events ----------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach: model and optimizer are prepared, wrapped and loaded by now."""
        try:
            self._attach(args, state, **kwargs)
        except ConfigError:
            raise
        except Exception:  # The trainer never dies for Sentinel.
            log.warning("sentinel: attach failed", exc_info=True)

    def _attach(self, args: Any, state: Any, **kwargs: Any) -> None:
        self._end("exception")  # `auto_find_batch_size` begins anew after a loop that raised.
        trainer = self._trainer()
        if trainer is not None and self._is_second(trainer):
            log.warning("sentinel: this Trainer has two of Sentinel's callbacks; the second does nothing")
            return
        model = getattr(trainer, "model_wrapped", None)
        self._loss, self._is_logging, self._has_own_loss = None, False, False
        self._last_logged, self._num_steps = int(state.global_step), 0
        self.monitor = attach_prepared(
            kwargs["model"] if model is None else model,
            kwargs.get("optimizer"),
            self._config(state),
            int(state.global_step) + 1,
            int(args.gradient_accumulation_steps),
        )
        if isinstance(self.monitor, Monitor):
            self.run = given_name(self.monitor.run)
            if trainer is not None:
                self.monitor.port.at_end(_follow_losses(trainer, self))

    @_guarded
    def on_step_begin(self, monitor: Monitor, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Number the step as the Trainer will when it is over."""
        self._finish(monitor)
        self._loss = None
        monitor.set_step(int(state.global_step) + 1)

    @_guarded
    def on_pre_optimizer_step(self, monitor: Monitor, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the loss: all micro-steps are done. The gradients were read before they were clipped."""
        self._note_loss(monitor)

    @_guarded
    def on_optimizer_step(self, monitor: Monitor, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the learning rate that was used: the scheduler comes next."""
        groups = getattr(kwargs.get("optimizer"), "param_groups", None)
        if groups:
            monitor.noticed(lr=groups[0].get("lr"))

    @_guarded
    def on_step_end(self, monitor: Monitor, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step, unless the Trainer is about to log it."""
        self._note_loss(monitor)
        monitor.set_step(int(state.global_step))
        self._num_steps += 1
        self._is_logging = True
        if not control.should_log:
            self._finish(monitor)
            self._announce(monitor, control)

    @_guarded
    def on_log(self, monitor: Monitor, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take the Trainer's numbers for the step that has just ended."""
        if not self._is_logging or not logs or "loss" not in logs:
            return
        if not self._has_own_loss:
            monitor.log(loss=logs["loss"])
        elif state.global_step - self._last_logged > 1:
            monitor.log(logged_loss=logs["loss"])
        monitor.log(lr=logs.get("learning_rate"), grad_norm=logs.get("grad_norm"))
        self._last_logged = int(state.global_step)
        self._finish(monitor)
        self._announce(monitor, control)

    @_guarded
    def on_prediction_step(self, monitor: Monitor, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say that an evaluation runs."""
        self._finish(monitor)
        monitor.activity("eval")

    @_guarded
    def on_evaluate(self, monitor: Monitor, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what comes after an evaluation."""
        self._finish(monitor)
        saves_best = str(getattr(args.save_strategy, "value", args.save_strategy)) == "best"
        monitor.activity("checkpoint" if control.should_save or saves_best else self._training_activity())

    @_guarded
    def on_save(self, monitor: Monitor, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say that training goes on after a checkpoint."""
        self._finish(monitor)
        monitor.activity(self._training_activity())

    @_guarded
    def on_epoch_end(self, monitor: Monitor, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what an epoch ends with."""
        self._finish(monitor)
        self._announce(monitor, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach."""
        self.train_left("detached")

    # -- the Trainer's checkpoint ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what goes into `trainer_state.json`: JSON, read back by the next `train()` that resumes."""
        saved = {} if self.monitor is None else self.monitor.state_dict()
        usual, config = msgspec.to_builtins(MonitorConfig()), msgspec.to_builtins(self.config.as_read)
        config = {key: value for key, value in config.items() if value != usual[key]}
        attributes = {"run": self.run, "config_path": self.config_path}
        return {"args": {"config": config}, "attributes": attributes, "monitor": saved}

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the Trainer, in another process or not, watches nothing until it trains."""
        return {**self.__dict__, "monitor": None, "_loss": None, "_is_logging": False}

    def _config(self, state: Any) -> ConfigSource:
        """The config, and the run that this `train()` goes on with unless somebody names another."""
        if self.config_path and not self.config.path:
            # Made anew from a checkpoint: the file is followed again, where it still is one.
            with contextlib.suppress(ConfigError):
                self.config = read_source(self.config_path)
        if self.config.config.run or read_environment().run:
            return self.config
        saved = (state.stateful_callbacks or {}).get(type(self).__name__) if state.global_step else None
        saved = saved[0] if isinstance(saved, list) and saved else saved
        attributes = saved.get("attributes", {}) if isinstance(saved, Mapping) else {}
        run = self.run or attributes.get("run")
        return self.config.with_run(run) if isinstance(run, str) and run else self.config

    # -- steps ---------------------------------------------------------------------------------------------------------

    def add_loss(self, loss: Any) -> None:
        """Add the loss of a micro-step, scaled for the accumulation as the Trainer adds it up itself."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            loss = loss.detach().to(torch.float32)
            self._loss = loss if self._loss is None else self._loss + loss

    def _note_loss(self, monitor: Monitor) -> None:
        if self._loss is not None:
            monitor.noticed(loss=self._loss)
            self._loss, self._has_own_loss = None, True

    def _finish(self, monitor: Monitor) -> None:
        """End the step that the Trainer has ended, if it is not yet."""
        if self._is_logging:
            self._is_logging = False
            accelerator = getattr(self._trainer(), "accelerator", None)
            was_skipped = bool(getattr(accelerator, "optimizer_step_was_skipped", False))
            monitor.step(is_skipped=True if was_skipped else None)

    def _announce(self, monitor: Monitor, control: Any) -> None:
        """Say what the Trainer does before its next step."""
        monitor.activity("eval" if control.should_evaluate else "checkpoint" if control.should_save else "train")

    def _training_activity(self) -> str:
        return "train" if self._num_steps else "init"

    @_guarded
    def _close_step(self, monitor: Monitor) -> None:
        self._finish(monitor)

    def train_left(self, reason: str) -> None:
        """`train()` is over, returned or raised: end what is not ended yet."""
        try:
            self._end(reason)
        except Exception:  # Nothing of ours may stand before what the Trainer itself raised.
            log.warning("sentinel: detach failed", exc_info=True)

    def _end(self, reason: str) -> None:
        """End this incarnation; a step that was not over is sent as partial."""
        self._close_step()
        if self.monitor is not None and self.monitor.is_alive:
            self.monitor.detach(reason)

    # -- the Trainer itself --------------------------------------------------------------------------------------------

    def _trainer(self) -> Trainer | None:
        """The Trainer that calls; None where a subclass has a `train` that does not call Trainer's."""
        return next((one for one in reversed(_training) if self in one.callback_handler.callbacks), None)

    def _is_second(self, trainer: Trainer) -> bool:
        return next(one for one in trainer.callback_handler.callbacks if isinstance(one, HuggingFaceCallback)) is not self


def _watch_train() -> None:
    """Wrap `Trainer.train` once: it tells callbacks which Trainer calls them, and no event tells that it raised."""
    original = Trainer.train
    if hasattr(original, "is_watched_by_sentinel"):
        return

    @functools.wraps(original)
    def train(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        _training.append(trainer)
        reason = "exception"
        try:
            result = original(trainer, *args, **kwargs)
            reason = "detached"
            return result
        finally:
            _training.remove(trainer)
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, HuggingFaceCallback):
                    callback.train_left(reason)

    train.is_watched_by_sentinel = True  # type: ignore[attr-defined]
    Trainer.train = train


def _follow_losses(trainer: Trainer, callback: HuggingFaceCallback) -> Callable[[], None]:
    """Hand the callback what each `training_step` of this Trainer returns; returns what undoes it."""
    original = trainer.training_step

    @functools.wraps(original)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        callback.add_loss(loss)
        return loss

    trainer.training_step = training_step
    reference = weakref.ref(trainer)

    def undo() -> None:
        owner = reference()
        if owner is not None and owner.__dict__.get("training_step") is training_step:
            del owner.__dict__["training_step"]

    return undo
