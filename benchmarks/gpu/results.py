"""What the parts share: the machine in words, time on a device, and dated results that a later call finds again.

python benchmarks/gpu/results.py [--device cpu]     prints what is known of the machine, as JSON
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run_all import SAME

ROOT = Path(__file__).parents[2]


class Result:
    """What a part has measured so far. It is on disk after every piece: a part that is cut short leaves what it had."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        # Here, where a part has imported it: what asks for the machine alone needs nothing but torch.
        from sentinel.native import implementation

        self.cell: dict[str, Any] = {"part": name, "is_complete": False, "headline": "", **about(options)}
        self.cell["host"] = implementation
        self._out: Path | None = options.out
        self.before = self._found_before()
        """What a call before had measured that was cut short: on this machine today, of the same sources. Or empty."""
        self._began = time.perf_counter()
        self._write()

    def _found_before(self) -> dict[str, Any]:
        if self._out is None:
            return {}
        try:
            before = json.loads((self._out / f"{self.cell['date']}-gpu-{self.name}.json").read_text())
        except (OSError, ValueError):
            return {}
        is_of_here = isinstance(before, dict) and all(before.get(key) == self.cell[key] for key in SAME)
        return before if is_of_here and not before.get("is_complete") else {}

    def note(self, key: str, value: Any) -> None:
        """Keep a piece of the result under a key."""
        self.cell[key] = value
        self._write()

    def complete(self, headline: str) -> None:
        """Say in one line what came out: nothing more is measured."""
        self.cell.update(headline=headline, seconds=round(time.perf_counter() - self._began, 1), is_complete=True)
        self._write()
        print(headline)

    def _write(self) -> None:
        if self._out is None:
            return
        self._out.mkdir(parents=True, exist_ok=True)
        path = self._out / f"{self.cell['date']}-gpu-{self.name}.json"
        path.with_suffix(".tmp").write_text(json.dumps(self.cell, indent=2) + "\n")
        path.with_suffix(".tmp").replace(path)


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line with what every part takes besides; the process ends where the device is not there."""
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes: shows that the script runs, and nothing else")
    parser.add_argument("--out", type=Path, help="directory for <date>-gpu-NAME.json; default: written nowhere")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("needs an NVIDIA GPU; --device cpu --tiny shows that the script runs")
    return options


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return date, machine, versions, and a digest of the code that is measured."""
    if options.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        memory = properties.total_memory >> 30
        machine = f"{properties.name}, {properties.multi_processor_count} multiprocessors, {memory} GiB"
    else:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "is_dry_run": options.tiny or options.device == "cpu",
        "code": code_digest(),
    }


def code_digest() -> str:
    """Return a digest of Sentinel's own sources: figures of other sources are of another program."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "sentinel").rglob("*")):
        if path.suffix in (".py", ".c", ".h"):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def synchronize(device: str) -> None:
    """Wait for everything on the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(task: Callable[[], object], device: str, repeats: int) -> float:
    """Return the time of one call on the device: between events around `repeats` calls."""
    if device != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            task()
        return (time.perf_counter() - began) / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        task()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def medians(tasks: dict[str, Callable[[], object]], device: str, *, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return median, least and greatest time of each task; the tasks take turns, and the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds + 1):
        for name, task in tasks.items():
            took = seconds_of(task, device, repeats)
            if turn:
                times[name].append(took)
    return {name: [statistics.median(own), min(own), max(own)] for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    print(json.dumps(about(options_of(parser))))


if __name__ == "__main__":
    main()
