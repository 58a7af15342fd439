"""What Sentinel adds to a training step beside what msProbe adds: the same model, the same data, the same machine.

    pip install -e '.[bench]' torch==2.13.0
    python benchmarks/overhead_vs_msprobe.py --write      # benchmarks/results/<date>-overhead_vs_msprobe.json

Each contender lives in a process of its own (what it patches, it patches there). The processes take turns, a few steps
each, one at a time, so that a machine that is shared slows all of them alike. A round gives each contender one median
step time; reported is the median over the rounds of its ratio to the bare step of the same round, and its spread. `cpu` is
the same of processor seconds, all threads of the process: who else runs on the machine disturbs it less.
Bytes are those written to disk a step, peak memory is the most that the process ever had resident.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
WGRADS, ACTIVATIONS, IDLE = "weight gradients", "all activations and their gradients", "attached, not due"
OPS = ["min", "max", "mean", "norm", "nans", "zeros"]
MSPROBE: dict[str, dict[str, Any]] = {
    WGRADS: {"wg_distribution": True},
    ACTIVATIONS: {"xy_distribution": True, "all_xy": True},
    IDLE: {"wg_distribution": True, "xy_distribution": True, "all_xy": True, "start_step": 10**6},
}
SENTINEL: dict[str, dict[str, Any]] = {
    WGRADS: {"kinds": ["wgrad"], "black_box": False},
    ACTIVATIONS: {"kinds": ["activation_in", "activation", "dgrad_in", "dgrad"], "black_box": False},
    IDLE: {
        "kinds": ["wgrad", "activation_in", "activation", "dgrad_in", "dgrad"], "black_box": False, "start_step": 10**6,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Added step time, bytes and memory of Sentinel and of msProbe.")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6, help="steps of a contender in a round; the first does not count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
    elif importlib.util.find_spec("msprobe") is None:
        print("msProbe is not installed; pip install -e '.[bench]'", file=sys.stderr)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    names = ["bare", *(f"{tool}: {what}" for what in (WGRADS, ACTIVATIONS, IDLE) for tool in ("msprobe", "sentinel"))]
    arguments = [f"--{key}={getattr(options, key)}" for key in ("width", "layers", "sequence", "batch", "threads")]
    found: dict[str, dict[str, Any]] = {}
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    bare: list[float] = []
    with tempfile.TemporaryDirectory(prefix="sentinel-vs-msprobe-") as folder:
        workers = {name: start(name, arguments, Path(folder) / str(at)) for at, name in enumerate(names)}
        for turn in range(options.rounds + 1):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            times = {name: medians(ask(workers[name], f"run {options.steps}")[1:]) for name in order}
            if turn > 0:  # The first round warms caches up.
                bare.append(times["bare"][0])
                for name in names:
                    ratios[name].append((times[name][0] / times["bare"][0], times[name][1] / times["bare"][1]))
        for name in names:
            found[name] = summary(ratios[name], ask(workers[name], "end"))
            workers[name].wait()
    print(f"bare step {1e3 * statistics.median(bare):.0f} ms, {options.rounds} rounds of {options.steps} steps\n")
    print(f"{'':52s} {'added':>8s} {'p10':>8s} {'p90':>8s} {'cpu':>8s} {'kB/step':>8s} {'peak MB':>8s}")
    for name, one in found.items():
        added, low, high, cpu = (f"{100 * (one[key] - 1):+.1f} %" for key in ("ratio", "p10", "p90", "cpu"))
        kilobytes, megabytes = one["bytes_per_step"] / 1e3, one["peak_mb"]
        print(f"{name:52s} {added:>8s} {low:>8s} {high:>8s} {cpu:>8s} {kilobytes:8.1f} {megabytes:8.0f}")
    shares = {what: [share(found, what, key) for key in ("ratio", "cpu")] for what in (WGRADS, ACTIVATIONS, IDLE)}
    for what, (wall, cpu) in shares.items():
        print(f"{what}: Sentinel adds {wall:.3f} of the step time that msProbe adds, {cpu:.3f} of the processor time")
    if options.write:
        import torch

        date = datetime.date.today().isoformat()
        path = ROOT / "benchmarks" / "results" / f"{date}-overhead_vs_msprobe.json"
        settings = {key: value for key, value in vars(options).items() if key not in ("write", "worker")}
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        step_ms = 1e3 * statistics.median(bare)
        reported = {"settings": settings, "machine": machine, "bare_step_ms": step_ms, "contenders": found, "share": shares}
        path.write_text(json.dumps(reported, indent=1) + "\n")
        print(f"written: {path.relative_to(ROOT)}")


def medians(took: list[list[float]]) -> tuple[float, float]:
    return statistics.median(wall for wall, _ in took), statistics.fmean(cpu for _, cpu in took)


def share(found: dict[str, dict[str, Any]], what: str, key: str) -> float:
    ours, theirs = found[f"sentinel: {what}"][key] - 1, found[f"msprobe: {what}"][key] - 1
    return float(ours / theirs) if theirs > 0 else float("nan")


def summary(ratios: list[tuple[float, float]], end: dict[str, Any]) -> dict[str, Any]:
    ordered, cpu = sorted(wall for wall, _ in ratios), statistics.median(cpu for _, cpu in ratios)
    tenth = max(0, len(ordered) // 10)
    return {
        "ratio": statistics.median(ordered), "p10": ordered[tenth], "p90": ordered[-1 - tenth],
        "cpu": cpu, "bytes_per_step": end["bytes"] / end["steps"], "peak_mb": end["peak_mb"], "last_loss": end["loss"],
    }  # fmt: skip


def start(name: str, arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", name, *arguments], cwd=folder, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=(folder / "stderr").open("w"),
        env={**os.environ, "SENTINEL_DIR": str(folder / "runs")},
    )  # fmt: skip


def ask(worker: subprocess.Popen[str], word: str) -> Any:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(word + "\n")
    worker.stdin.flush()
    for line in worker.stdout:  # A library may print too.
        if line.startswith("@"):
            return json.loads(line[1:])
    raise SystemExit(f"a contender died: {worker.args}")


def work(options: argparse.Namespace) -> None:
    """One contender: trains on command."""
    out = sys.stdout
    sys.stdout = sys.stderr
    import torch

    sys.path.insert(0, str(ROOT / "examples" / "gpt"))
    from data import StandardLibrary
    from model import GPT, GPTConfig, next_token_loss

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=options.width, layers=options.layers, sequence=options.sequence))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = StandardLibrary(options.sequence, options.batch)
    monitor = attach(options.worker, model, optimizer)
    step, loss = 0, None
    for command in sys.stdin:
        verb, _, number = command.strip().partition(" ")
        if verb == "end":
            break
        took = []
        for _ in range(int(number)):
            batch = data.micro_step(step, 0, 0)
            began, began_cpu = time.perf_counter(), time.process_time()
            loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            took.append((time.perf_counter() - began, time.process_time() - began_cpu))
            step += 1
        say(out, took)
    if hasattr(monitor, "detach"):
        monitor.detach()
    written = sum(path.stat().st_size for path in Path.cwd().rglob("*") if path.is_file() and path.name != "stderr")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    say(out, {"bytes": written, "steps": max(step, 1), "peak_mb": peak, "loss": None if loss is None else loss.item()})


def attach(name: str, model: Any, optimizer: Any) -> object:
    tool, _, what = name.partition(": ")
    if tool == "sentinel":
        import sentinel

        return sentinel.attach(model, optimizer, {"run": "benchmark", **SENTINEL[what]})
    if tool == "msprobe":
        from msprobe.pytorch import TrainerMon

        os.environ["MONITOR_OUTPUT_DIR"] = str(Path.cwd() / "out")
        config = {"targets": {}, "format": "csv", "ops": OPS, "ndigits": 16, **MSPROBE[what]}
        Path("config.json").write_text(json.dumps(config))
        monitor = TrainerMon("config.json", params_have_main_grad=False)
        monitor.set_monitor(model, optimizer=optimizer, grad_acc_steps=1)
        return monitor
    return None


def say(out: IO[str], what: Any) -> None:
    out.write("@" + json.dumps(what) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
