"""An Accelerate loop with Sentinel: one line in the place of `attach`, a tiny random GPT-2, synthetic text.

sentinel run -- python examples/accelerate_loop.py
sentinel run -- accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import sentinel

VOCABULARY, LENGTH = 128, 32


def counting(num: int) -> list[torch.Tensor]:
    """Sequences that count upwards from anywhere: something to learn."""
    starts = torch.randint(0, VOCABULARY, (num, 1))
    return list((starts + torch.arange(LENGTH)) % VOCABULARY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps; default 60")
    parser.add_argument("--state", type=Path, help="folder to save the state in, and to go on from; default: none")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=3, n_head=4)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=arguments.steps)
    loader = DataLoader(counting(1024), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    monitor = sentinel.attach_accelerate(accelerator, model, optimizer)
    step = 0
    if arguments.state and arguments.state.exists():
        accelerator.load_state(str(arguments.state))
        step = monitor.state_dict().get("step", 0)
    end = step + arguments.steps
    while step < end:
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if step % 10 == 0:
                    accelerator.print(f"step {step:4d}  loss {loss.item():.4f}")
                step += 1
            if step == end:
                break
    if arguments.state:
        accelerator.save_state(str(arguments.state))
    accelerator.end_training()


if __name__ == "__main__":
    main()
