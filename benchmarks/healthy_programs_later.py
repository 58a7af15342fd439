"""Twelve more healthy trainings: committed before any of them was judged, and after rules had met `healthy_programs.py`.

What they have in common is that the run itself changes on purpose: its data, its lengths, its rate, its scale, its teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from healthy_models import GPT, LSTM, Experts, Images, Text, next_token
from healthy_programs import Points, Program, Scalars, Walks, mlp, rollout, update
from torch import nn


def curriculum(seed: int, num_steps: int) -> Program:
    """Classes join one by one, easy ones first, and noise is raised in four stages: the loss steps up at each stage."""
    data, model = Points(seed), mlp(20, 64, 64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(at: int) -> Scalars:
        stage = min(4 * at // num_steps, 3)
        x, y = data.batch(64)
        known = y < 4 + 2 * stage
        x = x[known] + 0.4 * stage * torch.randn_like(x[known])
        return update(F.cross_entropy(model(x), y[known]), model, optimizer)

    return Program(model, optimizer, step)


def length_warmup(seed: int, num_steps: int) -> Program:
    """A transformer whose sequences are doubled three times, with as many tokens a batch: shorter contexts first."""
    model = GPT(layers=2, width=32, sequence=128)
    texts = [Text(length, seed) for length in (16, 32, 64, 128)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step(at: int) -> Scalars:
        stage = min(6 * at // num_steps, 3)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (at + 1) / 40)
        batch = texts[stage].batch(at, 0, 0, 32 >> stage)
        return {**update(next_token(model, batch), model, optimizer), "lr": optimizer.param_groups[0]["lr"]}

    return Program(model, optimizer, step)


def dataset_boundary(seed: int, num_steps: int) -> Program:
    """A recurrent model reads source code, from half of the run on numbers written out: the data change for good."""
    text, model = Text(32, seed), LSTM(width=48, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = np.random.default_rng(seed)

    def step(at: int) -> Scalars:
        if at < num_steps // 2:
            batch = text.batch(at, 0, 0, 8)
        else:
            first = rng.integers(0, 10**6, 8)
            rows = [list(" ".join(str(one + i) for i in range(20)).encode()[:33]) for one in first]
            tokens = torch.tensor(rows)
            batch = tokens[:, :-1], tokens[:, 1:]
        return update(next_token(model, batch), model, optimizer)

    return Program(model, optimizer, step)


def two_towers(seed: int, num_steps: int) -> Program:
    """Pictures and their classes embedded by two networks, contrasted at a learned temperature in batches of 16."""
    data = Images(seed)
    model = nn.ModuleDict({"picture": mlp(768, 64, 16), "words": nn.Embedding(10, 16)})
    model.register_parameter("log_scale", nn.Parameter(torch.tensor(math.log(1 / 0.07))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)

    def step(at: int) -> Scalars:
        x, y = data.batch(at, 0, 0, 16)
        one, two = F.normalize(model["picture"](x.flatten(1)), dim=-1), F.normalize(model["words"](y), dim=-1)
        near = model.log_scale.clamp(max=math.log(100.0)).exp() * one @ two.T
        goal = torch.arange(16)
        loss = 0.5 * (F.cross_entropy(near, goal) + F.cross_entropy(near.T, goal))
        return {**update(loss, model, optimizer), "temperature": model.log_scale.exp().reciprocal().item()}

    return Program(model, optimizer, step)


def clipped_policy(seed: int, num_steps: int) -> Program:
    """PPO: each rollout is trained on for four steps; the policy loss lies about zero, the value loss has heavy tails."""
    world = Walks(seed)
    model = nn.ModuleDict({"actor": mlp(2, 32, 2, activation=nn.Tanh), "critic": mlp(2, 32, 1, activation=nn.Tanh)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)
    held: dict[str, Any] = {}

    def step(at: int) -> Scalars:
        if at % 4 == 0:
            states, actions, returns = rollout(world, model["actor"], 16)
            with torch.no_grad():
                before = torch.distributions.Categorical(logits=model["actor"](states)).log_prob(actions)
                better = returns - model["critic"](states)[..., 0]
            better = (better - better.mean()) / (better.std() + 1e-6)
            held.update(states=states, actions=actions, returns=returns, before=before, better=better)
        chosen = torch.distributions.Categorical(logits=model["actor"](held["states"]))
        ratio = (chosen.log_prob(held["actions"]) - held["before"]).exp()
        clipped = ratio.clamp(0.8, 1.2) * held["better"]
        of_policy = -torch.minimum(ratio * held["better"], clipped).mean()
        of_value = F.mse_loss(model["critic"](held["states"])[..., 0], held["returns"])
        entropy = chosen.entropy().mean()
        found = update(of_policy + 0.5 * of_value - 0.01 * entropy, model, optimizer, 0.5)
        parts = {"policy_loss": of_policy.item(), "value_loss": of_value.item(), "entropy": entropy.item()}
        return {**found, **parts}

    return Program(model, optimizer, step)


def warm_restarts(seed: int, num_steps: int) -> Program:
    """A small convolutional network under SGD with momentum whose cosine schedule restarts every quarter of the run."""
    data = Images(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    def step(at: int) -> Scalars:
        period = num_steps // 4
        rate = 0.05 * (1.0 + math.cos(math.pi * (at % period) / period))
        optimizer.param_groups[0]["lr"] = rate
        x, y = data.batch(at, 0, 0, 32)
        return {**update(F.cross_entropy(model(x), y), model, optimizer), "lr": rate}

    return Program(model, optimizer, step)


def smoothed_dropout(seed: int, num_steps: int) -> Program:
    """Smoothed labels, and a dropout that is raised from none to a half in the middle third of the run."""
    data, drop = Points(seed), nn.Dropout(0.0)
    model = nn.Sequential(nn.Linear(20, 96), nn.GELU(), drop, nn.Linear(96, 96), nn.GELU(), drop, nn.Linear(96, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(at: int) -> Scalars:
        drop.p = 0.5 * min(max(3.0 * at / num_steps - 1.0, 0.0), 1.0)
        x, y = data.batch(16)
        return update(F.cross_entropy(model(x), y, label_smoothing=0.1), model, optimizer)

    return Program(model, optimizer, step)


def balanced_router(seed: int, num_steps: int) -> Program:
    """A mixture of eight experts, two a token, whose loads an auxiliary loss keeps even; routers are probed."""
    model, text = GPT(layers=2, width=32, num_experts=8), Text(32, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    experts = [one for one in model.modules() if isinstance(one, Experts)]

    def step(at: int) -> Scalars:
        loss = F.cross_entropy(*_flat(model, text.batch(at, 0, 0, 8)))
        aux = torch.stack([one.balance for one in experts]).sum()
        found = update(loss + 0.01 * aux, model, optimizer)
        return {**found, "lm_loss": loss.item(), "load_balancing_loss": aux.item()}

    return Program(model, optimizer, step, kinds=("router",))


def _flat(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch[0]).flatten(0, 1), batch[1].flatten()


def scaled_half(seed: int, num_steps: int) -> Program:
    """Half precision: the loss is scaled, the scale doubles every 100 steps and is halved where gradients overflow."""
    data, model = Images(seed), mlp(768, 96, 96, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scale = {"value": 2.0**14, "since": 0.0}

    def step(at: int) -> Scalars:
        x, y = data.batch(at, 0, 0, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x.flatten(1)).float(), y)
        optimizer.zero_grad()
        (loss * scale["value"]).backward()
        used, size = scale["value"], 0.0
        for one in model.parameters():
            size = max(size, one.grad.abs().max().item())
            one.grad.div_(used)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if size > 65504.0:
            scale.update(value=used / 2, since=0.0)
            optimizer.zero_grad()
        else:
            optimizer.step()
            scale["since"] += 1
            if scale["since"] == 100:
                scale.update(value=used * 2, since=0.0)
        return {"loss": loss.item(), "grad_norm": norm.item(), "loss_scale": used}

    return Program(model, optimizer, step)


def self_distillation(seed: int, num_steps: int) -> Program:
    """A network follows a slow mean of itself over two views (BYOL): the loss falls, then rises as views get harder."""
    data = Points(seed)
    model, teacher = nn.ModuleDict({"net": mlp(20, 64, 16), "head": mlp(16, 32, 16)}), mlp(20, 64, 16)
    teacher.load_state_dict(model["net"].state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)

    def step(at: int) -> Scalars:
        x = data.batch(32)[0]
        one, two = (x + (0.3 + 0.5 * at / num_steps) * torch.randn_like(x) for _ in range(2))
        with torch.no_grad():
            goal = F.normalize(teacher(two), dim=-1)
        made = F.normalize(model["head"](model["net"](one)), dim=-1)
        found = update((2.0 - 2.0 * (made * goal).sum(-1)).mean(), model, optimizer)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model["net"].parameters(), strict=True):
                slow.lerp_(fast, 0.02)
        return found

    return Program(model, optimizer, step)


def rare_positives(seed: int, num_steps: int) -> Program:
    """Twenty yes-or-no questions, each yes once in fifty: small batches without any, and a few with several."""
    rng, model = np.random.default_rng(seed), mlp(16, 64, 20)
    asked = rng.standard_normal((16, 20)).astype(np.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(at: int) -> Scalars:
        x = rng.standard_normal((8, 16)).astype(np.float32)
        y = (x @ asked + 0.5 * rng.standard_normal((8, 20)) > 2.05 * 4.0).astype(np.float32)
        made = model(torch.from_numpy(x))
        return update(F.binary_cross_entropy_with_logits(made, torch.from_numpy(y)), model, optimizer)

    return Program(model, optimizer, step)


def evaluated(seed: int, num_steps: int) -> Program:
    """A classifier that overfits a little: its own loss falls for ever, that of an evaluation every 20 steps levels off."""
    data, model = Points(seed, wrong=0.05), mlp(20, 64, 64, 10)
    x, y = data.batch(512)
    unseen = data.batch(256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=1e-2)
    rng = np.random.default_rng(seed)

    def step(at: int) -> Scalars:
        drawn = torch.from_numpy(rng.integers(0, len(x), 32))
        found = dict(update(F.cross_entropy(model(x[drawn]), y[drawn]), model, optimizer))
        if at % 20 == 19:
            with torch.no_grad():
                found["eval/loss"] = F.cross_entropy(model(unseen[0]), unseen[1]).item()
        return found

    return Program(model, optimizer, step)


PROGRAMS: dict[str, Callable[[int, int], Program]] = {
    one.__name__.replace("_", "-"): one
    for one in (
        curriculum, length_warmup, dataset_boundary, two_towers, clipped_policy, warm_restarts, smoothed_dropout,
        balanced_router, scaled_half, self_distillation, rare_positives, evaluated,
    )
}  # fmt: skip
