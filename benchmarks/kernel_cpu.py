"""What measuring costs on a CPU, as a multiple of `x.sum()` in the same process, taken in turns.

    python benchmarks/kernel_cpu.py [--largest 1e8] [--seconds 1.0]

Claims: native <= 1.5x sum() in fp32 and <= 3x in bf16 from 1e7 elements on; the plain torch fallback <= 20x in fp32;
one call for 500 tensors beats 500 calls. Best of many rounds each: other work on the machine adds to all alike.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sentinel.collect.buffer import StepRows
from sentinel.collect.kernels import Kernel, NativeKernel, TorchKernel
from sentinel.record import Kind


def machine() -> str:
    """Return the CPU's model and the number of cores this process may use."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def best_of(tasks: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the shortest time of each task in seconds; the tasks take turns until `seconds` each are spent."""
    best = dict.fromkeys(tasks, float("inf"))
    end = time.perf_counter() + seconds * len(tasks)
    rounds = 0
    while rounds < 2 or time.perf_counter() < end:
        for name, task in tasks.items():
            task()  # brings code and data back into the caches after the other tasks
            for _ in range(3):
                start = time.perf_counter()
                task()
                best[name] = min(best[name], time.perf_counter() - start)
        rounds += 1
    return best


def rows_for(num: int) -> StepRows:
    """Return a buffer with `num` rows begun."""
    rows = StepRows(num)
    for row in range(num):
        rows.add(row, Kind.PARAM, 0, -1, row, row)
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=float, default=1e8, help="most elements of one tensor")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each cell of the table")
    options = parser.parse_args()

    native, plain = NativeKernel(), TorchKernel()
    print(f"{datetime.date.today()}; {machine()}; torch {torch.__version__}; {native.name}; load {os.getloadavg()[0]:.1f}")
    print(f"{'elements':>9} {'dtype':>9} {'threads':>7} {'sum us':>9} {'native':>7} {'+checksum':>9} {'torch ops':>9}")
    for num_threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(num_threads)
        for size in (n for n in (10**4, 10**6, 10**7, 10**8) if n <= options.largest):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(size).to(dtype)
                rows = rows_for(1)

                def measure(kernel: Kernel, x: torch.Tensor = x, rows: StepRows = rows, checksum: bool = False) -> None:
                    kernel.measure((x,), rows, 0, checksum=checksum)

                best = best_of(
                    {
                        "sum": x.sum,
                        "native": lambda measure=measure: measure(native),
                        "checksum": lambda measure=measure: measure(native, checksum=True),
                        "torch": lambda measure=measure: measure(plain),
                    },
                    options.seconds,
                )
                ratios = [best[name] / best["sum"] for name in ("native", "checksum", "torch")]
                print(
                    f"{size:>9.0e} {str(dtype).partition('.')[2]:>9} {num_threads:>7} {best['sum'] * 1e6:>9.1f} "
                    f"{ratios[0]:>6.2f}x {ratios[1]:>8.2f}x {ratios[2]:>8.1f}x"
                )

    tensors = [torch.randn(10_000) for _ in range(500)]
    rows = rows_for(500)

    def one_by_one() -> None:
        for row, tensor in enumerate(tensors):
            native.measure((tensor,), rows, row)

    best = best_of(
        {
            "500 sum() calls": lambda: [x.sum() for x in tensors],
            "500 tensors in one call": lambda: native.measure(tensors, rows, 0),
            "500 calls": one_by_one,
        },
        options.seconds,
    )
    for name, seconds in best.items():
        print(f"{name:>24}, 1e4 fp32 each: {seconds * 1e6:8.0f} us, {seconds / best['500 sum() calls']:.2f}x")
    small = torch.randn(64)
    best = best_of({"sum": small.sum, "one": lambda: native.measure((small,), rows, 0)}, options.seconds)
    print(f"one tensor of 64 elements: {best['one'] * 1e6:.2f} us; its sum() {best['sum'] * 1e6:.2f} us")


if __name__ == "__main__":
    main()
