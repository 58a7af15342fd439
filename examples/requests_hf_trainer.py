"""Hugging Face Trainer that takes up what it is asked for: a checkpoint, a pause. It cannot pass over batches, and says so.

sentinel run -- python examples/requests_hf_trainer.py, and beside it: sentinel request checkpoint
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import sentinel


class TakeRequests(TrainerCallback):
    """Asks before each step, on every rank. Added behind Sentinel's own callback."""

    def __init__(self, watched: sentinel.HuggingFaceCallback) -> None:
        self.watched = watched
        self.saving: list[Any] = []
        """Requests for a checkpoint that is not written yet."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take up what is asked for from this step on."""
        monitor = self.watched.monitor
        for request in monitor.requests():
            if request.action == "checkpoint":
                control.should_save = True  # The Trainer saves on all ranks, behind this step.
                self.saving.append(request)
            elif request.action == "pause":
                while monitor.is_open(request):
                    time.sleep(0.1)
                monitor.answer(request)
            else:
                monitor.answer(request, is_done=False, why="the Trainer passes over no batches")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say that the checkpoint is there."""
        for request in self.saving:
            self.watched.monitor.answer(request)
        self.saving.clear()


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    tokens = (torch.randint(0, 128, (512, 1)) + torch.arange(32)) % 128
    settings = TrainingArguments(
        output_dir="hf_trainer_output", max_steps=2000, per_device_train_batch_size=4, save_strategy="no", report_to=[],
        use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        LlamaForCausalLM(config), settings, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]
    )
    watched = sentinel.HuggingFaceCallback()
    trainer.add_callback(watched)
    trainer.add_callback(TakeRequests(watched))
    trainer.train()


if __name__ == "__main__":
    main()
