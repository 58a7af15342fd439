"""What a training step of a dense model of 1.0e9 parameters costs on a GPU with Sentinel attached, all variants in one run.

    python benchmarks/gpu/step_time.py --form eager        # or compiled, or graph; 80 GB of the GPU's memory

bf16 weights and AdamW's state, no activation checkpointing, 14 sequences of 2048 tokens a step (28,672); half of them, and
half again, where memory does not hold those.

    eager      Variants take turns, some steps each, and each round gives one ratio a variant: the median over rounds is
               told, with its spread. As many rounds as fit into --most-s. `floor`: the time of reading params and wgrads
               once, at the bandwidth of a copy
    compiled   Every variant is compiled anew, so each has one turn, between two of the bare compiled model; the ratio is to
               the mean of those two, whose difference is the noise
    graph      CUDA graphs, as far as Sentinel sees through them: parameters and gradients, measured by the optimizer's
               hooks, not what is inside. Variants take turns as in eager. `replayed`: forward and backward are one graph
               and the optimizer steps behind it; `callable`: torch.cuda.make_graphed_callables made graphs of the model's
               forward and backward. That their rows arrive is checked. Then what modules inside would cost: `gated`, a
               graph of forward and backward with a launch behind every block, its gate closed and open. An optimizer
               inside the graph is not among them: no Python runs at a replay, so nothing is measured and nothing added

Beside the ratios, in percent of the step: our budget, and what a reference adds whose statistics are fused into the trainer,
on one H100 and such a model: 2.1 for params and wgrads, 19 for all four groups (taken over, not measured here).
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import results
import torch
from dense import VARIANTS, Training, steps_of

from sentinel.collect.kernels import choose_kernel
from sentinel.collect.rows.buffer import StepRows
from sentinel.ingest.follow import RunFollower
from sentinel.record import ROW_DTYPE, Kind
from sentinel.wire.frame import FrameType

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
COMPILED = ("params + wgrads", "black box", "default", "four groups, every step", "attached, everything off")
CHILD_S = 60
GRAPHED = ("without", "attached, everything off", "params + wgrads", "default")


def fitting(options: argparse.Namespace, result: results.Result) -> Training:
    """Return a training whose step memory holds with everything measured: the batch is halved until it does."""
    training = Training(options, "1b", options.batch)
    while True:
        try:
            steps_of(training, 2, VARIANTS["everything, every step"], "sized")
            break
        except torch.OutOfMemoryError:
            if training.batch == 1:
                raise
        # Behind the handler: the error holds all that its frames hold, the step's activations among it.
        training.optimizer.zero_grad()
        training.halve_batch()
        gc.collect()
        torch.cuda.empty_cache()
        print(f"memory does not hold that many sequences: {training.batch} from now on")
    result.note("parameters", training.num_parameters)
    result.note("tokens", training.batch * training.sequence)
    print(f"{training.num_parameters / 1e9:.2f}e9 parameters, batch {training.batch} x {training.sequence}")
    return training


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


def eager(options: argparse.Namespace, result: results.Result) -> str:
    """Let the variants take turns until the time is up."""
    training = fitting(options, result)
    result.note("floor", floor(training))
    return said(in_turns(options, training, tuple(VARIANTS), options.most_s, lambda table: result.note("variants", table)))


def in_turns(
    options: argparse.Namespace, training: Training, names: tuple[str, ...], most_s: float, note: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """Return the table of some variants that take turns until the time is up; `note` is given it after every round."""
    times: dict[str, list[float]] = {name: [] for name in names}
    began, table = time.perf_counter(), []
    for turn in range(options.rounds + 1):
        if turn > 1 and (time.perf_counter() - began) * (turn + 1) / turn > most_s:
            break
        took = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took[name] = steps_of(
                training, options.steps, VARIANTS[name], f"{type(training).__name__}-{turn}-{names.index(name)}"
            )
        if turn:  # The first round compiles kernels.
            for name, seconds in took.items():
                times[name].append(seconds)
            print(f"round {turn}")
            table = table_of(times, times["without"])
            note(table)
    return table


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


def compiled(options: argparse.Namespace, result: results.Result) -> str:
    """Compile and time one variant after the other, the bare model first and last."""
    training = fitting(options, result)
    seconds: dict[str, float] = {}
    compile_s: dict[str, float] = {}
    bare: list[float] = []
    longest, ends_at = 0.0, time.perf_counter() + options.most_s
    for turn, name in enumerate(("without", *COMPILED, "without")):
        # The bare model once more must fit as well.
        if name != "without" and time.perf_counter() + 2 * longest > ends_at:
            continue
        turn_began = time.perf_counter()
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
        longest = max(longest, time.perf_counter() - turn_began)
        result.note("seconds", {"bare": bare, **seconds})
        result.note("compile_s", compile_s)
        print(f"{name}: {1e3 * took:.2f} ms a step; {compile_s[f'{turn} {name}']} s for the first three")
    mean = statistics.fmean(bare)
    table = table_of({name: [took] for name, took in seconds.items()}, [mean])
    result.note("variants", table)
    late = [name for name in COMPILED if name not in seconds]
    return f"{said(table)}; the bare model twice: {100 * (bare[1] / bare[0] - 1):+.2f} %" + (
        f"; not reached: {', '.join(late)}" if late else ""
    )


class Replayed(Training):
    """Forward and backward are captured once and replayed; the optimizer steps behind them, as ever."""

    def __init__(self, options: argparse.Namespace, size: str, batch: int) -> None:
        super().__init__(options, size, batch)
        if self.device == "cuda":
            self._replay, self._loss = captured_pass(self)
        else:
            self._replay, self._loss = self._unseen(), torch.zeros(())

    def _unseen(self) -> Callable[[], None]:
        """Return what a replay is to Sentinel: gradients change, and neither a module nor autograd calls anything."""
        self.call = unhooked(self.model)
        own = list(self.model.parameters())

        def replay() -> None:
            for parameter, gradient in zip(own, torch.autograd.grad(self.loss(), own), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(gradient)
                parameter.grad.data.copy_(gradient)  # As a graph writes: no version changes.

        return replay

    def step(self, monitor: Any = None) -> torch.Tensor:
        self._replay()
        self.optimizer.step()
        if monitor is not None:
            monitor.log(loss=self._loss)
        return self._loss


class GraphedCallable(Training):
    """The model's forward and its backward are a graph each; loss and optimizer are as ever."""

    def __init__(self, options: argparse.Namespace, size: str, batch: int) -> None:
        super().__init__(options, size, batch)
        if self.device == "cuda":
            self.call = torch.cuda.make_graphed_callables(self.model, (self.tokens[:, :-1].contiguous(),))
        else:
            self.call = unhooked(self.model)


def unhooked(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model of the same parameters that no hook of the first one sees: what stands for a graph on a CPU."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def captured_pass(training: Training) -> tuple[Callable[[], None], torch.Tensor]:
    """Capture forward and backward; return what replays them, and the loss that a replay writes."""
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
        loss = training.loss()
        loss.backward()
    return captured.replay, loss.detach()


def graph(options: argparse.Namespace, result: results.Result) -> str:
    """Time steps whose forward and backward are replayed, and launches inside a graph."""
    sentences = []
    for name, form in (("replayed", Replayed), ("callable", GraphedCallable)):
        training = that_fits(form, options)
        result.note(f"{name}_tokens", training.batch * training.sequence)
        steps_of(training, 2, VARIANTS["params + wgrads"], f"checked-{name}")
        check_rows(Path(os.environ["SENTINEL_DIR"]) / f"checked-{name}", training)
        print(f"{name}, batch {training.batch} x {training.sequence}")
        noted = f"{name}_variants"
        table = in_turns(
            options, training, GRAPHED, options.most_s / 3, lambda table, noted=noted: result.note(noted, table)
        )
        sentences.append(f"{name}: {said(table)}")
        del training
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    sentences.append(gated_launches(options, result))
    sentences.append(in_a_child(options, "captured-while-attached"))
    result.note("captured_while_attached", sentences[-1])
    return "; ".join(sentences)


def that_fits(form: Callable[..., Training], options: argparse.Namespace) -> Training:
    """Return a training of as many sequences as memory holds."""
    batch = options.batch
    while True:
        try:
            return form(options, "1b", batch)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        # Behind the handler: the error holds all that its frames hold.
        batch //= 2
        gc.collect()
        torch.cuda.empty_cache()
        print(f"memory does not hold that many sequences: {batch} from now on")


def check_rows(run_dir: Path, training: Training) -> None:
    """Expect a row of every parameter and of every gradient for each step: what is not measured costs nothing."""
    follower, found = RunFollower(run_dir), Counter[tuple[int, int]]()
    while records := follower.poll(final=True):
        for record in records:
            if record.frame.header.type == FrameType.ROWS:
                rows = np.frombuffer(record.frame.payload, ROW_DTYPE)
                found.update((record.frame.header.step, int(kind)) for kind in rows["kind"][rows["count"] > 0])
    number = len(list(training.model.parameters()))
    expected = {(step, int(kind)): number for step in range(4) for kind in (Kind.PARAM, Kind.WGRAD)}
    if found != expected:
        raise SystemExit(f"expected {number} parameters and gradients a step, got {dict(found)}")


def gated_launches(options: argparse.Namespace, result: results.Result) -> str:
    """Time replays of a captured forward and backward: plain, and with gated launches behind every block."""
    if options.device != "cuda":
        return "launches inside a graph need a GPU"
    from sentinel.collect.kernels.triton_kernel import CaptureSwitch, TritonKernel

    kernel = choose_kernel("cuda")
    assert isinstance(kernel, TritonKernel), kernel.name
    # A graph keeps the memory of a whole step, and there are two.
    training = Training(options, "1b", max(1, options.batch // 8))
    blocks = list(training.model.blocks)
    rows = StepRows(len(blocks))
    for row in range(len(blocks)):
        rows.add(row, Kind.ACTIVATION, 0, 0, row, row)
    gate = CaptureSwitch(torch.device("cuda", torch.cuda.current_device()))
    handles = [
        block.register_forward_hook(lambda module, args, out, row=row: kernel.capture(out.detach(), gate, row))
        for row, block in enumerate(blocks)
    ]
    gated, _ = captured_pass(training)
    for handle in handles:
        handle.remove()
    plain, _ = captured_pass(training)
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
    result.note("gated", {"plain_ms": base * 1e3, "launches": len(blocks), **cell})
    return f"gated: {len(blocks)} launches in {base * 1e3:.1f} ms: closed {cell['closed']:.4f}, open {cell['open']:.4f}"


def in_a_child(options: argparse.Namespace, form: str) -> str:
    """Return what a form says in a process of its own: whatever it breaks there breaks nothing here."""
    command = [sys.executable, __file__, "--form", form, "--device", options.device, *(["--tiny"] if options.tiny else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=CHILD_S)
    except subprocess.TimeoutExpired:
        return f"{form}: hung for {CHILD_S} s"
    said = (done.stdout.strip() or done.stderr.strip() or "it said nothing").splitlines()[-1]
    return said if done.returncode == 0 else f"{form}: ended with code {done.returncode}: {said[:200]}"


def capture_while_attached(options: argparse.Namespace, result: results.Result) -> str:
    """Say what becomes of a capture that begins while rows are on their way to the thread that writes them.

    A capture fails where another thread makes a call that CUDA does not allow during one. On a CPU nothing is captured.
    """
    training = Training(options, "small", 4)
    monitor = training.attach(VARIANTS["default"], "captured")
    for _ in range(3):
        training.step(monitor)
    try:
        replay, loss = captured_pass(training) if options.device == "cuda" else (training.step, torch.zeros(()))
        for _ in range(3):
            replay()
            training.optimizer.step()
    except RuntimeError as error:
        return f"a capture while attached fails: {str(error).splitlines()[0][:160]}"
    words = f"a capture while attached works, loss {float(loss):.3f}"
    monitor.detach()
    return words


FORMS = {"eager": eager, "compiled": compiled, "graph": graph, "captured-while-attached": capture_while_attached}
"""The last one is called by `graph`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=sorted(FORMS), default="eager")
    parser.add_argument("--batch", type=int, default=14, help="sequences a step")
    parser.add_argument("--rounds", type=int, default=8, help="rounds at most; one more warms up")
    parser.add_argument("--steps", type=int, default=10, help="steps of a variant in a round that count; two warm up")
    parser.add_argument("--most-s", type=float, default=220.0, help="begin no round that would end later than this")
    options = results.options_of(parser)
    if options.tiny:
        options.rounds, options.steps = 1, 2
    result = results.Result("step-time" if options.form == "eager" else f"step-time-{options.form}", options)
    result.note("kernel", choose_kernel(options.device).name)
    with tempfile.TemporaryDirectory(prefix="sentinel-gpu-step-time-") as folder:
        os.environ["SENTINEL_DIR"] = folder
        result.complete(FORMS[options.form](options, result))


if __name__ == "__main__":
    main()
