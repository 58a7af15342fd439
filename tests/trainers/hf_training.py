"""A Hugging Face Trainer for tests, and what was said of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

from ..support.spools import ALL_KINDS, Said, spool_folders, whole_frames
from . import hf_models

EVERYTHING = {"kinds": ALL_KINDS}


def make(
    folder: Path,
    *callbacks: Any,
    model: nn.Module | None = None,
    kind: type[Trainer] = Trainer,
    examples: int = 16,
    **arguments: Any,
) -> Trainer:
    """A Trainer that logs every step and does nothing else that it is not told to."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, "seed": 7, "logging_nan_inf_filter": False,
    }  # fmt: skip
    data = hf_models.causal_data(examples)
    transformers.utils.logging.set_verbosity_error()
    return kind(
        model=hf_models.llama() if model is None else model,
        args=TrainingArguments(output_dir=str(folder / "out"), **{**settings, **arguments}),
        train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks),
    )  # fmt: skip


def logged(trainer: Trainer, name: str = "loss") -> dict[int, float]:
    """Step, as the Trainer prints it, to what it prints beside it."""
    return {line["step"]: line[name] for line in trainer.state.log_history if name in line}


def scalar(said: Said, name: str) -> dict[int, float]:
    return {end.step: end.scalars[name] for end in said.ends if name in end.scalars}


def incarnations(run: Path, rank: int = 0) -> list[Said]:
    """What each incarnation of a rank said, by attempt."""
    found: dict[int, Said] = {}
    for folder in spool_folders(run, rank):
        (attempt,) = {frame.header.attempt for frame in whole_frames(folder)}
        assert attempt not in found
        found[attempt] = Said(run, rank=99_999)
        found[attempt].read(folder)
    return [found[attempt] for attempt in sorted(found)]


def steps(run: Path) -> list[list[int]]:
    """The steps that each attempt ended."""
    return [[end.step for end in incarnation.ends] for incarnation in incarnations(run)]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
