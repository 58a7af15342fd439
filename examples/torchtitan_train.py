"""torchtitan's own Trainer on a tiny random Llama 3: the two lines, right after the Trainer is built.

sentinel run -- python examples/torchtitan_train.py
sentinel run -- torchrun --nproc-per-node 2 examples/torchtitan_train.py --tp 2
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torchtitan_cpu  # noqa: F401  # torchtitan on a machine without an accelerator
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, Llama3TransformerBlock, parallelize_llama
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

import sentinel

VOCABULARY = 64
DIM = 32
SEQUENCE = 16


class Bytes(BaseTokenizer):
    """A tokenizer that nobody asks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Counting(BaseDataLoader):
    """Sequences that count upwards from a random token: something that a tiny model can learn."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        num_batches: int = 2**31
        infinite: bool = True

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **kwargs: Any
    ) -> None:
        self._shape = (local_batch_size, 1)
        self._seq_len = seq_len
        self._rank, self._world = dp_rank, dp_world_size
        self._num_batches = config.num_batches
        self._at = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while self._at < self._num_batches:
            generator = torch.Generator().manual_seed(self._at * self._world + self._rank)
            self._at += 1
            first = torch.randint(0, VOCABULARY, self._shape, generator=generator)
            tokens = (first + torch.arange(self._seq_len + 1)) % VOCABULARY
            yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._at = state_dict["at"]


def tiny_llama(num_layers: int = 2) -> ModelSpec:
    """Return Llama 3 with 4 heads of 8, for any attention that runs here."""
    normal = {"weight": torch.nn.init.normal_, "bias": torch.nn.init.zeros_}
    small = {"weight": lambda w: torch.nn.init.normal_(w, std=0.05), "bias": torch.nn.init.zeros_}
    ones = {"weight": torch.nn.init.ones_}
    attention = make_gqa_config(
        dim=DIM, n_heads=4, wqkv_param_init=small, wo_param_init=small,
        inner_attention=ScaledDotProductAttention.Config(),
        rope=ComplexRoPE.Config(dim=DIM // 4, max_seq_len=4 * SEQUENCE, theta=10000.0),
    )  # fmt: skip
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=RMSNorm.Config(normalized_shape=DIM, param_init=ones),
            ffn_norm=RMSNorm.Config(normalized_shape=DIM, param_init=ones),
            attention=dataclasses.replace(attention),
            feed_forward=make_ffn_config(dim=DIM, hidden_dim=2 * DIM, w1_param_init=small, w2w3_param_init=small),
        )
        for _ in range(num_layers)
    ]
    model = Llama3Model.Config(
        dim=DIM, vocab_size=VOCABULARY, layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=normal),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=ones),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=small),
    )  # fmt: skip
    return ModelSpec(
        name="llama3", flavor="tiny", model=model, parallelize_fn=parallelize_llama,
        pipelining_fn=None, post_optimizer_build_fn=None, state_dict_adapter=None,
    )  # fmt: skip


def config(options: argparse.Namespace) -> Trainer.Config:
    """Return torchtitan's own configuration."""
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    recompute = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    return Trainer.Config(
        model_spec=tiny_llama(),
        loss=loss if options.chunks == 0 else ChunkedLossWrapper.Config(loss_fn=loss, num_chunks=options.chunks),
        tokenizer=Bytes.Config(),
        dataloader=Counting.Config(num_batches=options.batches),
        optimizer=default_adamw(lr=options.lr, implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=4, global_batch_size=options.global_batch, seq_len=SEQUENCE, steps=options.steps,
            max_norm=options.max_norm, mixed_precision_param="float32", disable_cuda_graphs=True,
        ),
        metrics=MetricsProcessor.Config(log_freq=options.log_freq, disable_color_printing=True),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=options.tp, data_parallel_replicate_degree=options.replicas,
            enable_sequence_parallel=not options.no_sp, spmd_backend=options.spmd,
        ),
        activation_checkpoint=recompute[options.recompute],
        checkpoint=CheckpointManager.Config(
            enable=options.checkpoint > 0, interval=options.checkpoint or 1, last_save_model_only=False,
        ),
        validator=Validator.Config(
            enable=options.validate > 0, freq=options.validate or 1, steps=1,
            dataloader=Counting.Config(num_batches=1),
        ),
        debug=DebugConfig(seed=7),
        dump_folder=options.output,
    )  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--global-batch", type=int, default=-1, help="more than 4 a rank: gradient accumulation")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1, help="replicas of the sharded model; the other ranks shard it")
    parser.add_argument("--no-sp", action="store_true", help="tensor parallelism without sequence parallelism")
    parser.add_argument("--spmd", default="spmd_types", help="partial_dtensor, full_dtensor or spmd_types")
    parser.add_argument("--recompute", default="none", choices=("none", "full", "selective"))
    parser.add_argument("--chunks", type=int, default=0, help="compute the loss in so many chunks; 0: at once")
    parser.add_argument("--checkpoint", type=int, default=0, help="save every so many steps; 0: never")
    parser.add_argument("--validate", type=int, default=0, help="validate every so many steps; 0: never")
    parser.add_argument("--log-freq", type=int, default=1)
    parser.add_argument("--batches", type=int, default=2**31)
    parser.add_argument("--output", default="outputs")
    return parser.parse_args(arguments)


def main() -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    init_logger()
    trainer = config(parse()).build()
    sentinel.attach_torchtitan(trainer)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
