"""OLMo-core: one more callback in the trainer's config, and nothing else changes.

pip install ai2-olmo-core
sentinel run -- python examples/olmo_core_train.py                    # one process
sentinel run -- torchrun --nproc-per-node 2 examples/olmo_core_train.py    # FSDP
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import CosWithWarmup, SkipStepAdamWConfig
from olmo_core.train import Duration, TrainerConfig
from olmo_core.train.train_module import TransformerTrainModuleConfig
from olmo_core.train.train_module.transformer.config import TransformerDataParallelConfig

import sentinel

CPU = torch.device("cpu")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # A model this small is slower on more.
    is_parallel = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_parallel:
        os.environ["FS_LOCAL_RANK"] = os.environ["RANK"]  # One disk for all.
        dist.init_process_group("gloo")
    folder = Path(tempfile.gettempdir()) / f"olmo-example-{os.getppid() if is_parallel else os.getpid()}"
    folder.mkdir(exist_ok=True)
    # The same bytes on every rank: counting modulo 61, which is soon learned.
    (np.arange(8000) % 61 + 2).astype(np.uint16).tofile(folder / "tokens.npy")
    dataset = NumpyFSLDatasetConfig(
        tokenizer=TokenizerConfig(vocab_size=64, eos_token_id=1, pad_token_id=0),
        paths=[str(folder / "tokens.npy")], sequence_length=32, work_dir=str(folder / "work"),
    ).build()  # fmt: skip

    torch.manual_seed(0)
    model = TransformerConfig.llama_like(vocab_size=64, d_model=32, n_layers=3, n_heads=2, hidden_size_multiple_of=32)
    train_module = TransformerTrainModuleConfig(
        rank_microbatch_size=128, max_sequence_length=32, optim=SkipStepAdamWConfig(lr=1e-2), max_grad_norm=1.0,
        scheduler=CosWithWarmup(warmup_steps=5),
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp) if is_parallel else None,
    ).build(model.build(init_device="cpu"), device=CPU)  # fmt: skip
    loader = NumpyDataLoaderConfig(global_batch_size=512, seed=0).build(
        dataset, dp_process_group=train_module.dp_process_group
    )
    config = TrainerConfig(save_folder=str(folder / "save"), max_duration=Duration.steps(30), no_checkpoints=True)
    config = config.with_callback("sentinel", sentinel.OlmoCoreCallback())
    config.build(train_module, loader).fit()
    if is_parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
