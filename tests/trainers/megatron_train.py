"""A rank's training on real megatron-core, as its pretraining loop does it, and a launcher that forks ranks.

The launcher reads one job a line (JSON) and answers with one line each; importing Megatron takes seconds, forking does not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..support.host_waits import HostWaits
from .megatron_build import LENGTH, Job, build, cut, global_name, is_expert


def batches(job: Job, iteration: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tokens, labels, positions) of this rank's micro-batches of one iteration, 1-based."""
    from megatron.core import parallel_state

    dp, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    for micro in range(dp_rank, job.global_micro_batches, dp):
        generator = torch.Generator().manual_seed(1000 * iteration + micro)
        drawn = torch.randint(0, job.vocab, (job.micro_batch_size, LENGTH + 1), generator=generator)
        places = torch.arange(LENGTH).expand(job.micro_batch_size, -1)
        yield tuple(one.chunk(cp, 1)[cp_rank] for one in (drawn[:, :-1], drawn[:, 1:], places))  # type: ignore[misc]


def make_forward_step(job: Job, now: dict[str, int]) -> Any:
    from megatron.core import parallel_state

    def loss_func(output: torch.Tensor) -> Any:
        losses = output.float()
        if now["iteration"] == job.overflow_at and not now["evaluating"]:
            losses = losses * float("inf")
        if job.per_token:
            total = losses.sum()
            count = torch.tensor(losses.numel(), dtype=torch.int)
            return total, count, {"lm loss": torch.stack([total.detach().clone(), count.float()])}
        loss = losses.mean()
        said = loss.detach().clone()
        if job.cp > 1:
            dist.all_reduce(said, group=parallel_state.get_context_parallel_group())
            said /= job.cp
            loss = loss / job.cp  # Megatron takes it as this rank's part of the mean over the whole context.
        return loss, {"lm loss": said}

    def outer_loss(labels: torch.Tensor, logits: torch.Tensor) -> Any:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        loss = vocab_parallel_cross_entropy(logits.float(), labels.contiguous()).mean()
        return loss, {"lm loss": loss.detach().clone()}

    def forward_step(iterator: Any, model: Any) -> Any:
        tokens, labels, positions = next(iterator)
        now["forwards"] += 1
        if now["iteration"] == job.raise_at and now["forwards"] == 3:
            raise RuntimeError("the data loader broke")
        if job.has_outer_loss:
            return model(tokens, positions, None), functools.partial(outer_loss, labels)
        return model(tokens, positions, None, labels=labels), loss_func

    return forward_step


def train_loop(job: Job, monitor: Any, model: list[Any], optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Megatron's train loop: what it prints, and what this test computes of the gradients itself."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    dp = parallel_state.get_data_parallel_world_size()
    now = {"iteration": 0, "forwards": 0, "evaluating": 0}
    forward_step = make_forward_step(job, now)
    reported: list[dict[str, Any]] = []
    truth: list[dict[str, Any]] = []
    start = 0
    if job.resume:
        start = load(job, monitor, model, optimizer, scheduler)
    for chunk in model:
        chunk.train()

    def forward_backward(iteration: int, forward_only: bool) -> Any:
        data = [batches(job, iteration) for _ in model]
        return get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data if len(model) > 1 else data[0], model=model,
            num_microbatches=job.global_micro_batches // dp, seq_length=LENGTH, micro_batch_size=job.micro_batch_size,
            forward_only=forward_only,
        )  # fmt: skip

    for iteration in range(start + 1, start + job.steps + 1):
        now.update(iteration=iteration, forwards=0)
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = forward_backward(iteration, False)
        if job.plain_adam:
            optimizer.take(model[0])
            grad_norm = float(torch.nn.utils.clip_grad_norm_(list(model[0].parameters()), job.clip))
            optimizer.step()
            reported.append({"line": "", "loss": float(torch.stack([one["lm loss"] for one in reduced]).mean()),
                         "grad_norm": grad_norm, "success": True, "lr": 0.01})  # fmt: skip
            continue
        truth.append(reference(job, model, optimizer))
        lr = optimizer.param_groups[0]["lr"]
        if iteration == job.skip_at:
            continue
        success, grad_norm, _ = optimizer.step()
        if success:
            scheduler.step(1)
        values = [one["lm loss"] for one in reduced]
        if values and values[0].numel() == 2:
            total = torch.stack(values).sum(0)
            loss = float(total[0] / total[1])
        else:
            loss = float(torch.stack(values).mean()) if values else float("nan")
        if monitor is not None and job.is_logged:
            monitor.log(loss=loss, custom=iteration)
        line = f" iteration {iteration:8d}/{start + job.steps:8d} | learning rate: {lr!r} | lm loss: {loss!r} |"
        line += f" grad norm: {grad_norm!r} | number of skipped iterations: {int(not success)} |"
        reported.append({"line": line, "loss": loss, "grad_norm": grad_norm, "success": bool(success), "lr": lr})
        if iteration == job.evaluate_after:
            for chunk in model:
                chunk.eval()
            now["evaluating"] = 1
            with torch.no_grad():
                forward_backward(iteration + 500, True)
            now["evaluating"] = 0
            for chunk in model:
                chunk.train()
    if job.checkpoint:
        save(job, monitor, model, optimizer, scheduler, start + job.steps)
    return {"told": reported, "truth": truth, "weights": digest(model)}


def digest(model: list[Any]) -> float:
    total = 0.0
    for n, chunk in enumerate(model):
        for m, param in enumerate(chunk.parameters()):
            local = param.detach().double().flatten()
            total += float((local * torch.arange(1, local.numel() + 1)).sum()) * (1 + n + m)
    return total


def reference(job: Job, model: list[Any], optimizer: Any) -> dict[str, list[float]]:
    """Canonical name -> [sum of squares, sum, count] in float64 of the gradient pieces that only this rank counts.

    Read where Megatron keeps them, before its own clipping, the loss scale taken out; pieces of all ranks add up.
    """
    from megatron.core import parallel_state

    scale = float(optimizer.get_loss_scale())
    found: dict[str, list[float]] = {}
    dp_cp = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for chunk in model:
        inner = chunk.module.module if job.precision != "fp32" else chunk.module
        for local, param in inner.named_parameters():
            if getattr(param, "shared", False):
                continue
            _, size, _ = cut(param)
            expert = is_expert(param)
            tp_rank = parallel_state.get_tensor_model_parallel_rank()
            if expert:
                tp_rank = parallel_state.get_expert_tensor_parallel_rank()
            if size == 1 and tp_rank != 0:
                continue
            grad = param.main_grad.detach().double().flatten() / scale
            if job.distributed_optimizer:
                for one in optimizer.chained_optimizers:
                    if param in one.model_param_gbuf_map:
                        held = one._get_model_param_range_map(param)["param"]
                        grad = grad[held.start : held.end]
                        break
                else:
                    continue
            elif (parallel_state.get_expert_data_parallel_rank() if expert else dp_cp) != 0:
                continue
            name = global_name(local, inner, job)
            found[name] = [float((grad**2).sum()), float(grad.sum()), float(grad.numel())]
    return found


def save(job: Job, monitor: Any, model: list[Any], optimizer: Any, scheduler: Any, iteration: int) -> None:
    if job.is_sharded:
        from megatron.core import dist_checkpointing

        sharded = model[0].module.sharded_state_dict()
        Path(job.checkpoint).mkdir(exist_ok=True)
        common = {
            "iteration": iteration, "model": sharded, "optimizer": optimizer.sharded_state_dict(sharded),
            "scheduler": scheduler.state_dict(), "sentinel": None if monitor is None else monitor.state_dict(),
        }  # fmt: skip
        dist_checkpointing.save(common, job.checkpoint)
        return
    state = {
        "iteration": iteration, "model": [chunk.state_dict() for chunk in model], "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(), "sentinel": None if monitor is None else monitor.state_dict(),
    }  # fmt: skip
    torch.save(state, f"{job.checkpoint}-{dist.get_rank()}.pt")


def load(job: Job, monitor: Any, model: list[Any], optimizer: Any, scheduler: Any) -> int:
    if job.is_sharded:
        from megatron.core import dist_checkpointing

        sharded = model[0].module.sharded_state_dict()
        wanted = {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading=True)}
        state = dist_checkpointing.load(wanted, job.resume)
        model[0].module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        if monitor is not None:
            monitor.load_state_dict(state["sentinel"])
        return int(state["iteration"])
    state = torch.load(f"{job.resume}-{dist.get_rank()}.pt", weights_only=False)
    for chunk, one in zip(model, state["model"], strict=True):
        chunk.load_state_dict(one)
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if monitor is not None:
        monitor.load_state_dict(state["sentinel"])
    return int(state["iteration"])


COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "barrier",
    "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv", "all_gather_object",
    "broadcast_object_list", "gather", "scatter", "reduce", "gather_object", "_all_gather_base", "_reduce_scatter_base",
)  # fmt: skip


def _counting(original: Any, name: str, counts: dict[str, int]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return original(*args, **kwargs)

    return call


@contextlib.contextmanager
def counted(counts: dict[str, int]) -> Iterator[None]:
    """Count every call of torch.distributed's collectives."""
    modules: Any = (torch.distributed, sys.modules["torch.distributed.distributed_c10d"])
    undo = []
    for name in COLLECTIVES:
        originals = [getattr(module, name, None) for module in modules]
        # One wrapper for both names: P2POp compares isend and irecv by identity.
        wraps = {id(one): _counting(one, name, counts) for one in originals if one is not None}
        for module, original in zip(modules, originals, strict=True):
            if original is not None:
                setattr(module, name, wraps[id(original)])
                undo.append((module, name, original))
    try:
        yield
    finally:
        for module, name, original in undo:
            setattr(module, name, original)


def traces(model: list[Any], optimizer: Any) -> list[Any]:
    """What an attached Sentinel changes on what it watches."""
    from megatron.core.pipeline_parallel import schedules

    wrapped = [optimizer, *model, *getattr(optimizer, "chained_optimizers", [])]
    names = [name for one in wrapped for name in ("step", "prepare_grads", "zero_grad_buffer") if name in vars(one)]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for one in model for m in one.modules())
    return [names, hooks, id(schedules.forward_step), id(schedules.backward_step)]


def run_rank(job: Job, rank: int) -> dict[str, Any]:
    os.environ.update(SENTINEL_DIR=job.folder, SENTINEL_RUN="run", **job.environment)
    from . import megatron_shim

    megatron_shim.start(rank, job.world, job.port)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.tp, pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None, context_parallel_size=job.cp,
        expert_model_parallel_size=job.ep, expert_tensor_parallel_size=job.etp,
    )  # fmt: skip
    results: dict[str, Any] = {}
    for watched in ([False] if job.bare else []) + ([True] if job.config is not None else []):
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        torch.manual_seed(1)
        model, optimizer, scheduler = build(job)
        monitor = None
        counts: dict[str, int] = {}
        before = traces(model, optimizer)
        with counted(counts):
            if watched:
                import sentinel

                monitor = sentinel.attach_megatron(model, optimizer, job.config, first_step=job.first_step)
                if job.attaches_twice:
                    former = monitor
                    monitor = sentinel.attach_megatron(model, optimizer, job.config, first_step=job.first_step)
                    assert monitor is not former and not former.is_alive
            during = traces(model, optimizer)
            began = time.perf_counter()
            waits = HostWaits() if job.counts_synchronising else None
            try:
                with waits or contextlib.nullcontext():
                    result = train_loop(job, monitor, model, optimizer, scheduler)
                if waits is not None:
                    counts["synchronising"] = waits.count
            except RuntimeError as error:
                if job.raise_at < 0:
                    raise
                result = {"raised": str(error)}
            result["seconds"] = time.perf_counter() - began
        if monitor is not None and job.raise_at < 0:
            result["is_alive"] = monitor.is_alive
            monitor.detach()
            result["is_restored"] = traces(model, optimizer) == before != during
        results["watched" if watched else "bare"] = {**result, "collectives": counts}
    return results


def run(job: Job) -> list[dict[str, Any]]:
    """Fork the ranks of a job and return what each says; raises what the first of them raised."""
    Path(job.folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    for stale in [*Path(job.folder).glob("error-*.txt"), *Path(job.folder).glob("result-*.json")]:
        stale.unlink()
    children = []
    for rank in range(job.world):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        code = 1
        try:
            result = run_rank(job, rank)
            (Path(job.folder) / f"result-{rank}.json").write_text(json.dumps(result))
            if job.raise_at < 0:
                dist.barrier()
                dist.destroy_process_group()
            code = 0
        except BaseException:
            (Path(job.folder) / f"error-{rank}.txt").write_text(traceback.format_exc())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    limit = time.monotonic() + 600
    left = set(children)
    while left and time.monotonic() < limit:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
        if list(Path(job.folder).glob("error-*.txt")):
            limit = min(limit, time.monotonic() + 3)  # The others wait for it for ever.
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    problems = [path.read_text() for path in sorted(Path(job.folder).glob("error-*.txt"))]
    if problems or left:
        raise RuntimeError("\n".join(problems) or "not over after 600 s")
    return [json.loads((Path(job.folder) / f"result-{rank}.json").read_text()) for rank in range(job.world)]


def main() -> None:
    """Answer each line of stdin."""
    torch.set_num_threads(1)
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules  # noqa: F401

    logging.getLogger("megatron").setLevel(logging.ERROR)
    for line in sys.stdin:
        try:
            answer: Any = {"ranks": run(Job(**json.loads(line)))}
        except Exception as error:
            answer = {"error": str(error)}
        print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
