"""OLMo-core: `trainer_config.with_callback("sentinel", sentinel.OlmoCoreCallback())`.

The trainer's step: `pre_step` (its number is `global_step`, 1-based), forward and backward of every micro-batch,
`pre_optim_step` (gradients are whole), clipping, schedule, `optim.step`, `zero_grads`, `post_train_batch`. Before the first
one it runs a batch of random tokens, forward and backward, to catch errors early: that is nobody's step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from olmo_core.train.callbacks import Callback, CheckpointerCallback, EvaluatorCallback
from olmo_core.train.common import OPTIM_GRAD_NORM_METRIC, TRAIN_CE_LOSS_METRIC

from sentinel.collect.attach import attach
from sentinel.collect.environment import read_environment
from sentinel.collect.monitor import Monitor
from sentinel.collect.unmeasured import Unmeasured
from sentinel.monitor_config import read_source
from sentinel.run_name import given_name

log = logging.getLogger("sentinel")

SKIPPED_METRIC = "optim/step skipped"
LR_METRIC = "optim/LR (group 0)"


def _guarded(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep what goes wrong in a hook of ours away from the trainer."""

    @functools.wraps(hook)
    def safe(self: OlmoCoreCallback, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            if isinstance(self._monitor, Monitor):
                self._monitor.port.guard(hook.__name__, error)
            else:
                log.warning("sentinel: %s failed", hook.__name__, exc_info=True)

    return safe


@dataclass
class OlmoCoreCallback(Callback):
    """Measures every `Trainer.fit`, on every rank."""

    priority: ClassVar[int] = max(10, CheckpointerCallback.priority + 1)
    """Before the checkpointer, whose checkpoint of a step must say that the step is over."""

    config: Any = None
    """As `sentinel.attach` takes it: the path of a YAML file, a mapping, or None for the defaults."""

    # Not fields: what a run leaves here is none of the configuration that OLMo-core copies, compares and saves.
    _monitor = None
    _saved = None
    _run = ""
    _has_trained = False

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown key, before anything is built."""
        if not read_environment().is_disabled:
            read_source(self.config)

    def __deepcopy__(self, memo: dict[int, Any]) -> OlmoCoreCallback:
        return type(self)(self.config)

    @property
    def monitor(self) -> Monitor | Unmeasured | None:
        """Of the running fit, or of the last one."""
        return self._monitor

    # -- course of a fit -----------------------------------------------------------------------------------------------

    @_guarded
    def pre_train(self) -> None:
        """Attach, before the dry run compiles anything, and let that pass."""
        self._end("detached")
        module = self.trainer.train_module
        models = list(getattr(module, "model_parts", None) or [module.model])
        optimizers = [one for one in (getattr(module, "optimizers", None) or [module.optim]) if one is not None]
        if not optimizers:
            return  # Built for evaluation only.
        config = self.config
        if self._run:
            config = read_source(config).with_run(self._run)  # A further fit goes on in the run of the first.
        monitor = attach(models if len(models) > 1 else models[0], optimizers, config, first_step=self.step + 1)
        self._monitor = monitor
        if isinstance(monitor, Monitor):
            self._run = given_name(monitor.run)
            if self._saved:
                monitor.load_state_dict(self._saved)
            monitor.port.steps.is_explicit = True
            monitor.port.pause()

    @_guarded
    def on_error(self, exc: BaseException) -> None:
        """Bring to disk what there is of the running step, and say that it ended with an exception."""
        if self._monitor is not None:
            self._monitor.flush()
        self._end("exception")

    @_guarded
    def close(self) -> None:
        """Detach: the last checkpoint, which `post_train` may save, is written."""
        self._end("detached")

    def _end(self, reason: str) -> None:
        if self._monitor is not None and self._monitor.is_alive:
            self._monitor.detach(reason)

    # -- steps -------------------------------------------------------------------------------------------------------

    @_guarded
    def pre_step(self, batch: dict[str, Any]) -> None:
        """Give the step its number: the one that the trainer logs beside its loss."""
        monitor = self._monitor
        self._has_trained = False
        if not isinstance(monitor, Monitor):
            return
        monitor.port.resume()
        monitor.set_step(self.step)
        monitor.log(tokens=self.trainer.data_loader.global_num_tokens_in_batch(batch))

    @_guarded
    def pre_optim_step(self) -> None:
        """Read the gradients: reduced, and not clipped yet."""
        self._has_trained = True
        if self._monitor is not None:
            self._monitor.gradients_ready()

    @_guarded
    def post_train_batch(self) -> None:
        """End the step; one that the trainer left out (`steps_to_skip`) is a skipped one."""
        monitor = self._monitor
        if not isinstance(monitor, Monitor) or not monitor.is_alive:
            return
        is_skipped: Any = None if self._has_trained else True
        try:
            # Tensors as they were recorded, on the rank's device: nothing waits for their values here.
            recorded = self.trainer.get_metric
            if self._has_trained:
                is_skipped = recorded(SKIPPED_METRIC)
            lr = recorded(LR_METRIC)
            monitor.log(
                loss=recorded(TRAIN_CE_LOSS_METRIC),
                grad_norm=recorded(OPTIM_GRAD_NORM_METRIC),
                lr=self._learning_rate() if lr is None else lr,
            )
        finally:
            monitor.step(is_skipped=is_skipped)

    def _learning_rate(self) -> Any:
        module = self.trainer.train_module
        optimizer = (getattr(module, "optimizers", None) or [module.optim])[0]
        return optimizer.param_groups[0].get("lr")

    # -- pauses and checkpoints --------------------------------------------------------------------------------------

    @_guarded
    def post_step(self) -> None:
        """Say why the run will be quiet, where evaluators are due now; the next step says that training goes on."""
        for callback in self.trainer.callbacks.values():
            interval = getattr(callback, "eval_interval", None) if isinstance(callback, EvaluatorCallback) else None
            if interval and self.step % interval == 0 and self._monitor is not None and self._monitor.is_alive:
                self._monitor.activity("eval")

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into the trainer's checkpoint."""
        monitor = self._monitor
        if monitor is None:
            return dict(self._saved or {})
        if monitor.is_alive:
            monitor.activity("checkpoint")
        return monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a checkpoint has; numbers of steps are the trainer's, restored by itself."""
        self._saved = dict(state_dict)
