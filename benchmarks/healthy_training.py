"""Realistic recipes for small models, and the loop that trains them with every probe on: recordings to judge again.

A recipe has what healthy runs have: warm-up, a schedule, clipping, dropout, weight decay, gradient accumulation that grows
half-way, mixed precision with a loss scale, and a crash with repeated steps.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from healthy_models import ARCHITECTURES, Batch
from torch import nn

import sentinel
from sentinel.monitor_config import MEASURED_LABELS

DEAR = {"weight_spectrum": 20, "precision": 10, "saturation": 5, "channel": 5, "grad_momentum_alignment": 5}
"""Probe -> steps between two looks of it; all others look at every step."""
COMM = "comm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one model is trained."""

    architecture: str
    optimizer: str = "adamw"
    lr: float = 3e-3
    schedule: str = "cosine"
    """`cosine` to a tenth, `wsd`: stable, then linearly down in the last fifth, `steps`: a tenth at 1/2 and 3/4, `one`: one
    cycle up and down, `constant`."""
    warmup: int = 100
    clip: float | None = 1.0
    size: int = 8
    """Samples of a micro-batch."""
    micro_batches: int = 1
    grows_at: float = 0.5
    """Share of the run after which a step has twice the micro-batches; 1: never."""
    precision: str = "fp32"
    """`fp16` (with a loss scale), `bf16`: autocast."""
    crash_at: float = 0.6
    """Share of the run at which it crashes and resumes from its newest checkpoint; 1: never."""
    repeated_steps: int = 30
    """Steps that are trained again then."""
    per_micro_step: bool = False

    def learning_rate(self, step: int, num_steps: int) -> float:
        """Return the rate of a step."""
        at, warm = step / max(num_steps, 1), min(1.0, (step + 1) / self.warmup)
        if self.schedule == "cosine":
            return self.lr * warm * (0.55 + 0.45 * math.cos(math.pi * min(at, 1.0)))
        if self.schedule == "wsd":
            return self.lr * warm * min(1.0, max(5.0 * (1.0 - at), 0.02))
        if self.schedule == "steps":
            return self.lr * warm * (0.01 if at >= 0.75 else 0.1 if at >= 0.5 else 1.0)
        if self.schedule == "one":
            return self.lr * max(0.02, at / 0.3 if at < 0.3 else 1.0 - (at - 0.3) / 0.7)
        return self.lr * warm

    def num_micro_batches(self, step: int, num_steps: int) -> int:
        """Return the micro-batches of a step."""
        return self.micro_batches * (2 if step >= self.grows_at * num_steps else 1)


RECIPES = {
    "gpt": Recipe(architecture="gpt", micro_batches=2),
    "moe": Recipe(architecture="moe", optimizer="muon", lr=2e-3, schedule="wsd", size=12, per_micro_step=True),
    "convnet": Recipe(
        architecture="convnet", optimizer="sgd", lr=0.05, schedule="steps", warmup=40, clip=None, size=32,
    ),
    "vit": Recipe(architecture="vit", optimizer="lion", lr=3e-4, schedule="one", size=24, precision="bf16"),
    "lstm": Recipe(architecture="lstm", optimizer="adam", lr=2e-3, schedule="steps", warmup=10, clip=0.25, size=16),
    "fp16": Recipe(architecture="gpt-plain", lr=2e-3, precision="fp16", size=8, micro_batches=2),
    "tiny": Recipe(architecture="tiny", lr=2e-3, warmup=20, size=16),
    "diffusion": Recipe(architecture="diffusion", lr=1e-3, schedule="constant", warmup=50, size=16),
}  # fmt: skip


class Lion(torch.optim.Optimizer):
    """Signs of interpolated momentum (Chen et al. 2023, algorithm 2)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((average * first + p.grad * (1 - first)).sign_(), alpha=-group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second)


def make_optimizers(kind: str, model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model; weights of one dimension do not decay."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if kind == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4)]
    if kind == "adam":
        return [torch.optim.Adam(model.parameters(), lr=lr)]
    if kind == "lion":
        return [Lion(groups, lr=lr)]
    if kind == "muon":
        hidden = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name and "gate." not in name]
        inner = {id(p) for p in hidden}
        rest = [p for p in model.parameters() if id(p) not in inner]
        return [
            torch.optim.Muon(hidden, lr=lr, momentum=0.95, adjust_lr_fn="match_rms_adamw", weight_decay=0.1),
            torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=False),
        ]
    return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), foreach=False)]


class Fault:
    """What may be done to a training from the step on at which it is planted; a fault overrides what it needs.

    since: steps since then, 0 in the step itself.
    """

    def begin(self, training: Training, since: int) -> None:
        """Before the forward."""

    def batch(self, training: Training, batch: Batch, since: int) -> Batch:
        """Return the data of a micro-batch."""
        return batch

    def rate(self, rate: float, since: int) -> float:
        """Return the learning rate."""
        return rate

    def after_backward(self, training: Training, since: int) -> None:
        """After the backward, before gradients are averaged or clipped."""

    def end(self, training: Training, since: int) -> None:
        """After the optimizers."""

    def remove(self, training: Training) -> None:
        """Take hooks off again."""


class Training:
    """One rank's model in training. Deterministic in its seed and rank; on several ranks data-parallel over gloo."""

    def __init__(self, recipe: Recipe, num_steps: int, seed: int = 0, rank: int = 0) -> None:
        torch.manual_seed(seed)
        self.recipe, self.num_steps, self.seed, self.rank = recipe, num_steps, seed, rank
        kind = ARCHITECTURES[recipe.architecture]
        self.model, self.data, self._loss = kind.model(), kind.data(seed), kind.loss
        self.optimizers = make_optimizers(recipe.optimizer, self.model, recipe.lr)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=100, enabled=recipe.precision == "fp16")
        self._dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(recipe.precision)
        self.monitor: Any = None
        self.num_ended = 0
        torch.manual_seed(1000 * seed + rank)

    def attach(self, folder: Path, run: str, first_step: int = 0, **config: Any) -> None:
        """Watch it with every probe there is."""
        kinds = [kind for kind in MEASURED_LABELS if kind not in (*DEAR, COMM)]
        probes: dict[str, Any] = {kind: {"step_interval": interval} for kind, interval in DEAR.items()}
        if dist.is_initialized():
            probes[COMM] = {}
        self.monitor = sentinel.attach(
            self.model, self.optimizers,
            {
                "directory": str(folder), "run": run, "kinds": kinds, "probes": probes,
                "per_micro_step": self.recipe.per_micro_step, "spool": {"max_bytes": 2**36}, **config,
            },
            first_step=first_step,
        )  # fmt: skip

    def detach(self) -> None:
        """Watch it no longer."""
        self.monitor.detach()

    def step(self, step: int, fault: Fault | None = None, since: int = -1) -> float:
        """Train one step and return its loss. fault: what strikes, `since` steps after it was planted."""
        recipe, fault = self.recipe, fault if fault is not None and since >= 0 else Fault()
        rate = fault.rate(recipe.learning_rate(step, self.num_steps), since)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        fault.begin(self, since)
        total, count = 0.0, recipe.num_micro_batches(step, self.num_steps)
        for micro_step in range(count):
            batch = fault.batch(self, self.data.batch(step, self.rank, micro_step, recipe.size), since)
            with torch.autocast("cpu", self._dtype or torch.bfloat16, enabled=self._dtype is not None):
                loss = self._loss(self.model, batch)
            self.scaler.scale(loss / count).backward()
            total += loss.item() / count
        fault.after_backward(self, since)
        self._average_gradients()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        fault.end(self, since)
        if self.monitor is not None:
            self.monitor.log(loss=total)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.num_ended += 1
        return total

    def _average_gradients(self) -> None:
        if not dist.is_initialized():
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def checkpoint(self) -> dict[str, Any]:
        """Return a copy of everything that a resumed run reads."""
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizers": [one.state_dict() for one in self.optimizers],
                "scaler": self.scaler.state_dict(),
                "random": torch.get_rng_state(),
            }
        )

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on where `saved` was taken."""
        saved = copy.deepcopy(saved)
        self.model.load_state_dict(saved["model"])
        for one, state in zip(self.optimizers, saved["optimizers"], strict=True):
            one.load_state_dict(state)
        self.scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["random"])


def record(
    folder: Path,
    run: str,
    recipe: Recipe,
    num_steps: int,
    seed: int,
    fault: Callable[[], Fault],
    fault_steps: int = 12,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train `num_steps` healthy steps, a crash among them, then `fault_steps` with the fault; return what is true of it."""
    training = Training(recipe, num_steps, seed)
    training.attach(folder, run)
    crash = int(recipe.crash_at * num_steps)
    save_at = max(1, crash - min(recipe.repeated_steps, num_steps // 10))
    saved: dict[str, Any] = {}
    losses: list[float] = []
    for step in itertools.chain(range(crash), _resumed(training, folder, run, save_at, saved), range(save_at, num_steps)):
        if step < 0:
            continue
        if step == save_at and not saved:
            saved.update(training.checkpoint())
        losses.append(training.step(step))
        if step % 200 == 0:
            tell(f"{run}: step {step} of {num_steps}, loss {losses[-1]:.3f}")
    strike = fault()
    for since in range(fault_steps):
        losses.append(training.step(num_steps + since, strike, since))
    strike.remove(training)
    training.detach()
    return {
        "run": run, "steps_ended": training.num_ended, "healthy_until": num_steps, "first_loss": losses[0],
        "last_healthy_loss": losses[-fault_steps - 1], "recipe": dataclasses.asdict(recipe), "seed": seed,
    }  # fmt: skip


def _resumed(training: Training, folder: Path, run: str, step: int, saved: dict[str, Any]) -> Iterable[int]:
    """Crash and resume, when the chain of steps comes to here."""
    training.detach()
    training.restore(saved)
    training.attach(folder, run, first_step=step)
    yield -1
