"""torchtitan: its Trainer has no callbacks, so its own methods are wrapped on the instance, and unwrapped on detach.

    trainer = config.build()
    sentinel.attach_torchtitan(trainer)        # then trainer.train(), as ever

Read in torchtitan 0.3: `train` loads the checkpoint, then for each step `step += 1`, `train_step` (zero_grad, for each
micro-step `forward_backward_step`, clip, optimizers.step, lr_schedulers.step, log), `checkpointer.save`, `validate`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.trainer import Trainer

from sentinel.collect.attach import attach
from sentinel.collect.environment import read_environment
from sentinel.collect.monitor import Monitor
from sentinel.collect.parallel.placements import local_of
from sentinel.collect.unmeasured import Unmeasured
from sentinel.kinds import MODULE_KINDS
from sentinel.monitor_config import ConfigSource, MonitorConfig, read_source
from sentinel.place import Place

STATE = "sentinel"
"""Our key in the trainer's checkpoint."""
AXES = {"dp": "batch", "pp": "pp", "tp": "tp", "cp": "cp", "ep": "ep"}
"""Our axis -> torchtitan's mesh of that axis. `batch` is dp_replicate x dp_shard."""


def attach_torchtitan(
    trainer: Trainer, config: MonitorConfig | Mapping[str, Any] | str | Path | None = None
) -> Monitor | Unmeasured:
    """Attach to a torchtitan Trainer that is built and does not train yet.

    Steps have the numbers of torchtitan's own log. Scalars of each step: `loss`, whose mean over the ranks is the loss that
    torchtitan logs; `grad_norm`; `lr`; `tokens`, of this rank. None is synchronised. `trainer.close()` ends the monitor.
    """
    if read_environment().is_disabled:
        return Unmeasured("SENTINEL_DISABLE is set", is_wanted=True)
    source = read_source(config)
    replays = _replays_graphs(trainer)
    if replays:
        source = ConfigSource(config=_without_modules(source.config))
    monitor = attach(
        trainer.model_parts, list(trainer.optimizers), source,
        place=_place(trainer), grad_acc_steps=None, first_step=int(trainer.step) + 1,
    )  # fmt: skip
    if isinstance(monitor, Monitor):
        try:
            if replays:
                monitor.port.report(
                    "cuda_graphs",
                    "forward and backward are replayed as a CUDA graph, in which no hook runs: parameters, gradients and "
                    "scalars are measured, the black box and modules are not; training.disable_cuda_graphs shows them",
                )
            TorchtitanTrainer(trainer, monitor, replays)
        except Exception as error:
            monitor.port.guard("attach_torchtitan", error)
    return monitor


class TorchtitanTrainer:
    """What is wrapped on one Trainer, until its monitor ends."""

    def __init__(self, trainer: Trainer, monitor: Monitor, replays: bool) -> None:
        self._trainer = trainer
        self._monitor = monitor
        self._replays = replays
        self._loss: torch.Tensor | None = None
        """Sum over the micro-steps of the running step: this rank's share of the loss."""
        self._num_micro_steps = 0
        self._tokens = 0
        """Tokens that this rank had seen when the step began."""
        self._rates: dict[str, Any] = {}
        dims = trainer.parallel_dims
        self._num_shares = dims.dp_replicate * dims.dp_shard * dims.cp
        """Ranks whose shares of the loss torchtitan adds up."""
        self._undo: list[Callable[[], None]] = []
        monitor.port.at_end(self.stop)
        monitor.step()  # Only we end steps.
        self._wrap(trainer, "train_step", self._train_step)
        self._wrap(trainer, "forward_backward_step", self._forward_backward_step)
        self._wrap(trainer, "close", self._close)
        if isinstance(getattr(trainer, "loss_fn", None), ChunkedLossWrapper):
            self._wrap(trainer, "loss_fn", self._chunked_loss)
        checkpointer = getattr(trainer, "checkpointer", None)
        if getattr(checkpointer, "enable", False):
            self._keep_state(checkpointer)
        if getattr(trainer, "validator", None) is not None:
            self._wrap(trainer.validator, "validate", functools.partial(self._during, "eval"))

    def stop(self) -> None:
        """Give the Trainer its own methods back."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Put `around(original, *args)` in the place of a method of this one object."""
        former, had_own = getattr(owner, name), name in owner.__dict__

        @functools.wraps(former)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(former, *args, **kwargs)

        def undo() -> None:
            if owner.__dict__.get(name) is wrapped:
                if had_own:
                    setattr(owner, name, former)
                else:
                    delattr(owner, name)

        setattr(owner, name, wrapped)
        self._undo.append(undo)

    # -- a step ------------------------------------------------------------------------------------------------------

    def _train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        monitor = self._monitor
        try:
            self._loss, self._num_micro_steps, self._tokens = None, 0, int(self._trainer.ntokens_seen)
            self._rates = self._learning_rates()
            monitor.set_step(int(self._trainer.step))
        except Exception as error:
            monitor.port.guard("train_step", error)
        try:
            result = original(*args, **kwargs)
        except DataloaderExhaustedError:
            raise  # torchtitan cancels this step before its first forward: there is nothing to tell.
        except BaseException:
            self._note()
            monitor.flush()
            raise
        self._note()
        monitor.step()
        return result

    def _forward_backward_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._replays:
            self._begin()
        loss = original(*args, **kwargs)
        try:
            self._num_micro_steps += 1
            if isinstance(loss, torch.Tensor) and self._has_loss():
                share = local_of(loss.detach())
                self._loss = share.clone() if self._loss is None else self._loss.add_(share)
        except Exception as error:
            self._monitor.port.guard("forward_backward_step", error)
        return loss

    def _chunked_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Measure the head: it runs inside this loss, chunk by chunk, when the model's own forward is over."""
        with self._monitor.port.chunks[-1].reopened():
            return original(*args, **kwargs)

    def _begin(self) -> None:
        """Begin the step, as a forward would: in a CUDA graph no hook sees it, and nothing of ours may be captured."""
        try:
            self._monitor.port.steps.begin()
        except Exception as error:
            self._monitor.port.guard("forward_backward_step", error)

    def _has_loss(self) -> bool:
        """Pipeline stages other than the last hand out a placeholder."""
        return not self._trainer.parallel_dims.pp_enabled or bool(self._trainer.pp_has_last_stage)

    def _note(self) -> None:
        """Note the scalars of the step that ends."""
        try:
            self._monitor.log(**self._rates)
            if self._loss is not None and self._num_micro_steps == self._trainer.gradient_accumulation_steps:
                self._monitor.log(loss=self._loss * self._num_shares if self._num_shares > 1 else self._loss)
            self._monitor.log(tokens=int(self._trainer.ntokens_seen) - self._tokens)
        except Exception as error:
            self._monitor.port.guard("train_step", error)

    def _learning_rates(self) -> dict[str, Any]:
        """Return the rates with which this step will be taken: `lr`, and further ones as torchtitan numbers them."""
        rates = [rate for scheduler in self._trainer.lr_schedulers.schedulers for rate in scheduler.get_last_lr()]
        return {"lr" if at == 0 else f"lr/{at}": rate for at, rate in enumerate(rates) if at == 0 or rate != rates[0]}

    # -- around steps ------------------------------------------------------------------------------------------------

    def _during(self, activity: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `original`, in which nothing is trained: loading steps the optimizers once, to give them their state."""
        self._monitor.activity(activity)
        self._monitor.port.pause()
        try:
            return original(*args, **kwargs)
        finally:
            self._monitor.port.resume()
            self._monitor.activity("train")

    def _close(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._monitor.detach("exception" if sys.exc_info()[0] is not None else "detached")
        return original(*args, **kwargs)

    # -- its checkpoint ----------------------------------------------------------------------------------------------

    def _keep_state(self, checkpointer: Any) -> None:
        """Be saved and loaded with the Trainer's own states."""
        self._wrap(checkpointer, "save", functools.partial(self._during, "checkpoint"))
        self._wrap(checkpointer, "load", functools.partial(self._during, "checkpoint"))
        states = getattr(checkpointer, "states", None)
        if not isinstance(states, dict) or not hasattr(checkpointer, "dcp_load") or STATE in states:
            return  # The step is in the Trainer's own state, whatever keeps it.
        states[STATE] = MonitorState(self._monitor)
        self._undo.append(lambda: states.pop(STATE, None) and None)
        self._wrap(checkpointer, "dcp_load", self._dcp_load)

    def _dcp_load(
        self, original: Callable[..., Any], state_dict: Any, checkpoint_id: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # A checkpoint from before Sentinel has no such key, and torch refuses to load what is not there.
        if STATE in state_dict and not _is_in(checkpoint_id):
            state_dict = {key: value for key, value in state_dict.items() if key != STATE}
        return original(state_dict, checkpoint_id, *args, **kwargs)


class MonitorState:
    """The monitor's state as a Stateful of torch.distributed.checkpoint, in which nothing can fail."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next step."""
        return self._monitor.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        try:
            self._monitor.load_state_dict(state_dict)
        except Exception as error:
            self._monitor.port.guard("load_state_dict", error)


def _is_in(checkpoint_id: Any) -> bool:
    """Whether a checkpoint holds our state; reads its index, as torch does on each rank. No collective."""
    try:
        metadata = FileSystemReader(checkpoint_id).read_metadata()
        return f"{STATE}.step" in metadata.state_dict_metadata
    except Exception:
        return False  # Whatever stands there (a remote store, safetensors), torchtitan loads it without us.


def _replays_graphs(trainer: Trainer) -> bool:
    """Whether forward and backward are captured once and replayed."""
    function = getattr(trainer, "fwd_bwd_fn", None)
    return getattr(function, "__name__", "") == "run" and "cudagraph" in getattr(function, "__module__", "")


def _without_modules(settings: MonitorConfig) -> MonitorConfig:
    """Return the settings without all that needs hooks in a forward."""
    labels = {kind.label for kind in MODULE_KINDS}
    kinds = tuple(kind for kind in settings.kinds if kind not in labels)
    return msgspec.structs.replace(settings, kinds=kinds, black_box=False, allow_commands=())


def _place(trainer: Trainer) -> Place:
    """Return where this rank stands, by torchtitan's own meshes."""
    dims = trainer.parallel_dims
    fields: dict[str, Any] = {"vpp_size": max(1, len(trainer.model_parts))}
    if torch.distributed.is_initialized():
        fields["rank"], fields["world_size"] = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for axis, name in AXES.items():
        mesh = dims.get_optional_mesh(name)
        if mesh is not None:
            fields[f"{axis}_rank"], fields[f"{axis}_size"] = mesh.get_local_rank(), mesh.size()
    if dims.pp_enabled:
        schedule = str(trainer.config.parallelism.pipeline_parallel_schedule).lower()
        fields["schedule"] = "zbv" if schedule == "zbvzerobubble" else schedule
    return Place(**fields)
