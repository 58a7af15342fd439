"""A tiny OLMo-core run: built for the tests in their own process, and run as ranks over gloo, without and with Sentinel.

usage: olmo_core_run.py FOLDER RANK WORLD PORT LAYOUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import olmo_core.distributed.parallel as meshes
import torch
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup
from olmo_core.train import Duration, TrainerConfig
from olmo_core.train.callbacks import Callback
from olmo_core.train.train_module import TransformerTrainModuleConfig

import sentinel

EVERYTHING = {"kinds": ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]}
CPU = torch.device("cpu")
NUM_STEPS = 4


class Prints(Callback):
    """Keeps what the trainer hands to its loggers: step -> metrics."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.seen.setdefault(step, {}).update(metrics)


def build(
    folder: Path,
    *callbacks: Callback,
    steps: int = NUM_STEPS,
    module: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> Any:
    """Return a trainer of a 2-layer model on random tokens: 4 instances of 16 tokens a step, 2 micro-batches."""
    folder.mkdir(parents=True, exist_ok=True)
    # All ranks write the same bytes.
    np.random.default_rng(0).integers(2, 64, size=1600).astype(np.uint16).tofile(folder / "tokens.npy")
    tokenizer = TokenizerConfig(vocab_size=64, eos_token_id=1, pad_token_id=0)
    dataset = NumpyFSLDatasetConfig(
        tokenizer=tokenizer, paths=[str(folder / "tokens.npy")], sequence_length=16, work_dir=str(folder / "work")
    ).build()
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 2, "hidden_size_multiple_of": 16}
    made = TransformerConfig.llama_like(**{**shape, **(model or {})}).build(init_device="cpu")
    defaults: dict[str, Any] = {
        "rank_microbatch_size": 32, "max_sequence_length": 16, "optim": AdamWConfig(lr=1e-2), "max_grad_norm": 0.5,
        "scheduler": CosWithWarmup(warmup_steps=2),
    }  # fmt: skip
    train_module = TransformerTrainModuleConfig(**{**defaults, **(module or {})}).build(made, device=CPU)
    group = train_module.dp_process_group
    loader = NumpyDataLoaderConfig(global_batch_size=64, seed=0).build(dataset, dp_process_group=group)
    settings: dict[str, Any] = {"max_duration": Duration.steps(steps), "metrics_collect_interval": 1, "no_checkpoints": True}
    config = TrainerConfig(save_folder=str(folder / "save"), **{**settings, **(trainer or {})})
    for at, callback in enumerate(callbacks):
        config = config.with_callback(f"{type(callback).__name__}-{at}", callback)
    built = config.build(train_module, loader)
    built.add_callback("prints", Prints())
    return built


def printed(trainer: Any) -> dict[int, dict[str, float]]:
    """Return what a trainer of `build` handed to its loggers beside each step's loss."""
    seen: dict[int, dict[str, float]] = trainer.callbacks["prints"].seen
    return {step: metrics for step, metrics in seen.items() if "train/CE loss" in metrics}


def parallel(layout: str) -> dict[str, Any]:
    """Return what the train module takes for a layout of 2 ranks."""
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.train.train_module.transformer import config as of

    if layout == "one":
        return {}
    half = {"rank_microbatch_size": 16}
    if layout in ("ddp", "fsdp", "hsdp"):
        return {"dp_config": of.TransformerDataParallelConfig(name=DataParallelType(layout)), **half}
    if layout == "tp":
        one = of.TransformerDataParallelConfig(name=DataParallelType.fsdp, num_replicas=None)
        return {"dp_config": one, "tp_config": of.TransformerTensorParallelConfig(degree=2)}
    raise ValueError(layout)


def main() -> None:
    folder, rank, world, port, layout = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world), NUM_NODES="1", OLMO_SHARED_FS="1", FS_LOCAL_RANK=str(rank),
    )  # fmt: skip
    torch.set_num_threads(1)
    if world > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", rank=rank, world_size=world)
    for name, callbacks in (("plain", []), ("watched", [sentinel.OlmoCoreCallback(EVERYTHING)])):
        meshes._WORLD_MESH = None  # A process has one, and trains twice here.
        trainer = build(folder / name, *callbacks, module=parallel(layout))
        trainer.fit()
        weights = {
            param_name: getattr(param, "_local_tensor", param).detach().double().flatten().tolist()
            for param_name, param in trainer.train_module.model.named_parameters()
        }
        result = {"seen": {step: seen["train/CE loss"] for step, seen in printed(trainer).items()}, "weights": weights}
        result["norms"] = {step: seen["optim/total grad norm"] for step, seen in printed(trainer).items()}
        (folder / name / f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
