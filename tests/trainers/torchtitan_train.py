"""Trains with torchtitan's own Trainer, several times in one process; what the trainer itself printed goes to a file.

    python torchtitan_train.py RUNS.json RESULTS.json       # RUNS: one mapping a training, see `Run`

The examples' model and CPU shim are used. Between trainings the process group stays, as torchtitan allows.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
import time
import types
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
import torch.distributed as dist
import torchtitan_train as example
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import init_logger

import sentinel
from tests.support.host_waits import HostWaits

LINE = re.compile(r"^step:\s*(\d+)\s+loss:\s*(\S+)\s+grad_norm:\s*(\S+)")


@dataclasses.dataclass
class Run:
    """One training."""

    name: str
    options: list[str] = dataclasses.field(default_factory=list)
    """Of the example's command line."""
    config: dict[str, Any] | None = None
    """Of the monitor; None: without Sentinel."""
    poison_step: int = 0
    """At this step a weight of the head becomes NaN: the loss is NaN and torchtitan raises."""
    fail_step: int = 0
    """At this step the second micro-step's forward raises."""
    replays: bool = False
    """Forward and backward look like a CUDA graph's replay: no hook of a module runs."""
    counts_syncs: bool = False
    disabled: bool = False
    """SENTINEL_DISABLE=1."""


class Printed(logging.Handler):
    """torchtitan's own lines: step -> (loss, grad_norm), as printed."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, tuple[str, str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        found = LINE.match(record.getMessage())
        if found:
            self.steps[int(found[1])] = (found[2], found[3])


def set_weights(model: torch.nn.Module) -> None:
    """Give every parameter values that depend on its name alone, on every layout."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.replace("_checkpoint_wrapped_module.", "").encode()))
            full = torch.randn(param.shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
            if isinstance(param, DTensor):
                param.copy_(distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None))
            else:
                param.copy_(full)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sequence_numbers() -> int:
    """Collectives so far, in all process groups that do anything (torchtitan has fake ones for axes that are not split)."""
    groups = [group for group, (backend, _) in dist.distributed_c10d._world.pg_map.items() if backend == "gloo"]
    return sum(int(group._get_sequence_number_for_group()) for group in groups if group.size() > 1)


def train_one(run: Run) -> dict[str, Any]:
    os.environ["SENTINEL_RUN"] = run.name
    os.environ.pop("SENTINEL_DISABLE", None)
    if run.disabled:
        os.environ["SENTINEL_DISABLE"] = "1"
    printed = Printed()
    logging.getLogger().addHandler(printed)
    trainer = example.config(example.parse(run.options)).build()
    (model,) = trainer.model_parts
    set_weights(model)
    plain = {name: getattr(trainer, name).__func__ for name in ("train_step", "forward_backward_step", "close")}
    if run.replays:
        _without_hooks(trainer)
    monitor = None if run.config is None else sentinel.attach_torchtitan(trainer, run.config)
    references: dict[int, dict[str, float]] = {}
    shares: dict[int, float] = {}
    rates: dict[int, float] = {}
    _observe(trainer, run, references, shares, rates)
    before = sequence_numbers()
    counter = HostWaits()
    error = ""
    try:
        if run.counts_syncs:
            with counter:
                trainer.train()
        else:
            trainer.train()
    except RuntimeError as raised:
        error = str(raised)
    rows_before_close = monitor.flush() if monitor is not None else False
    trainer.close()
    dist_utils.clip_grad_norm_ = _clip
    logging.getLogger().removeHandler(printed)
    digest = [zlib.crc32(whole(p.detach()).contiguous().numpy().tobytes()) for p in model.parameters()]
    own = {name for name in plain if name in trainer.__dict__}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return {
        "printed": printed.steps, "shares": shares, "references": references, "rates": rates, "weights": digest,
        "error": error, "flushed": rows_before_close, "collectives": sequence_numbers() - before,
        "syncs": counter.count, "left": sorted(own - {"forward_backward_step"}), "hooks": hooks, "step": trainer.step,
        "seen_by": type(monitor).__name__,
    }  # fmt: skip


_clip = dist_utils.clip_grad_norm_


def _observe(
    trainer: Any,
    run: Run,
    references: dict[int, dict[str, float]],
    shares: dict[int, float],
    rates: dict[int, float],
) -> None:
    """Note gradients and rates before clipping, and this rank's share of the loss; plant the run's fault."""
    (model,) = trainer.model_parts
    step_of, calls = trainer.forward_backward_step, [0, 0]

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        references[trainer.step] = {
            name: float(whole(p.grad).double().norm()) for name, p in model.named_parameters() if p.grad is not None
        }
        rates[trainer.step] = float(trainer.optimizers.optimizers[0].param_groups[0]["lr"])
        return _clip(parameters, *args, **kwargs)

    def forward_backward_step(**kwargs: Any) -> Any:
        calls[:] = [trainer.step, calls[1] + 1 if calls[0] == trainer.step else 1]
        if run.fail_step == trainer.step and calls[1] == 2:
            raise RuntimeError("planted: the second micro-step fails")
        if run.poison_step == trainer.step and calls[1] == 1:
            with torch.no_grad():
                getattr(model.lm_head.weight, "_local_tensor", model.lm_head.weight)[0, 0] = float("nan")
        loss = step_of(**kwargs)
        shares[trainer.step] = shares.get(trainer.step, 0.0) + float(getattr(loss, "_local_tensor", loss).detach())
        return loss

    dist_utils.clip_grad_norm_ = clip
    trainer.forward_backward_step = forward_backward_step


def _without_hooks(trainer: Any) -> None:
    """Run the model with every module hook out of sight, under the name that torchtitan gives a replayed graph."""
    original = trainer.fwd_bwd_fn
    (model,) = trainer.model_parts

    def run(*args: Any) -> Any:
        kept = [(m, m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
        own = {id(m): (_foreign(m._forward_hooks), _foreign(m._forward_pre_hooks)) for m, _, _ in kept}
        for module, _, _ in kept:
            module._forward_hooks, module._forward_pre_hooks = own[id(module)]
        try:
            return original(*args)
        finally:
            for module, after, before in kept:
                module._forward_hooks, module._forward_pre_hooks = after, before

    run.__module__ = "torchtitan.distributed.cudagraph"
    trainer.fwd_bwd_fn = run


def _foreign(hooks: Any) -> Any:
    kept = [(k, h) for k, h in hooks.items() if not type(getattr(h, "__self__", None)).__module__.startswith("sentinel")]
    return type(hooks)(kept)


def main() -> None:
    import torchtitan.trainer

    torch.set_num_threads(1)
    # It waits 2 s at the end of each training.
    torchtitan.trainer.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    init_logger()
    runs = [Run(**one) for one in json.loads(Path(sys.argv[1]).read_text())]
    results = {run.name: train_one(run) for run in runs}
    Path(f"{sys.argv[2]}.{os.environ['RANK']}").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
