"""Small healthy trainings of kinds that no threshold was chosen on: each a few seconds on one core, with real gradients.

A program is models, optimizers and one step; a step returns what its author would log. Nothing is ever wrong with one:
whatever the default pack says of it at a warning and above is false.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from healthy_models import GPT, LSTM, Images, Text, next_token
from torch import nn

Scalars = Mapping[str, float]


@dataclasses.dataclass
class Program:
    """One training."""

    models: Any
    """A module, or a dictionary of them by name, as `sentinel.attach` takes it."""
    optimizers: Any
    step: Callable[[int], Scalars]
    """Trains a step and returns what is logged of it."""
    kinds: tuple[str, ...] = ()
    """Kinds that are measured beside those of the run."""


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def update(loss: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float = 1.0) -> Scalars:
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return {"loss": loss.item(), "grad_norm": norm.item()}


class Points:
    """Points about ten centres, as many random directions apart, and labels of which a share is wrong."""

    def __init__(self, seed: int, width: int = 20, wrong: float = 0.0, spread: float = 1.0) -> None:
        self._rng = np.random.default_rng(seed)
        self._centres = 1.2 * self._rng.standard_normal((10, width))
        self._wrong, self._spread = wrong, spread

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        kind = self._rng.integers(0, 10, size)
        x = self._centres[kind] + self._spread * self._rng.standard_normal((size, self._centres.shape[1]))
        label = np.where(self._rng.random(size) < self._wrong, self._rng.integers(0, 10, size), kind)
        return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(label)


def label_noise(seed: int, num_steps: int, size: int = 16) -> Program:
    """Classification with a fifth of the labels wrong: the loss of a small batch has a long tail for ever."""
    data, model = Points(seed, wrong=0.2), mlp(20, 64, 64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(at: int) -> Scalars:
        x, y = data.batch(size)
        return update(F.cross_entropy(model(x), y), model, optimizer)

    return Program(model, optimizer, step)


def rare_errors(seed: int, num_steps: int) -> Program:
    """A classifier that is nearly always right and sure: the loss is what one sample in a hundred makes of it."""
    data, model = Points(seed, wrong=0.01, spread=0.5), mlp(20, 64, 64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(at: int) -> Scalars:
        x, y = data.batch(32)
        return update(F.cross_entropy(model(x), y), model, optimizer)

    return Program(model, optimizer, step)


def gan(seed: int, num_steps: int) -> Program:
    """A generator and a critic of points on eight blobs, each with an optimizer of its own; both are attached."""
    rng = np.random.default_rng(seed)
    models = {"G": mlp(8, 64, 64, 2), "D": mlp(2, 64, 64, 1, activation=lambda: nn.LeakyReLU(0.2))}
    optimizers = {name: torch.optim.Adam(one.parameters(), lr=1e-3, betas=(0.5, 0.99)) for name, one in models.items()}

    def step(at: int) -> Scalars:
        angle = rng.integers(0, 8, 64) * math.pi / 4
        real = np.stack([np.cos(angle), np.sin(angle)], 1) * 2 + 0.1 * rng.standard_normal((64, 2))
        fake = models["G"](torch.randn(64, 8))
        yes, no = models["D"](torch.from_numpy(real.astype(np.float32))), models["D"](fake.detach())
        of_d = F.softplus(-yes).mean() + F.softplus(no).mean()
        optimizers["D"].zero_grad()
        of_d.backward()
        optimizers["D"].step()
        of_g = F.softplus(-models["D"](fake)).mean()
        optimizers["G"].zero_grad()
        of_g.backward()
        optimizers["G"].step()
        return {"G/loss": of_g.item(), "D/loss": of_d.item()}

    return Program(models, optimizers, step)


class Walks:
    """Sixteen carts on a track: a push left or right moves one; it is paid near the middle, and ends at the edge."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.state = self._rng.uniform(-0.1, 0.1, (16, 2))

    def seen(self) -> torch.Tensor:
        return torch.from_numpy(self.state.astype(np.float32))

    def act(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        push = 0.1 * (2 * action - 1) + 0.05 * self._rng.standard_normal(16)
        self.state[:, 1] = 0.9 * self.state[:, 1] + push
        self.state[:, 0] += 0.3 * self.state[:, 1]
        over = np.abs(self.state[:, 0]) > 1.0
        reward = np.where(over, -5.0, 0.2 - np.abs(self.state[:, 0]))
        self.state[over] = self._rng.uniform(-0.1, 0.1, (int(over.sum()), 2))
        return reward, over


def rollout(world: Walks, actor: nn.Module, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return states, actions and discounted returns, [length, 16, ...]."""
    states, actions, rewards, ends = [], [], [], []
    for _ in range(length):
        state = world.seen()
        with torch.no_grad():
            action = torch.distributions.Categorical(logits=actor(state)).sample()
        reward, over = world.act(action.numpy())
        states.append(state)
        actions.append(action)
        rewards.append(reward)
        ends.append(over)
    total, returns = np.zeros(16), []
    for reward, over in zip(reversed(rewards), reversed(ends), strict=True):
        total = reward + 0.95 * np.where(over, 0.0, total)
        returns.append(total)
    return torch.stack(states), torch.stack(actions), torch.tensor(np.stack(returns[::-1]), dtype=torch.float32)


def reinforce(seed: int, num_steps: int) -> Program:
    """A policy gradient with normalised returns: the loss lies about zero and changes its sign."""
    world, actor = Walks(seed), mlp(2, 32, 2, activation=nn.Tanh)
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)

    def step(at: int) -> Scalars:
        states, actions, returns = rollout(world, actor, 16)
        better = (returns - returns.mean()) / (returns.std() + 1e-6)
        chosen = torch.distributions.Categorical(logits=actor(states)).log_prob(actions)
        return update(-(better * chosen).mean(), actor, optimizer)

    return Program(actor, optimizer, step)


def actor_critic(seed: int, num_steps: int) -> Program:
    """An actor and a critic with one optimizer: a policy loss about zero and a value loss with heavy tails."""
    world = Walks(seed)
    model = nn.ModuleDict({"actor": mlp(2, 32, 2, activation=nn.Tanh), "critic": mlp(2, 32, 1, activation=nn.Tanh)})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(at: int) -> Scalars:
        states, actions, returns = rollout(world, model["actor"], 8)
        value = model["critic"](states)[..., 0]
        better = (returns - value).detach()
        chosen = torch.distributions.Categorical(logits=model["actor"](states))
        of_policy = -(better * chosen.log_prob(actions)).mean() - 0.01 * chosen.entropy().mean()
        of_value = F.mse_loss(value, returns)
        found = update(of_policy + 0.5 * of_value, model, optimizer, 0.5)
        return {**found, "policy/loss": of_policy.item(), "value/loss": of_value.item()}

    return Program(model, optimizer, step)


def q_learning(seed: int, num_steps: int) -> Program:
    """Deep Q-learning from a replay memory; a target network is copied every 100 steps. The loss has heavy tails."""
    world, model, target = Walks(seed), mlp(2, 64, 64, 2), mlp(2, 64, 64, 2)
    target.load_state_dict(model.state_dict())
    optimizer, rng = torch.optim.Adam(model.parameters(), lr=1e-3), np.random.default_rng(seed)
    memory: deque[tuple[Any, ...]] = deque(maxlen=4000)

    def step(at: int) -> Scalars:
        while True:
            state = world.seen()
            best = model(state).argmax(-1).numpy()
            action = np.where(rng.random(16) < max(0.1, 1.0 - at / 200), rng.integers(0, 2, 16), best)
            reward, over = world.act(action)
            memory.extend(zip(state, action, reward, world.seen(), over, strict=True))
            if len(memory) >= 256:
                break
        drawn = [memory[i] for i in rng.integers(0, len(memory), 16)]
        states, after = torch.stack([one[0] for one in drawn]), torch.stack([one[3] for one in drawn])
        actions, rewards, ends = (torch.tensor(np.array([one[i] for one in drawn])) for i in (1, 2, 4))
        with torch.no_grad():
            goal = rewards.float() + 0.95 * target(after).max(-1).values * ~ends
        if at % 100 == 99:
            target.load_state_dict(model.state_dict())
        value = model(states).gather(1, actions[:, None])[:, 0]
        return update(F.mse_loss(value, goal), model, optimizer, 10.0)

    return Program(model, optimizer, step)


def vae(seed: int, num_steps: int) -> Program:
    """A variational autoencoder of small pictures whose weight of the divergence is raised over 300 steps."""
    data, width = Images(seed), 3 * 16 * 16
    model = nn.ModuleDict({"encoder": mlp(width, 64, 32), "decoder": mlp(16, 64, width)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(at: int) -> Scalars:
        x = data.batch(at, 0, 0, 16)[0].flatten(1)
        mean, log_var = model["encoder"](x).chunk(2, -1)
        made = model["decoder"](mean + (0.5 * log_var).exp() * torch.randn_like(mean))
        rebuilt = F.mse_loss(made, x, reduction="none").sum(-1).mean()
        apart = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(-1).mean()
        found = update(rebuilt + min(at / 300, 1.0) * apart, model, optimizer, 50.0)
        return {**found, "kl/loss": apart.item(), "reconstruction/loss": rebuilt.item()}

    return Program(model, optimizer, step)


def contrastive(seed: int, num_steps: int) -> Program:
    """Two noisy views of small batches, InfoNCE with a learned temperature: towards zero, with long tails."""
    data = Points(seed)
    model = nn.ModuleDict({"net": mlp(20, 64, 16)})
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(at: int) -> Scalars:
        x = data.batch(8)[0]
        one, two = (F.normalize(model["net"](x + 0.3 * torch.randn_like(x)), dim=-1) for _ in range(2))
        near = model.scale.exp() * one @ two.T
        goal = torch.arange(8)
        return update(0.5 * (F.cross_entropy(near, goal) + F.cross_entropy(near.T, goal)), model, optimizer)

    return Program(model, optimizer, step)


def _text(model: nn.Module, seed: int, num_steps: int, lr: float, sequence: int, **how: Any) -> Program:
    data, accumulate, size = Text(sequence, seed), how.get("accumulate", 1), how.get("size", 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    warmup, is_cosine = how.get("warmup", 50), how.get("is_cosine", True)

    def step(at: int) -> Scalars:
        share = at / num_steps
        rate = lr * min(1.0, (at + 1) / warmup) * (0.5 + 0.5 * math.cos(math.pi * share) if is_cosine else 1.0 - share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        total = 0.0
        for micro_step in range(accumulate):
            loss = next_token(model, data.batch(at, 0, micro_step, size)) / accumulate
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"loss": total, "grad_norm": norm.item(), "lr": rate}

    return Program(model, optimizer, step)


def lstm_text(seed: int, num_steps: int) -> Program:
    """A recurrent language model on bytes of source code."""
    return _text(LSTM(width=48, layers=1), seed, num_steps, 4e-3, 32)


def gpt_text(seed: int, num_steps: int) -> Program:
    """A tiny transformer on bytes of source code, warm-up and cosine to zero."""
    return _text(GPT(layers=2, width=32), seed, num_steps, 3e-3, 32)


def gpt_single(seed: int, num_steps: int) -> Program:
    """The same with batches of one sequence: ordinary text varies from batch to batch."""
    return _text(GPT(layers=2, width=32), seed, num_steps, 1e-3, 48, size=1)


def gpt_accumulated(seed: int, num_steps: int) -> Program:
    """The same with four micro-batches a step."""
    return _text(GPT(layers=1, width=32), seed, num_steps, 2e-3, 32, accumulate=4, size=4)


def mixture(seed: int, num_steps: int) -> Program:
    """A mixture of eight experts, two a token, whose router nobody probes."""
    return _text(GPT(layers=2, width=32, num_experts=8), seed, num_steps, 3e-3, 32, size=4)


def fine_tuning(seed: int, num_steps: int) -> Program:
    """A network that was trained already, on another task, with a rate that falls to zero."""
    data, model = Points(seed + 1000), mlp(20, 64, 64, 10)
    before = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(300):
        x, y = data.batch(64)
        before.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before.step()
    before.zero_grad()
    other, optimizer = Points(seed), torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(at: int) -> Scalars:
        optimizer.param_groups[0]["lr"] = 1e-3 * (1.0 - at / num_steps)
        x, y = other.batch(8)
        return update(F.cross_entropy(model(x), y), model, optimizer)

    return Program(model, optimizer, step)


def diffusion(seed: int, num_steps: int) -> Program:
    """A denoiser of points at random levels of noise: the loss of a batch is of the levels it drew."""
    data, model = Points(seed), mlp(21, 96, 96, 20, activation=nn.SiLU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(at: int) -> Scalars:
        x = data.batch(16)[0]
        level, noise = torch.rand(len(x), 1), torch.randn_like(x)
        noisy = (1 - level).sqrt() * x + level.sqrt() * noise
        weight = 1.0 / (level + 0.02)
        made = model(torch.cat([noisy, level], 1))
        return update((weight * (made - noise) ** 2).mean(), model, optimizer)

    return Program(model, optimizer, step)


def interpolation(seed: int, num_steps: int) -> Program:
    """A network that learns its 64 samples by heart: loss and gradients fall towards nothing by decades."""
    x, y = Points(seed).batch(64)
    model = mlp(20, 64, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rng = np.random.default_rng(seed)

    def step(at: int) -> Scalars:
        drawn = torch.from_numpy(rng.integers(0, 64, 16))
        return update(F.cross_entropy(model(x[drawn]), y[drawn]), model, optimizer, 5.0)

    return Program(model, optimizer, step)


def hinge(seed: int, num_steps: int) -> Program:
    """A triplet loss with a margin: exactly zero in ever more batches, and so are all gradients."""
    data, model = Points(seed, spread=0.6), mlp(20, 64, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(at: int) -> Scalars:
        x, y = data.batch(24)
        z = model(x)
        apart = torch.cdist(z, z)
        same = (y[:, None] == y[None]).float()
        far, near = (apart * same).amax(1), (apart + 1e3 * same).amin(1)
        return update(F.relu(far - near + 0.5).mean(), model, optimizer)

    return Program(model, optimizer, step)


def regression(seed: int, num_steps: int) -> Program:
    """Least squares with targets of heavy tails, a squared error of eight samples."""
    rng, model = np.random.default_rng(seed), mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(at: int) -> Scalars:
        x = rng.standard_normal((8, 8))
        y = x[:, :1] * x[:, 1:2] + 0.3 * rng.standard_t(3, (8, 1))
        wide, goal = (torch.from_numpy(one.astype(np.float32)) for one in (x, y))
        return update(F.mse_loss(model(wide), goal), model, optimizer, 10.0)

    return Program(model, optimizer, step)


def two_tasks(seed: int, num_steps: int) -> Program:
    """Every fifth batch is of another, harder task: the loss stands far higher there, for ever."""
    easy, hard, model = Points(seed, spread=0.6), Points(seed + 1, wrong=0.5, spread=2.0), mlp(20, 64, 64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(at: int) -> Scalars:
        x, y = (hard if at % 5 == 4 else easy).batch(32)
        return update(F.cross_entropy(model(x), y), model, optimizer)

    return Program(model, optimizer, step)


def detection_sum(seed: int, num_steps: int) -> Program:
    """A loss that is a sum over the objects of a picture, none in most: nought or large, drawn anew each step."""
    data, model, rng = Points(seed), mlp(20, 64, 10), np.random.default_rng(seed + 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(at: int) -> Scalars:
        x, y = data.batch(8)
        count = torch.from_numpy(rng.poisson(0.5 + 6.0 * (rng.random(8) < 0.1)).astype(np.float32))
        each = F.cross_entropy(model(x), y, reduction="none")
        return update((each * count).mean() + 0.05 * each.mean(), model, optimizer, 5.0)

    return Program(model, optimizer, step)


PROGRAMS: dict[str, Callable[[int, int], Program]] = {
    one.__name__.replace("_", "-"): one
    for one in (
        label_noise, rare_errors, gan, reinforce, actor_critic, q_learning, vae, contrastive, lstm_text, gpt_text,
        gpt_single, gpt_accumulated, mixture, fine_tuning, diffusion, interpolation, hinge, regression, two_tasks,
        detection_sum,
    )
}  # fmt: skip
