"""Runs the parts one after the other, each in a process with a time limit, and prints one table. Called by run_all.sh.

A part is done when its result is complete, of this machine and of Sentinel's sources as they are now; it is not run again,
unless --again asks for it. A part that fails, or takes too long, is recorded with its last words, and the next one runs.
"""

from __future__ import annotations

import argparse
import collections
import difflib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ATTACHING = ("torch", "numpy", "msgspec", "yaml")
"""What attaching imports."""
COMMAND_LINE = ("click", "rich", "requests", "starlette", "uvicorn", "prometheus_client", "pyarrow")
"""What `sentinel run` and `topk` import besides."""


class Part(NamedTuple):
    """One script, and how it is called."""

    name: str
    script: str
    limit_s: int
    """Seconds after which it is ended: all are below ten minutes."""
    says: str
    args: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    """What it imports besides ATTACHING."""


PARTS = (
    Part("correctness", "correctness", 540, "the kernel against float64, all types and layouts; the same bits twice",
         packages=("triton", "pytest", "hypothesis")),
    Part("step-time", "step_time", 560, "1B dense model, bf16, 28k tokens: what a variant adds", ("--form", "eager")),
    Part("bandwidth", "bandwidth", 300, "the kernel's bytes a second against a copy's, one tensor and many in one call"),
    Part("no-wait", "no_wait", 240, "the training thread never waits for the device"),
    Part("same-training", "same_training", 240, "losses and weights bit-identical with everything measured"),
    Part("crash", "crash", 540, "a device assert and an illegal access: what is on disk", packages=("triton",)),
    Part("memory", "memory", 300, "memory of the device added, allocations a step"),
    Part("origin", "origin", 420, "a NaN planted on the device: topk names the module", packages=COMMAND_LINE),
    Part("step-time-compiled", "step_time", 560, "the same step under torch.compile", ("--form", "compiled")),
    Part("step-time-graph", "step_time", 300, "a CUDA graph with gated launches", ("--form", "graph")),
    Part("variants", "variants", 580, "variants of the kernel: threads, registers, programs", packages=("triton",)),
    Part("waiting", "waiting", 180, "how long ranks wait: a process alone, two on one device, a stream held up"),
)  # fmt: skip
"""By worth: what is cut off is worth least."""
LAST_LINES = 40
"""Lines of a failed part's output that its record keeps."""


def main() -> None:
    options = parse_options()
    if options.list:
        list_parts()
        return
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    machine = machine_of(options)
    print(f"{machine['machine']}; torch {machine['torch']}; triton {machine['triton']}; results in {options.out}")
    ends_at = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    states: dict[str, str] = {}
    for part in chosen:
        if not options.again and find_done(part, options.out, machine) is not None:
            states[part.name] = "done before"
            continue
        left_s = ends_at - time.monotonic()
        if left_s < 30:
            states[part.name] = "not begun"
            continue
        print(f"\n== {part.name}: {part.says}", flush=True)
        states[part.name] = run(part, options, machine, min(part.limit_s, left_s))
    print_table(chosen, states, options.out, machine)
    sys.exit(any(state in ("failed", "not begun") for state in states.values()))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_all.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the parts and what is missing here, and run nothing")
    add("--only", nargs="+", metavar="NAME", default=[], help="run these parts alone")
    add("--again", action="store_true", help="run what was done before once more")
    add("--dry", action="store_true", help="on a CPU, tiny: shows that the parts run, and measures nothing")
    add("--out", type=Path, default=HERE.parent / "results", help="directory of the results; default: benchmarks/results")
    add("--minutes", type=float, default=0.0, help="end after so many minutes, a part that runs then included; 0: none")
    options = parser.parse_args()
    names = [part.name for part in PARTS]
    for name in options.only:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            parser.error(
                f'--only: unknown part "{name}"; '
                + (f'did you mean "{near[0]}"?' if near else f"known are {', '.join(names)}")
            )
    if options.minutes < 0:
        parser.error(f"--minutes must be at least 0, got {options.minutes}")
    options.out = options.out.resolve()
    return options


def list_parts() -> None:
    for part in PARTS:
        needed = (*ATTACHING, *part.packages)
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        print(
            f"{part.name:<20} {part.limit_s:>4} s   {part.says}" + (f"   MISSING: {', '.join(missing)}" if missing else "")
        )


def machine_of(options: argparse.Namespace) -> dict[str, Any]:
    """Ask a process of its own, so that none of the device's memory is taken here."""
    command = [sys.executable, str(HERE / "results.py"), *device_args(options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"run_all.sh: {done.stderr.strip() or 'the device cannot be asked'}")
    machine: dict[str, Any] = json.loads(done.stdout)
    return machine


def device_args(options: argparse.Namespace) -> list[str]:
    return ["--device", "cpu", "--tiny"] if options.dry else []


def results_of(part: Part, out: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return a part's results, oldest first; a file that cannot be read is named and left out."""
    found = []
    for path in sorted(out.glob(f"20*-gpu-{part.name}.json")):
        try:
            cell = json.loads(path.read_text())
            if not isinstance(cell, dict):
                raise ValueError(f"expected an object, got {type(cell).__name__}")
        except (OSError, ValueError) as error:
            print(f"{path}: not a result, taken for none: {error}", file=sys.stderr)
            continue
        found.append((path, cell))
    return found


def find_done(part: Part, out: Path, machine: dict[str, Any]) -> dict[str, Any] | None:
    """Return the newest complete result of this machine and of these sources; None: there is none."""
    same = ("machine", "torch", "is_dry_run", "code")
    done = [
        cell for _, cell in results_of(part, out)
        if cell.get("is_complete") is True and all(cell.get(key) == machine[key] for key in same)
    ]  # fmt: skip
    return done[-1] if done else None


def run(part: Part, options: argparse.Namespace, machine: dict[str, Any], limit_s: float) -> str:
    """Run a part to its end or its limit, and return how it went; what failed is recorded."""
    command = [sys.executable, str(HERE / f"{part.script}.py"), *part.args, *device_args(options), "--out", str(options.out)]
    # Tiny tensors gain nothing by threads, which spin where other programs have the cores.
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if options.dry else {})}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment,
        start_new_session=True,
    )  # fmt: skip
    has_run_out = threading.Event()

    def end() -> None:
        has_run_out.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.start()
    lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            print(line, end="", flush=True)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0 and find_done(part, options.out, machine) is not None:
        return "done"
    why = f"ended after {limit_s:.0f} s, its limit" if has_run_out.is_set() else f"ended with code {code}"
    record_failure(part, options.out, machine, f"{why}: {lines[-1] if lines else 'it said nothing'}", list(lines))
    print(f"== {part.name} {why}", flush=True)
    return "failed"


def record_failure(part: Part, out: Path, machine: dict[str, Any], why: str, lines: list[str]) -> None:
    """Keep what a part had measured by then, and say how it ended."""
    path = out / f"{machine['date']}-gpu-{part.name}.json"
    before = [cell for other, cell in results_of(part, out) if other == path]
    cell = {"part": part.name, **machine, **(before[0] if before else {})}
    cell.update(is_complete=False, headline="", error=why, last_lines=lines)
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cell, indent=2) + "\n")


def print_table(parts: list[Part], states: dict[str, str], out: Path, machine: dict[str, Any]) -> None:
    if machine["is_dry_run"]:
        print("\nA dry run: its figures are of nothing.", end="")
    print(f"\n{'part':<20} {'state':<12} {'s':>6}  result")
    for part in parts:
        cell = find_done(part, out, machine) if states[part.name].startswith("done") else None
        if cell is None:
            newest = results_of(part, out)
            cell = newest[-1][1] if newest and states[part.name] == "failed" else {}
        said = cell.get("headline") or cell.get("error", "")
        print(f"{part.name:<20} {states[part.name]:<12} {cell.get('seconds', ''):>6}  {said}")


if __name__ == "__main__":
    main()
