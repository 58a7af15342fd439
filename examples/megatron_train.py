"""A tiny GPT on megatron-core, shaped like its own pretraining loop: `sentinel run -- python examples/megatron_train.py`.

On GPUs start it with torchrun; without one it trains on the CPU over gloo, through the shim that the tests use.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sentinel

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.trainers import megatron_shim

    torch.set_num_threads(1)
    megatron_shim.install()

from megatron.core import parallel_state  # noqa: E402  After the shim.
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCAB, LENGTH, MICRO_BATCHES, MICRO_BATCH_SIZE = 64, 16, 4, 2


def build(tp: int, pp: int) -> tuple[list[Any], Any]:
    config = TransformerConfig(
        num_layers=2 * pp, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32, attention_dropout=0.0, hidden_dropout=0.0,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    gpt = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).cuda()  # fmt: skip
    model = [DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)]
    settings = OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=1.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def batches(iteration: int) -> Iterator[torch.Tensor]:
    replica = parallel_state.get_data_parallel_rank()
    device = "cuda" if HAS_GPU else "cpu"
    for micro_batch in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(1000 * iteration + 10 * micro_batch + replica)
        starts = torch.randint(0, VOCAB, (MICRO_BATCH_SIZE, 1), generator=generator)
        yield ((starts + torch.arange(LENGTH + 1)) % VOCAB).to(device)


def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def forward_step(iterator: Iterator[torch.Tensor], model: Any) -> Any:
    batch = next(iterator)
    positions = torch.arange(LENGTH, device=batch.device).expand(MICRO_BATCH_SIZE, -1)
    return model(batch[:, :-1].contiguous(), positions, None, labels=batch[:, 1:].contiguous()), partial(loss_func)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    options = parser.parse_args()
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({key: value for key, value in defaults.items() if key not in os.environ})
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    parallel_state.initialize_model_parallel(options.tp, options.pp)
    model_parallel_cuda_manual_seed(1)
    model, optimizer = build(options.tp, options.pp)

    monitor = sentinel.attach_megatron(model, optimizer)

    for iteration in range(1, options.iterations + 1):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=batches(iteration), model=model, num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH, micro_batch_size=MICRO_BATCH_SIZE, forward_only=False,
        )  # fmt: skip
        success, grad_norm, _ = optimizer.step()
        if reduced:
            loss = sum(float(one["lm loss"]) for one in reduced) / len(reduced)
            print(
                f" iteration {iteration:8d}/{options.iterations:8d} | lm loss: {loss:.6E} | grad norm: {grad_norm:.3f} |"
                f" number of skipped iterations: {int(not success)} |",
                flush=True,
            )
    monitor.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
