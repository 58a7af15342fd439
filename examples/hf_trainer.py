"""Hugging Face Trainer with Sentinel: one line, a tiny random Llama, synthetic text.

sentinel run -- python examples/hf_trainer.py
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import sentinel

VOCABULARY, LENGTH = 128, 32


def counting(num: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards from anywhere: something to learn."""
    starts = torch.randint(0, VOCABULARY, (num, 1))
    tokens = (starts + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps; default 40")
    parser.add_argument("--output", default="hf_trainer_output", help="folder of the Trainer's checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    settings = TrainingArguments(
        output_dir=arguments.output, max_steps=arguments.steps, per_device_train_batch_size=4, learning_rate=3e-3,
        gradient_accumulation_steps=2, logging_steps=5, save_steps=20, eval_strategy="steps", eval_steps=20, report_to=[],
        use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    data = counting(512)
    trainer = Trainer(LlamaForCausalLM(config), settings, train_dataset=data, eval_dataset=data[:16])
    trainer.add_callback(sentinel.HuggingFaceCallback())
    trainer.train(resume_from_checkpoint=arguments.resume)


if __name__ == "__main__":
    main()
