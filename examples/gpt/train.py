"""Train the small GPT on 2 pipeline stages x 2 data-parallel ranks, watched by Sentinel.

python examples/gpt/launch.py -n 4 -- examples/gpt/train.py --steps 100
torchrun --nproc-per-node 4 examples/gpt/train.py --steps 100       # the same
sentinel run -- torchrun --nproc-per-node 4 examples/gpt/train.py   # with the daemon beside it
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from data import StandardLibrary
from faults import Faults, read_faults
from model import GPTConfig
from parallel import SCHEDULES, Layout, local

import sentinel


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    dist.init_process_group("gloo")
    layout = Layout.of(options.pp, options.tp)
    config = GPTConfig(layers=options.layers, width=options.width, sequence=options.sequence, seed=options.seed)
    chunks = layout.build_chunks(config, 2 if options.schedule == "interleaved1f1b" else 1)
    schedule = layout.build_schedule(options.schedule, chunks, options.micro_batches)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    data = StandardLibrary(options.sequence, options.micro_batch, options.seed)
    faults = Faults(read_faults(options.faults) if options.faults else [], layout.dp_rank, layout.tp_rank)
    faults.plant(chunks)
    is_first, is_last = layout.pp_rank == 0, layout.pp_rank == layout.pp - 1
    truth = Truth(options.truth, [name for chunk in chunks for name, _ in chunk.named_parameters()])

    if options.attach_late_s and dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(options.attach_late_s)
    if not options.no_sentinel:
        monitor = sentinel.attach(chunks, optimizer, options.sentinel_config)

    for step in range(options.steps):
        began = time.perf_counter()
        lr = learning_rate(step, options)
        for group in optimizer.param_groups:
            group["lr"] = lr
        faults.begin_step(step)
        batch = torch.cat(
            [
                data.micro_step(step, layout.dp_rank, n, is_corrupted=faults.is_corrupted(step, n))
                for n in range(options.micro_batches)
            ]
        )
        losses: list[torch.Tensor] = []
        inputs = (batch[:, :-1],) if is_first else ()
        if is_last:
            schedule.step(*inputs, target=batch[:, 1:], losses=losses)
        else:
            schedule.step(*inputs)

        layout.average_gradients(parameters)
        norm = layout.gradient_norm(parameters)
        truth.note_gradients(parameters)
        # Every rank has the same norm, so all skip a bad step or none does.
        is_skipped = not math.isfinite(norm.item())
        if not is_skipped:
            for alike in (sharded(parameters), whole(parameters)):
                torch.nn.utils.clip_grads_with_norm_(alike, options.clip, norm)
            optimizer.step()

        loss = torch.stack(losses).mean().detach() if is_last else None
        if not options.no_sentinel:
            if is_last:
                monitor.log(loss=loss, lr=lr)
            else:
                monitor.log(lr=lr)
        optimizer.zero_grad()

        truth.note_step(loss, norm, is_skipped)
        if is_last and layout.dp_rank == 0 and layout.tp_rank == 0 and (step % options.print_every == 0 or is_skipped):
            said = "  skipped: not finite" if is_skipped else ""
            print(f"step {step:5d}  loss {float(loss):7.4f}  grad norm {float(norm):8.3f}  lr {lr:.1e}{said}", flush=True)  # type: ignore[arg-type]
        if options.step_time:
            time.sleep(max(0.0, options.step_time - (time.perf_counter() - began)))

    if not options.no_sentinel:
        monitor.detach()
    truth.write([parameter for chunk in chunks for parameter in chunk.parameters()])
    dist.barrier()
    dist.destroy_process_group()


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Warm up over 20 steps, then stay, or fall along a cosine to a tenth at the last step."""
    peak = options.lr * min(1.0, (step + 1) / 20)
    if options.lr_schedule == "constant":
        return peak
    return peak * (0.55 + 0.45 * math.cos(math.pi * step / max(1, options.steps)))


def sharded(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters that tensor parallelism cut; clipping does not take them together with whole ones."""
    return [p for p in parameters if isinstance(p, torch.distributed.tensor.DTensor)]


def whole(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters that each rank of a tensor-parallel group holds in full."""
    return [p for p in parameters if not isinstance(p, torch.distributed.tensor.DTensor)]


class Truth:
    """What really happened, for tests: losses, norms and unclipped gradients of each step, weights of the last."""

    def __init__(self, folder: str | None, names: list[str]) -> None:
        self._path = None if folder is None else Path(folder) / f"rank{dist.get_rank()}"
        self._names = names
        self._losses: list[str] = []
        self._norms: list[str] = []
        self._skipped: list[bool] = []
        self._gradients: list[np.ndarray] = []

    def note_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Keep norm and sum of each reduced gradient, float64, before anything clips them."""
        if self._path is not None:
            gradients = [local(p.grad).double() for p in parameters]
            self._gradients.append(np.array([[float(g.norm()), float(g.sum())] for g in gradients]))

    def note_step(self, loss: torch.Tensor | None, norm: torch.Tensor, is_skipped: bool) -> None:
        """Keep loss and norm to the last bit."""
        if self._path is not None:
            self._losses.append("" if loss is None else float(loss).hex())
            self._norms.append(float(norm).hex())
            self._skipped.append(is_skipped)

    def write(self, parameters: list[torch.nn.Parameter]) -> None:
        """Write `rank<R>.json` and `rank<R>.npz`."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        weights = [hashlib.sha256(local(p.detach()).numpy().tobytes()).hexdigest() for p in parameters]
        reported = {"names": self._names, "losses": self._losses, "norms": self._norms, "skipped": self._skipped}
        self._path.with_suffix(".json").write_text(json.dumps({**reported, "weights": weights}))
        # [steps, parameters, (norm, sum)]
        np.savez(self._path.with_suffix(".npz"), gradients=np.stack(self._gradients))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on the sources of Python's standard library.")
    add = parser.add_argument
    add("--steps", type=int, default=200, help="optimizer steps; default 200")
    add("--pp", type=int, default=2, help="pipeline stages; default 2")
    add("--tp", type=int, default=1, help="tensor-parallel ranks; the rest of the world is data-parallel; default 1")
    add("--schedule", choices=sorted(SCHEDULES), default="1f1b", help="pipeline schedule; default 1f1b")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=64)
    add("--sequence", type=int, default=64, help="tokens (bytes) in a sequence; default 64")
    add("--micro-batches", type=int, default=4, help="micro-batches a step and replica; default 4")
    add("--micro-batch", type=int, default=4, help="sequences in a micro-batch; default 4")
    add("--lr", type=float, default=1e-3)
    add("--lr-schedule", choices=("constant", "cosine"), default="constant")
    add("--clip", type=float, default=1.0, help="largest global gradient norm; default 1")
    add("--seed", type=int, default=0)
    add("--print-every", type=int, default=10, help="print every so many steps; default 10")
    add("--step-time", type=float, default=0.0, help="seconds that a step takes at least; 0: as fast as it goes")
    add("--sentinel-config", help="YAML file for sentinel.attach; default: none")
    add("--no-sentinel", action="store_true", help="train without Sentinel")
    add("--faults", help="JSON file of faults to plant (faults.py)")
    add("--truth", help="folder to write losses, gradient norms and weights into, for tests")
    add("--attach-late-s", type=float, default=0.0, help="seconds that the last rank waits before it attaches")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
