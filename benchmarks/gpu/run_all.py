"""Runs the parts one after the other, each in a process with a time limit, and prints one table. Called by run_all.sh.

A part is done when its result is complete, of this machine and of Sentinel's sources as they are now; it is not run again,
unless --again asks for it. A part that fails, or takes too long, is recorded with its last words, and the next one runs;
those that failed in an earlier call come last. Where the device does not answer behind a failure, nothing more is begun.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import difflib
import importlib
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
    Part("correctness", "correctness", 240, "the kernel against float64, all types and layouts; the same bits twice",
         packages=("triton", "pytest", "hypothesis")),
    Part("step-time", "step_time", 300, "1B dense model, bf16, 28k tokens: what a variant adds",
         ("--form", "eager", "--most-s", "200")),
    Part("bandwidth", "bandwidth", 150, "the kernel's bytes a second against a copy's, one tensor and many in one call"),
    Part("no-wait", "no_wait", 100, "the training thread never waits for the device"),
    Part("same-training", "same_training", 100, "losses and weights bit-identical with everything measured"),
    Part("memory", "memory", 120, "memory of the device added, allocations a step"),
    Part("origin", "origin", 180, "a NaN planted on the device: topk names the module", packages=COMMAND_LINE),
    Part("crash", "crash", 270, "a device assert and an illegal access: what is on disk", packages=("triton",)),
    Part("variants", "variants", 450, "variants of the kernel: vectors, tiles, threads, registers, programs, passes",
         ("--most-s", "400"), packages=("triton",)),
    Part("step-time-graph", "step_time", 270, "forward and backward as CUDA graphs; launches inside one",
         ("--form", "graph", "--most-s", "150")),
    Part("step-time-compiled", "step_time", 500, "the same step under torch.compile",
         ("--form", "compiled", "--most-s", "360")),
    Part("waiting", "waiting", 180, "how long ranks wait: a process alone, two on one device, a stream held up"),
)  # fmt: skip
"""By worth: what is cut off is worth least. Whatever happens, the first five fit into two calls of ten minutes: two parts,
then three."""
SAME = ("machine", "torch", "is_dry_run", "code")
"""Keys of a result that are alike where it says something of this machine and these sources."""
DIES_S = 10
"""Seconds that a killed part has to go."""
ANSWERS_S = 90
"""Seconds in which the device says what it is."""
LAST_LINES = 40
"""Lines of a failed part's output that its record keeps."""


class Stopped(Exception):
    """Somebody ended this call by a signal."""


def stop(number: int, _: Any) -> None:
    raise Stopped(signal.Signals(number).name)


def main() -> None:
    options = parse_options()
    if options.list:
        list_parts()
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    machine = machine_of(options)
    print(f"{machine['machine']}; torch {machine['torch']}; triton {machine['triton']}; results in {options.out}")
    chosen = [part for part in PARTS if not options.only or part.name in options.only]
    states = dict.fromkeys((part.name for part in chosen), "not begun")
    try:
        run_parts(chosen, states, options, machine)
    except Stopped as signalled:
        print(f"\n== stopped by {signalled}", flush=True)
    finally:
        # Nothing more is to come between here and the table.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    gather(options, machine)
    print_table(chosen, states, options, machine)
    sys.exit(any(state in ("failed", "not begun") for state in states.values()))


def run_parts(chosen: list[Part], states: dict[str, str], options: argparse.Namespace, machine: dict[str, Any]) -> None:
    """Run what is not done yet and fits into the time, and note in `states` how each part went."""
    ends_at = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    for part in sorted(chosen, key=lambda part: has_failed(part, options, machine)):
        if not options.again and find_done(part, options, machine) is not None:
            states[part.name] = "done before"
            continue
        # A part that is cut off in the middle costs its time and says little; a shorter one may fit.
        if time.monotonic() + part.limit_s > ends_at:
            continue
        print(f"\n== {part.name}: {part.says}", flush=True)
        missing = missing_of(part)
        if missing:
            record_failure(part, options, machine, f"cannot import {'; '.join(missing)}", [])
            print(f"== {part.name} cannot import {'; '.join(missing)}", flush=True)
            states[part.name] = "failed"
            continue
        states[part.name] = run(part, options, machine)
        gather(options, machine)
        if states[part.name] == "failed" and not answers(options):
            print("== the device does not answer: nothing more is begun", flush=True)
            return


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
    add("--minutes", type=float, default=0.0, help="begin no part whose limit ends later than so many minutes; 0: none")
    add(
        "--gather",
        type=Path,
        metavar="FILE",
        help="keep all results in this one file too, written anew behind every part; what it holds already counts as done",
    )
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
    if options.gather is not None and options.gather.exists():
        try:
            unpack(options.gather, options.out)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            parser.error(f"--gather: {options.gather} does not hold results: {error!r}")
    return options


def unpack(gathered: Path, out: Path) -> None:
    """Put the results that one file holds beside the others, where there is none of that day."""
    cells = json.loads(gathered.read_text())
    out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if part.name in cells:
            path = out / f"{cells[part.name]['date']}-gpu-{part.name}.json"
            if not path.exists():
                path.write_text(json.dumps(cells[part.name], indent=2) + "\n")


def list_parts() -> None:
    for part in PARTS:
        missing = missing_of(part)
        print(
            f"{part.name:<20} {part.limit_s:>4} s   {part.says}" + (f"   MISSING: {'; '.join(missing)}" if missing else "")
        )


def missing_of(part: Part) -> list[str]:
    """Return the packages that a part needs and that cannot be imported, each with the reason: it may be what one needs."""
    missing = []
    for name in (*ATTACHING, *part.packages):
        try:
            # Torch takes seconds, and whoever asked for the machine has imported it.
            if name != "torch":
                importlib.import_module(name)
            elif importlib.util.find_spec(name) is None:
                raise ImportError(f"No module named {name!r}")
        except Exception as error:
            missing.append(f"{name} ({error})")
    return missing


def machine_of(options: argparse.Namespace) -> dict[str, Any]:
    """Ask a process of its own, so that none of the device's memory is taken here."""
    command = [sys.executable, str(HERE / "results.py"), *device_args(options)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWERS_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"run_all.sh: the device says nothing within {ANSWERS_S} s") from None
    if done.returncode != 0:
        raise SystemExit(f"run_all.sh: {done.stderr.strip() or 'the device cannot be asked'}")
    machine: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return machine


def answers(options: argparse.Namespace) -> bool:
    """Whether the device still says what it is."""
    try:
        machine_of(options)
    except SystemExit as error:
        print(error, flush=True)
        return False
    return True


def device_args(options: argparse.Namespace) -> list[str]:
    return ["--device", "cpu", "--tiny"] if options.dry else []


def results_of(part: Part, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a part's results, oldest first; a file that cannot be read is named and left out."""
    found = []
    for path in sorted(options.out.glob(f"20*-gpu-{part.name}.json")):
        try:
            cell = json.loads(path.read_text())
            if not isinstance(cell, dict):
                raise ValueError(f"expected an object, got {type(cell).__name__}")
        except (OSError, ValueError) as error:
            print(f"{path}: not a result, taken for none: {error}", file=sys.stderr)
            continue
        found.append(cell)
    return found


def of_here(part: Part, options: argparse.Namespace, machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a part's results of this machine and of these sources, oldest first."""
    return [cell for cell in results_of(part, options) if all(cell.get(key) == machine[key] for key in SAME)]


def find_done(part: Part, options: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any] | None:
    """Return the newest complete result of this machine and of these sources; None: there is none."""
    done = [cell for cell in of_here(part, options, machine) if cell.get("is_complete") is True]
    return done[-1] if done else None


def has_failed(part: Part, options: argparse.Namespace, machine: dict[str, Any]) -> bool:
    """Whether the last that was heard of a part, of this machine and of these sources, is a failure."""
    found = of_here(part, options, machine)
    return bool(found) and "error" in found[-1]


def run(part: Part, options: argparse.Namespace, machine: dict[str, Any]) -> str:
    """Run a part to its end or its limit, and return how it went; what failed is recorded."""
    command = [sys.executable, str(HERE / f"{part.script}.py"), *part.args, *device_args(options), "--out", str(options.out)]
    # Tiny tensors gain nothing by threads, which spin where other programs have the cores.
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if options.dry else {})}
    # A group of its own, to be ended as a whole; but of this session: who ends that ends it too.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment,
        process_group=0,
    )  # fmt: skip
    lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
    # Read beside: whatever a part leaves behind may hold the pipe open.
    reader = threading.Thread(target=show, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        why = f"ended with code {process.wait(part.limit_s)}"
    except subprocess.TimeoutExpired:
        why = f"ended after {part.limit_s} s, its limit"
    except Stopped as signalled:
        end(process)
        reader.join(DIES_S)  # What it said lies in the pipe still.
        record_failure(part, options, machine, f"stopped by {signalled}", list(lines), is_fault=False)
        raise
    end(process)
    reader.join(DIES_S)
    if process.returncode == 0 and find_done(part, options, machine) is not None:
        return "done"
    record_failure(part, options, machine, f"{why}: {lines[-1] if lines else 'it said nothing'}", list(lines))
    print(f"== {part.name} {why}", flush=True)
    return "failed"


def show(output: Any, lines: collections.deque[str]) -> None:
    """Print what a part says while it says it, and keep the last of it."""
    for line in output:
        lines.append(line.rstrip("\n"))
        print(line, end="", flush=True)


def end(process: subprocess.Popen[str]) -> None:
    """End what is left of a part; one that hangs in the driver is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(DIES_S)


def record_failure(
    part: Part, options: argparse.Namespace, machine: dict[str, Any], why: str, lines: list[str], *, is_fault: bool = True
) -> None:
    """Keep what a part had measured by then, and say how it ended. is_fault: by its own doing, not by somebody's signal."""
    path = options.out / f"{machine['date']}-gpu-{part.name}.json"
    before: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        before = found if isinstance(found, dict) else {}
    cell = {"part": part.name, **machine, **before}
    cell.update(is_complete=False, headline="", last_lines=lines, **{"error" if is_fault else "stopped": why})
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(cell, indent=2) + "\n")


def newest(part: Part, options: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Return what there is of a part: the newest complete result of this machine and these sources, or the newest at all."""
    done = find_done(part, options, machine)
    found = of_here(part, options, machine)
    return done or (found[-1] if found else {})


def gather(options: argparse.Namespace, machine: dict[str, Any]) -> None:
    """Write all results of this machine and these sources into one file, where one is asked for."""
    if options.gather is None:
        return
    cells = {part.name: cell for part in PARTS if (cell := newest(part, options, machine))}
    options.gather.parent.mkdir(parents=True, exist_ok=True)
    beside = options.gather.with_name(options.gather.name + ".tmp")
    beside.write_text(json.dumps(cells) + "\n")
    beside.replace(options.gather)


def print_table(parts: list[Part], states: dict[str, str], options: argparse.Namespace, machine: dict[str, Any]) -> None:
    if machine["is_dry_run"]:
        print("\nA dry run: its figures are of nothing.", end="")
    print(f"\n{'part':<20} {'state':<12} {'s':>6}  result")
    for part in parts:
        cell = newest(part, options, machine)
        said = cell.get("headline") or cell.get("error") or cell.get("stopped", "")
        print(f"{part.name:<20} {states[part.name]:<12} {cell.get('seconds', ''):>6}  {said}")


if __name__ == "__main__":
    main()
