"""What the tests train on real megatron-core: a tiny GPT, the same numbers on every layout."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import torch
import torch.distributed as dist

LENGTH, WIDTH, HEADS = 8, 16, 4


@dataclasses.dataclass
class Job:
    """What to train, how it is laid out, and how it is watched."""

    folder: str
    world: int = 1
    port: int = 0
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False
    layers: int = 4
    vocab: int = 32
    experts: int = 0
    grouped: bool = False
    tied: bool = True
    gated: bool = False
    precision: str = "fp32"
    distributed_optimizer: bool = False
    overlap: bool = False
    grads_in_fp32: bool = True
    per_token: bool = False
    recompute: str = ""
    steps: int = 3
    global_micro_batches: int = 4
    micro_batch_size: int = 2
    clip: float = 0.5
    loss_scale: float = 256.0
    overflow_at: int = -1
    """Iteration whose loss is infinite, 1-based."""
    evaluate_after: int = -1
    raise_at: int = -1
    """Iteration whose third forward raises, 1-based."""
    checkpoint: str = ""
    """Save here at the end; a later job with `resume` continues."""
    resume: str = ""
    is_sharded: bool = False
    """Through Megatron's own dist_checkpointing."""
    first_step: int = 1
    config: dict[str, Any] | None = None
    """Sentinel's; None: only the bare run."""
    bare: bool = True
    """Train without Sentinel first."""
    skip_at: int = -1
    """Iteration whose gradients the loop throws away: it never calls the optimizer."""
    gathered_attention: bool = False
    """The attention that context parallelism has here, also without it."""
    attaches_twice: bool = False
    counts_synchronising: bool = False
    has_outer_loss: bool = False
    """The model returns logits; the loss is computed outside of it."""
    plain_adam: bool = False
    """A torch optimizer over the model's own parameters, as in megatron-core's quickstart."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    is_logged: bool = False
    """Call monitor.log after the step, as a user would."""


def global_name(name: str, chunk: Any, job: Job) -> str:
    """The name that this test gives a parameter on every layout, from what Megatron itself says."""
    from megatron.core import parallel_state

    words = name.split(".")
    for at, word in enumerate(words):
        if word == "layers" and words[at - 1] == "decoder":
            layer = chunk.decoder.layers[int(words[at + 1])]
            words[at + 1] = str(layer.layer_number - 1)
        if word == "local_experts":
            held = job.experts // parallel_state.get_expert_model_parallel_world_size()
            words[at + 1] = str(int(words[at + 1]) + held * parallel_state.get_expert_model_parallel_rank())
    full = ".".join(words)
    return "embedding.word_embeddings.weight" if job.tied and full == "output_layer.weight" else full


def whole_tensor(name: str, shape: tuple[int, ...], is_norm: bool) -> torch.Tensor:
    """The same numbers on every layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
    return values + 1.0 if is_norm else values


def is_expert(param: torch.Tensor) -> bool:
    return not getattr(param, "allreduce", True)


def cut(param: torch.Tensor) -> tuple[int, int, int]:
    """(dimension, size, rank) of the tensor-parallel cut of a parameter; size 1 where it is whole."""
    from megatron.core import parallel_state

    if not getattr(param, "tensor_model_parallel", False):
        return 0, 1, 0
    if is_expert(param):
        size = parallel_state.get_expert_tensor_parallel_world_size()
        return int(param.partition_dim), size, parallel_state.get_expert_tensor_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    return int(param.partition_dim), size, parallel_state.get_tensor_model_parallel_rank()


def fill(chunk: Any, job: Job) -> None:
    """Give every parameter its slice of the whole tensor of its name."""
    from megatron.core import parallel_state

    ep, ep_rank = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
    for local, param in chunk.named_parameters():
        name = global_name(local, chunk, job)
        dim, size, rank = cut(param)
        shape = list(param.shape)
        shape[dim] *= size
        is_norm = "layernorm" in name and name.endswith("weight")
        if job.grouped and ".experts.weight" in name:
            held = job.experts // ep  # Laid out one expert behind the other, whatever the shape says.
            one = (WIDTH, param.numel() // held // WIDTH)
            one = one if name.endswith("weight1") else one[::-1]
            parts = [whole_tensor(f"{name}.{held * ep_rank + e}", one, False).flatten() for e in range(held)]
            with torch.no_grad():
                param.copy_(torch.cat(parts).view(param.shape))
            continue
        whole = whole_tensor(name, tuple(shape), is_norm)
        with torch.no_grad():
            param.copy_(whole.chunk(size, dim)[rank] if size > 1 else whole)


def norm_class(job: Job) -> Any:
    """The norm of Apex or Transformer Engine marks its weights for sequence parallelism; torch's does not."""

    def make(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        norm = torch.nn.LayerNorm(hidden_size, eps)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    class Norm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
            return make(config, hidden_size, eps, **kwargs)

    return Norm


def attention_class() -> Any:
    """Core attention over a context cut in contiguous pieces: Megatron's own needs Transformer Engine for that."""
    from megatron.core import parallel_state

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.group = group
            parts = [torch.empty_like(part) for _ in range(group.size())]
            dist.all_gather(parts, part.contiguous(), group=group)
            return torch.cat(parts, 0)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
            return grad.chunk(ctx.group.size(), 0)[ctx.group.rank()], None

    class GatheredAttention(torch.nn.Module):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__()

        def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            group = parallel_state.get_context_parallel_group()
            size, rank = group.size(), group.rank()
            key, value = (Gathered.apply(one, group) for one in (key, value))
            q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
            scores = q @ k.transpose(-1, -2) / query.shape[-1] ** 0.5
            place = torch.arange(q.shape[2]) + rank * q.shape[2]
            scores = scores.masked_fill(place[:, None] < torch.arange(q.shape[2] * size)[None], -1e4)
            out = scores.softmax(-1) @ v
            return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    return GatheredAttention


class PlainAdam(torch.optim.Adam):
    """A torch optimizer that a user's own loop hands the reduced gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), 0.01)

    def take(self, model: torch.nn.Module) -> None:
        for param in model.parameters():
            param.grad = param.main_grad  # type: ignore[attr-defined]


def build(job: Job) -> tuple[list[Any], Any, Any]:
    """The chunks, wrapped as Megatron wraps them, the optimizer and its scheduler."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    extra: dict[str, Any] = {}
    if job.experts:
        extra.update(
            num_moe_experts=job.experts, moe_router_topk=2, moe_token_dispatcher_type="alltoall", moe_aux_loss_coeff=0.01,
            moe_router_load_balancing_type="none", moe_grouped_gemm=job.grouped, add_bias_linear=False,
            moe_ffn_hidden_size=WIDTH,
        )  # fmt: skip
    if job.etp is not None:
        extra["expert_tensor_parallel_size"] = job.etp
    if job.recompute == "full":
        extra.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    if job.vpp > 1:  # Two stages send both ways between the same ranks: Megatron asks for this.
        extra.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    if job.recompute == "selective":
        extra.update(recompute_granularity="selective", recompute_modules=["core_attn"])
    if job.gated:
        extra.update(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[job.precision]
    config = TransformerConfig(
        num_layers=job.layers, hidden_size=WIDTH, num_attention_heads=HEADS, ffn_hidden_size=2 * WIDTH,
        tensor_model_parallel_size=job.tp, pipeline_model_parallel_size=job.pp, context_parallel_size=job.cp,
        virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None, expert_model_parallel_size=job.ep,
        sequence_parallel=job.sequence_parallel, hidden_dropout=0.0, attention_dropout=0.0, pipeline_dtype=dtype,
        params_dtype=dtype, bf16=job.precision == "bf16", fp16=job.precision == "fp16",
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False, calculate_per_token_loss=job.per_token,
        variable_seq_lengths=False, **extra,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=job.experts or None, moe_grouped_gemm=job.grouped, moe_use_legacy_grouped_gemm=job.grouped
    )
    norm = norm_class(job)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    if job.cp > 1 or job.gathered_attention:
        spec.submodules.self_attention.submodules.core_attention = attention_class()
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    chunks = []
    for vp_stage in range(job.vpp):
        stage = {"vp_stage": vp_stage} if job.vpp > 1 else {}
        from megatron.core.transformer.transformer_block import get_num_layers_to_build

        submodules = TransformerBlockSubmodules(
            layer_specs=[spec] * get_num_layers_to_build(config, **stage), layer_norm=norm
        )
        chunk = GPTModel(
            config=config, transformer_layer_spec=submodules, vocab_size=job.vocab, max_sequence_length=LENGTH,
            share_embeddings_and_output_weights=job.tied,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage), **stage,
        )  # fmt: skip
        fill(chunk, job)
        chunks.append(chunk)
    if job.precision != "fp32":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=job.distributed_optimizer, overlap_grad_reduce=job.overlap,
        overlap_param_gather=job.overlap and job.distributed_optimizer, grad_reduce_in_fp32=job.grads_in_fp32,
        bucket_size=400 if job.overlap else None,
    )  # fmt: skip
    model = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=at > 0) for at, chunk in enumerate(chunks)]
    # A gradient that is nothing but rounding (of a key's bias) would move its weight by a whole step with a smaller eps.
    settings = OptimizerConfig(
        optimizer="adam", adam_eps=1e-4, lr=0.01, min_lr=0.001, weight_decay=0.01, clip_grad=job.clip,
        bf16=config.bf16, fp16=config.fp16,
        params_dtype=dtype, use_distributed_optimizer=job.distributed_optimizer,
        overlap_param_gather=job.overlap and job.distributed_optimizer,
        loss_scale=None, initial_loss_scale=job.loss_scale, min_loss_scale=1.0, hysteresis=1, loss_scale_window=1000,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, model)
    if job.plain_adam:
        optimizer = PlainAdam(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = None if job.plain_adam else optimizer.scale_loss
    if job.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in model] if len(model) > 1 else model[0].no_sync
    if job.plain_adam:
        return model, optimizer, None
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.005, max_lr=0.01, min_lr=0.001, lr_warmup_steps=2, lr_decay_steps=100, lr_decay_style="linear",
        start_wd=0.01, end_wd=0.01, wd_incr_steps=100, wd_incr_style="constant", use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
    )  # fmt: skip
    return model, optimizer, scheduler
