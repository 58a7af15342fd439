"""What a training step of a dense model of 1.0e9 parameters costs on a GPU with Sentinel attached, all variants in one run.

    python benchmarks/gpu_step_time.py --write   # on the GPU: torch with Triton, numpy, msgspec, pyyaml; 80 GB of its memory
    python benchmarks/gpu_step_time.py --device cpu --tiny

bf16 weights and AdamW's state, no activation checkpointing; the batch is chosen so that a step takes about --target-ms.
Variants take turns, some steps each, and each round gives one ratio a variant: the median over rounds is told, with its
spread. `groups` are params, wgrads, activations and dgrads, of every module but the logits. Beside the ratios:

    floor      the time of reading each distinct tensor once at the bandwidth of a copy, of params and wgrads
    waits      synchronising calls of the training thread in a profile of three steps, with Sentinel and without
    graph      a CUDA graph of forward and backward with a launch behind every block, its gate closed and open
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import gpu_results
import torch
from torch import nn

import sentinel
from sentinel.collect.kernels import choose_kernel
from sentinel.collect.rows.buffer import StepRows
from sentinel.record import Kind

GROUPS = {"kinds": ["param", "wgrad", "activation", "dgrad"], "targets": ["embedding", "blocks", "norm"], "black_box": False}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "attached, everything off": {"kinds": [], "black_box": False},
    "black box": {"kinds": [], "black_box": True},
    "params + wgrads": {"kinds": ["param", "wgrad"], "black_box": False},
    "four groups, every step": GROUPS,
    "four groups, stagger 8": {**GROUPS, "stagger": 8},
}
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


class Block(nn.Module):
    """Attention and MLP, each behind a norm. hidden: [batch, sequence, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = hidden.shape
        q, k, v = self.qkv(self.norm1(hidden)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm2(hidden))))


class Dense(nn.Module):
    """A plain decoder. tokens: [batch, sequence] int64 -> logits."""

    def __init__(self, width: int, layers: int, heads: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Training:
    """The model, its optimizer and fixed random batches."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = options.device
        self.words = 128 if options.tiny else 50_304
        self.sequence = 16 if options.tiny else 2048
        sizes = (32, 2, 2) if options.tiny else (2048, 16, 16)
        with torch.device(options.device):
            self.model = Dense(*sizes, self.words).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=options.device == "cuda")
        self.batch = 1
        self.tokens = torch.empty(0)

    def set_batch(self, batch: int) -> None:
        self.batch = batch
        self.tokens = torch.randint(0, self.words, (batch, self.sequence + 1), device=self.device)

    def loss(self) -> torch.Tensor:
        logits = self.model(self.tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())

    def step(self, monitor: Any = None) -> None:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        if monitor is not None:
            monitor.log(loss=loss)
        self.optimizer.zero_grad()


def steps_of(training: Training, number: int, settings: dict[str, Any] | None, run: str, *, strict: bool = False) -> float:
    """Return seconds a step: two steps warm up. strict: a call that waits for the device raises."""
    monitor = None if settings is None else sentinel.attach(training.model, training.optimizer, {"run": run, **settings})
    try:
        for _ in range(2):
            training.step(monitor)
        gpu_results.synchronize(training.device)
        began = time.perf_counter()
        if strict and training.device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(number):
                training.step(monitor)
        finally:
            if training.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        gpu_results.synchronize(training.device)
        return (time.perf_counter() - began) / number
    finally:
        if monitor is not None:
            monitor.detach()


def compare(options: argparse.Namespace, training: Training) -> list[dict[str, Any]]:
    """Let the variants take turns; print and return the table."""
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(options.rounds + 1):
        names = list(VARIANTS)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took = steps_of(training, options.steps, VARIANTS[name], f"r{turn}-{names.index(name)}")
            if turn:  # The first round compiles kernels.
                times[name].append(took)
    table = []
    print(f"{'variant':<28} {'ms/step':>9} {'ratio':>8}   least - most")
    for name, own in times.items():
        ratios = sorted(a / b for a, b in zip(own, times["without"], strict=True))
        cell = {
            "variant": name, "ms": round(1e3 * statistics.median(own), 3), "ratio": round(statistics.median(ratios), 5),
            "ratio_least": round(ratios[0], 5), "ratio_most": round(ratios[-1], 5),
        }  # fmt: skip
        table.append(cell)
        print(f"{name:<28} {cell['ms']:>9} {cell['ratio']:>8.4f}   {cell['ratio_least']:.4f} - {cell['ratio_most']:.4f}")
    return table


def floor(training: Training) -> dict[str, float]:
    """Return bytes of params and wgrads, the copy's bandwidth and the time of reading them once at it."""
    nbytes = 2 * sum(p.numel() * p.element_size() for p in training.model.parameters())
    x = torch.empty(max(nbytes // 4, 1), dtype=torch.bfloat16, device=training.device)
    y = torch.empty_like(x)
    took = gpu_results.medians({"copy": lambda: y.copy_(x)}, training.device, rounds=5, repeats=3)["copy"][0]
    bandwidth = 2 * x.numel() * 2 / took
    cell = {"bytes": nbytes, "copy_gb_s": round(bandwidth / 1e9, 1), "ms": nbytes / bandwidth * 1e3}
    print(f"params and wgrads: {nbytes / 1e9:.2f} GB; at the copy's {cell['copy_gb_s']} GB/s {cell['ms']:.3f} ms")
    return cell


def waits(options: argparse.Namespace, training: Training) -> dict[str, Any]:
    """Count what waits for the device in three steps; and let it be an error, of all four groups and the black box."""
    cell: dict[str, Any] = {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    if options.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for name in ("without", "four groups, every step", "black box"):
        settings = VARIANTS[name]
        attached = None
        if settings is not None:
            attached = sentinel.attach(training.model, training.optimizer, {"run": f"p-{name}", **settings})
        try:
            for _ in range(2):
                training.step(attached)
            gpu_results.synchronize(options.device)
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(3):
                    training.step(attached)
            here = [event for event in profile.events() if event.name in WAITS or event.name.startswith("cudaLaunchKernel")]
        finally:
            if attached is not None:
                attached.detach()
        threads = {event.thread for event in here if event.name.startswith("cudaLaunchKernel")}
        cell[name] = {wait: sum(event.name == wait and event.thread in threads for event in here) for wait in WAITS}
        steps_of(training, 3, settings, f"strict-{name}", strict=True)
        print(f"waits in 3 steps, {name}: {cell[name]}; none is an error under set_sync_debug_mode")
    return cell


def graph(options: argparse.Namespace, training: Training) -> dict[str, float]:
    """Time replays of a captured forward and backward: plain, and with gated launches behind every block."""
    if options.device != "cuda":
        return {}
    from sentinel.collect.kernels.triton_kernel import CaptureSwitch, TritonKernel

    kernel = choose_kernel("cuda")
    assert isinstance(kernel, TritonKernel), kernel.name
    # Each graph keeps the memory of a whole step.
    training.set_batch(max(1, training.batch // 8))
    blocks = list(training.model.blocks)
    rows = StepRows(len(blocks))
    for row in range(len(blocks)):
        rows.add(row, Kind.ACTIVATION, 0, 0, row, row)
    gate = CaptureSwitch(torch.device("cuda", torch.cuda.current_device()))

    def capture(is_gated: bool) -> Callable[[], object]:
        handles = [
            block.register_forward_hook(lambda module, args, out, row=row: kernel.capture(out.detach(), gate, row))
            for row, block in enumerate(blocks) if is_gated
        ]  # fmt: skip
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                training.optimizer.zero_grad()
                training.loss().backward()
        torch.cuda.current_stream().wait_stream(side)
        training.optimizer.zero_grad()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            training.loss().backward()
        for handle in handles:
            handle.remove()
        return captured.replay

    plain, gated = capture(False), capture(True)
    took: dict[str, list[float]] = {"plain": [], "closed": [], "open": []}
    for _ in range(options.rounds):
        took["plain"].append(gpu_results.seconds_of(plain, "cuda", 5))
        gate.close()
        took["closed"].append(gpu_results.seconds_of(gated, "cuda", 5))
        gate.open(rows.on(training.tokens.device), range(len(blocks)))
        took["open"].append(gpu_results.seconds_of(gated, "cuda", 5))
    rows.begin_copy()
    assert rows.finish() == 0, "rows of the replayed graph did not arrive"
    assert (rows.array["count"] > 0).all()
    base = statistics.median(took["plain"])
    cell = {name: statistics.median(own) / base for name, own in took.items()}
    print(f"CUDA graph of forward and backward, {len(blocks)} launches: {cell}")
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu_results.add_options(parser)
    parser.add_argument("--batch", type=int, default=0, help="sequences a step; 0: about --target-ms")
    parser.add_argument("--target-ms", type=float, default=400.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="steps of a variant in a round that count; two warm up")
    parser.add_argument("--without-graph", action="store_true", help="leave out the CUDA graph")
    options = parser.parse_args()
    gpu_results.require_device(options)
    if options.tiny:
        options.rounds, options.steps, options.batch = 2, 2, 2
    training = Training(options)
    with tempfile.TemporaryDirectory(prefix="sentinel-gpu-step-time-") as folder:
        os.environ["SENTINEL_DIR"] = folder
        training.set_batch(options.batch or 4)
        if not options.batch:
            steps_of(training, 3, None, "warm")
            training.set_batch(max(1, round(4 * options.target_ms / 1e3 / steps_of(training, 3, None, "sized"))))
        cell = gpu_results.about(options, choose_kernel(options.device).name)
        cell["parameters"] = sum(p.numel() for p in training.model.parameters())
        cell["batch"], cell["sequence"] = training.batch, training.sequence
        print(f"{cell['date']}; {cell['machine']}; torch {cell['torch']}; triton {cell['triton']}; {cell['kernel']}")
        print(f"{cell['parameters'] / 1e9:.2f}e9 parameters, batch {training.batch} x {training.sequence}")
        cell["floor"] = floor(training)
        cell["variants"] = compare(options, training)
        cell["waits"] = waits(options, training)
        if not options.without_graph:
            cell["graph"] = graph(options, training)
    gpu_results.write(options, "gpu_step_time", cell)


if __name__ == "__main__":
    main()
