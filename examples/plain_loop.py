"""The smallest real use: a plain PyTorch loop, one process, the two lines.

python examples/plain_loop.py && sentinel serve sentinel_runs    # or: sentinel run -- python examples/plain_loop.py
"""

from __future__ import annotations

import torch
from torch import nn

import sentinel


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    direction = torch.randn(16, 1)

    monitor = sentinel.attach(model, optimizer)
    for step in range(300):
        inputs = torch.randn(128, 16)
        loss = nn.functional.mse_loss(model(inputs), torch.sin(inputs @ direction))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.log(loss=loss, lr=3e-3)
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
