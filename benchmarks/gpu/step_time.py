"""What a training step of a dense model of 1.0e9 parameters costs on a GPU with Sentinel attached, all variants in one run.

    python benchmarks/gpu/step_time.py --form eager        # or compiled, or graph; 80 GB of the GPU's memory

bf16 weights and AdamW's state, no activation checkpointing, 14 sequences of 2048 tokens a step (28,672); half of them, and
half again, where memory does not hold those.

    eager      Variants take turns, some steps each, and each round gives one ratio a variant: the median over rounds is
               told, with its spread. As many rounds as fit into --most-s. `floor`: the time of reading params and wgrads
               once, at the bandwidth of a copy
    compiled   Every variant is compiled anew, so each has one turn, between two of the bare compiled model; the ratio is to
               the mean of those two, whose difference is the noise
    graph      A CUDA graph of forward and backward with a launch behind every block, its gate closed and open

Beside the ratios, in percent of the step: our budget, and what a reference adds whose statistics are fused into the trainer,
on one H100 and such a model: 2.1 for params and wgrads, 19 for all four groups (taken over, not measured here).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import results
import torch
from dense import VARIANTS, Training, steps_of

from sentinel.collect.kernels import choose_kernel
from sentinel.collect.rows.buffer import StepRows
from sentinel.record import Kind

BUDGET = {
    "attached, everything off": 0.1,
    "black box": 0.6,
    "params + wgrads": 1.0,
    "four groups, every step": 9.0,
    "four groups, stagger 8": 1.5,
}
"""Percent of the step that a variant may add."""
REFERENCE = {"params + wgrads": 2.1, "four groups, every step": 19.0}
"""Percent that the fused reference adds, as reported of it."""
COMPILED = ("attached, everything off", "black box", "params + wgrads", "default", "four groups, every step")


def fit(training: Training) -> None:
    """Halve the batch until memory holds a step with everything measured."""
    while True:
        try:
            steps_of(training, 2, VARIANTS["everything, every step"], "sized")
            return
        except torch.OutOfMemoryError:
            if training.batch == 1:
                raise
            training.optimizer.zero_grad()
            training.halve_batch()
            torch.cuda.empty_cache()
            print(f"memory does not hold that many sequences: {training.batch} from now on")


def row_of(name: str, seconds: list[float], ratios: list[float]) -> dict[str, Any]:
    """Return one line of the table, and print it."""
    ratios = sorted(ratios)
    row = {
        "variant": name, "ms": round(1e3 * statistics.median(seconds), 3), "ratio": round(statistics.median(ratios), 5),
        "ratio_least": round(ratios[0], 5), "ratio_most": round(ratios[-1], 5), "rounds": len(ratios),
        "budget_percent": BUDGET.get(name), "reference_percent": REFERENCE.get(name),
    }  # fmt: skip
    print(
        f"{name:<28} {row['ms']:>9} {row['ratio']:>8.4f}   {row['ratio_least']:.4f} - {row['ratio_most']:.4f}"
        f"   {row['budget_percent'] or '':>6} {row['reference_percent'] or '':>6}"
    )
    return row


def table_of(times: dict[str, list[float]], bare: list[float]) -> list[dict[str, Any]]:
    """Print and return the table of variants; `bare`: seconds a bare step beside each measurement."""
    print(f"{'variant':<28} {'ms/step':>9} {'ratio':>8}   least - most       budget fused, %")
    return [row_of(name, own, [a / b for a, b in zip(own, bare, strict=True)]) for name, own in times.items() if own]


def said(table: list[dict[str, Any]]) -> str:
    """Return the table in one line: what each variant adds, and may add."""
    return "; ".join(
        f"{row['variant']} {100 * (row['ratio'] - 1):+.2f} %"
        + (f" (<= {row['budget_percent']})" if row["budget_percent"] else "")
        for row in table
        if row["variant"] != "without"
    )


def eager(options: argparse.Namespace, training: Training, result: results.Result) -> str:
    """Let the variants take turns until the time is up."""
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    began, names, table = time.perf_counter(), list(VARIANTS), []
    for turn in range(options.rounds + 1):
        if turn > 1 and (time.perf_counter() - began) * (turn + 1) / turn > options.most_s:
            break
        took = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took[name] = steps_of(training, options.steps, VARIANTS[name], f"r{turn}-{names.index(name)}")
        if turn:  # The first round compiles kernels.
            for name, seconds in took.items():
                times[name].append(seconds)
            print(f"round {turn}")
            table = table_of(times, times["without"])
            result.note("variants", table)
    return said(table)


def floor(training: Training) -> dict[str, float]:
    """Return bytes of params and wgrads, the copy's bandwidth and the time of reading them once at it."""
    nbytes = 2 * sum(p.numel() * p.element_size() for p in training.model.parameters())
    x = torch.empty(max(nbytes // 4, 1), dtype=torch.bfloat16, device=training.device)
    y = torch.empty_like(x)
    took = results.medians({"copy": lambda: y.copy_(x)}, training.device, rounds=5, repeats=3)["copy"][0]
    bandwidth = 2 * x.numel() * 2 / took
    cell = {"bytes": nbytes, "copy_gb_s": round(bandwidth / 1e9, 1), "ms": nbytes / bandwidth * 1e3}
    print(f"params and wgrads: {nbytes / 1e9:.2f} GB; at the copy's {cell['copy_gb_s']} GB/s {cell['ms']:.3f} ms")
    return cell


def compiled(options: argparse.Namespace, training: Training, result: results.Result) -> str:
    """Compile and time one variant after the other, the bare model first and last."""
    seconds: dict[str, float] = {}
    compile_s: dict[str, float] = {}
    bare = []
    for turn, name in enumerate(("without", *COMPILED, "without")):
        torch._dynamo.reset()
        monitor = training.attach(VARIANTS[name], f"compiled-{turn}")
        try:
            # The small size is there to show that this runs; what inductor makes of it is of no interest.
            training.call = torch.compile(training.model, backend="aot_eager" if options.tiny else "inductor")
            began = time.perf_counter()
            for _ in range(3):
                training.step(monitor)
            results.synchronize(options.device)
            compile_s[f"{turn} {name}"] = round(time.perf_counter() - began, 1)
            began = time.perf_counter()
            for _ in range(2 * options.steps):
                training.step(monitor)
            results.synchronize(options.device)
            took = (time.perf_counter() - began) / (2 * options.steps)
        finally:
            if monitor is not None:
                monitor.detach()
            training.call = training.model
        if name == "without":
            bare.append(took)
        else:
            seconds[name] = took
        result.note("seconds", {"bare": bare, **seconds})
        result.note("compile_s", compile_s)
        print(f"{name}: {1e3 * took:.2f} ms a step; {compile_s[f'{turn} {name}']} s for the first three")
    mean = statistics.fmean(bare)
    table = table_of({name: [took] for name, took in seconds.items()}, [mean])
    result.note("variants", table)
    return f"{said(table)}; the bare model twice: {100 * (bare[1] / bare[0] - 1):+.2f} %"


def graph(options: argparse.Namespace, training: Training, result: results.Result) -> str:
    """Time replays of a captured forward and backward: plain, and with gated launches behind every block."""
    if options.device != "cuda":
        return "a CPU has no CUDA graphs: nothing was run"
    from sentinel.collect.kernels.triton_kernel import CaptureSwitch, TritonKernel

    kernel = choose_kernel("cuda")
    assert isinstance(kernel, TritonKernel), kernel.name
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
        took["plain"].append(results.seconds_of(plain, "cuda", 5))
        gate.close()
        took["closed"].append(results.seconds_of(gated, "cuda", 5))
        gate.open(rows.on(training.tokens.device), range(len(blocks)))
        took["open"].append(results.seconds_of(gated, "cuda", 5))
    rows.begin_copy()
    assert rows.finish() == 0, "rows of the replayed graph did not arrive"
    assert (rows.array["count"] > 0).all()
    base = statistics.median(took["plain"])
    cell = {name: round(statistics.median(own) / base, 5) for name, own in took.items()}
    result.note("graph", {"plain_ms": base * 1e3, "launches": len(blocks), **cell})
    return f"{len(blocks)} launches in a graph of {base * 1e3:.1f} ms: closed {cell['closed']:.4f}, open {cell['open']:.4f}"


FORMS = {"eager": eager, "compiled": compiled, "graph": graph}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=sorted(FORMS), default="eager")
    parser.add_argument("--batch", type=int, default=14, help="sequences a step")
    parser.add_argument("--rounds", type=int, default=8, help="rounds at most; one more warms up")
    parser.add_argument("--steps", type=int, default=10, help="steps of a variant in a round that count; two warm up")
    parser.add_argument("--most-s", type=float, default=420.0, help="begin no round that would end later than this")
    options = results.options_of(parser)
    if options.tiny:
        options.rounds, options.steps = 1, 2
    result = results.Result("step-time" if options.form == "eager" else f"step-time-{options.form}", options)
    # A graph keeps the memory of a whole step, and there are two.
    training = Training(options, "1b", max(1, options.batch // 8) if options.form == "graph" else options.batch)
    with tempfile.TemporaryDirectory(prefix="sentinel-gpu-step-time-") as folder:
        os.environ["SENTINEL_DIR"] = folder
        fit(training)
        result.note("kernel", choose_kernel(options.device).name)
        result.note("parameters", training.num_parameters)
        result.note("tokens", training.batch * training.sequence)
        print(f"{training.num_parameters / 1e9:.2f}e9 parameters, batch {training.batch} x {training.sequence}")
        if options.form == "eager":
            result.note("floor", floor(training))
        result.complete(FORMS[options.form](options, training, result))


if __name__ == "__main__":
    main()
