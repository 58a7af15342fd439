"""What measuring costs on a CPU, as a multiple of `x.sum()` in the same process with the same threads, taken in turns.

    python benchmarks/kernel_cpu.py [--largest 1e8] [--seconds 0.5] [--threads 1,2]

Claims, checksum included: native <= 1.5x sum() in fp32 and <= 3x in bf16 from 1e7 elements on, never above 5x in cache;
plain torch <= 20x in fp32, bf16 and fp16 from 1e7 on; one call for 500 tensors beats 500 calls of sum(). Best of many
rounds each: other work on the machine adds to all alike. With one thread, what takes longer than a scheduler leaves
alone (1e6 elements and more) is timed by the thread's own clock: without the time in which another process ran.
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

from sentinel import native
from sentinel.collect.kernels import Kernel, NativeKernel, TorchKernel
from sentinel.collect.kernels.native import CODES
from sentinel.collect.rows.buffer import StepRows
from sentinel.native.library import ISAS, Library, find_library
from sentinel.record import ROW_DTYPE, Kind

SIZES = (10**3, 10**4, 10**5, 10**6, 10**7, 10**8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAIVE_MOST = 10**6
"""Naive torch allocates eight tensors as large as the one it measures."""


def machine() -> str:
    """Return the CPU's model and the number of cores this process may use."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def best_of(
    tasks: dict[str, Callable[[], object]], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the shortest time of each task in seconds; the tasks take turns until `seconds` each are spent."""
    best = dict.fromkeys(tasks, float("inf"))
    end = time.perf_counter() + seconds * len(tasks)
    rounds = 0
    while rounds < 2 or time.perf_counter() < end:
        for name, task in tasks.items():
            task()  # brings code and data back into the caches after the other tasks
            for _ in range(3):
                start = clock()
                task()
                best[name] = min(best[name], clock() - start)
        rounds += 1
    return best


def rows_for(num: int) -> StepRows:
    """Return a buffer with `num` rows begun."""
    rows = StepRows(num)
    for row in range(num):
        rows.add(row, Kind.PARAM, 0, -1, row, row)
    return rows


def naive(x: torch.Tensor) -> list[torch.Tensor]:
    """The statistics as one writes them down: two passes over temporaries, nothing careful."""
    f = x.float()
    d = f - f.mean()
    bad = [f.isnan().sum(), f.isposinf().sum(), f.isneginf().sum()]
    return [f.min(), f.max(), (f == 0).sum(), d.pow(2).sum(), d.pow(3).sum(), d.pow(4).sum(), *bad]


def measured_by(kernel: Kernel, x: torch.Tensor, checksum: bool = False) -> Callable[[], object]:
    rows = rows_for(1)
    return lambda: kernel.measure((x,), rows, 0, checksum=checksum)


def measured_with(library: Library, x: torch.Tensor, checksum: bool) -> Callable[[], object]:
    """One instruction set, called as NativeKernel calls the best one."""
    rows = rows_for(1)
    arguments = (x.data_ptr(), x.numel(), CODES[x.dtype], rows.address, 0.0, checksum, False, torch.get_num_threads())
    return lambda: library.measure_one(*arguments)


def budget(dtype: torch.dtype, size: int) -> float | None:
    """Return the largest ratio to sum() that native may have, checksum included."""
    if size >= 10**7:
        return {torch.float32: 1.5, torch.bfloat16: 3.0}.get(dtype)
    return 5.0


def outcome(ratio: float, most: float | None) -> str:
    return "" if most is None else f"{'met' if ratio <= most else 'MISSED'} ({most:g}x)"


def table(libraries: dict[str, Library], largest: float, seconds: float) -> None:
    """Print a line for each dtype and size: sum() in microseconds, every contender as its multiple."""
    kernel, plain = NativeKernel(), TorchKernel()
    head = f"{'elements':>8} {'dtype':>8} {'sum us':>8} {'native':>7} {'+chk':>6}  {'budget':<12}"
    head += "".join(f" {isa + '+chk':>12}" for isa in libraries)
    head += f" {'torch':>7} {'+chk':>6} {'naive':>6}  {'budget, torch':<13}"
    print(f"\nthreads: {torch.get_num_threads()}\n{head}")
    for size in (n for n in SIZES if n <= largest):
        for dtype in DTYPES:
            x = torch.randn(size).to(dtype)
            tasks = {"sum": x.sum, "native": measured_by(kernel, x), "checksum": measured_by(kernel, x, True)}
            tasks |= {isa: measured_with(library, x, True) for isa, library in libraries.items()}
            tasks |= {"torch": measured_by(plain, x), "torch checksum": measured_by(plain, x, True)}
            if size <= NAIVE_MOST:
                tasks["naive"] = lambda x=x: naive(x)
            is_alone = torch.get_num_threads() == 1 and size >= 10**6
            best = best_of(tasks, seconds, time.thread_time if is_alone else time.perf_counter)
            times = {name: best[name] / best["sum"] for name in best}
            line = f"{size:>8.0e} {str(dtype)[6:]:>8} {best['sum'] * 1e6:>8.1f}"
            line += f" {times['native']:>6.2f}x {times['checksum']:>5.2f}x"
            line += f"  {outcome(times['checksum'], budget(dtype, size)):<12}"
            line += "".join(f" {times[isa]:>11.2f}x" for isa in libraries)
            line += f" {times['torch']:>6.1f}x {times['torch checksum']:>5.1f}x"
            line += f" {times['naive']:>5.0f}x" if "naive" in times else "      -"
            most = 20.0 if size >= 10**7 and dtype is not torch.float64 else None
            print(f"{line}  {outcome(times['torch'], most)}", flush=True)


def many(seconds: float) -> None:
    """Print what 500 tensors cost in one call, against 500 calls."""
    kernel = NativeKernel()
    print(f"\n500 tensors, threads {torch.get_num_threads()}")
    for size in (100, 1000, 10_000):
        tensors = [torch.randn(size) for _ in range(500)]
        rows = rows_for(500)
        best = best_of(
            {
                "sum": lambda tensors=tensors: [x.sum() for x in tensors],
                "one": lambda tensors=tensors, rows=rows: kernel.measure(tensors, rows, 0, checksum=True),
                "each": lambda tensors=tensors, rows=rows: [kernel.measure((x,), rows, 0) for x in tensors],
            },
            seconds,
        )
        ratio = best["one"] / best["sum"]
        print(
            f"fp32 of {size:>6} each: 500 sum() calls {best['sum'] * 1e6:>6.0f} us; one call, checksum included, "
            f"{best['one'] * 1e6:>6.0f} us, {ratio:.2f}x, {outcome(ratio, 1.0)}; 500 calls {best['each'] * 1e6:>6.0f} us"
        )


def layouts(seconds: float) -> None:
    """Print what other layouts and other values cost: elements a nanosecond, and the multiple of their own sum()."""
    kernel = NativeKernel()
    x = torch.randn(1000, 1000)
    holes = torch.rand(1000, 1000) < 0.3
    cases = {
        "contiguous fp32": x, "transposed": x.t(), "every other column": torch.randn(1000, 2000)[:, ::2],
        "half of each row": torch.randn(1000, 2000)[:, :1000], "100 of each row": torch.randn(10_000, 200)[:, :100],
        "every third, bf16": torch.randn(1000, 3000).bfloat16()[:, ::3], "channels last, sliced":
        torch.randn(32, 64, 32, 32).to(memory_format=torch.channels_last)[:, ::2], "broadcast": x[0].expand(1000, 1000),
        "int8": (x * 20).to(torch.int8), "int32": (x * 1e6).int(), "int64": (x * 1e6).long(), "bool": holes,
        "fp8 e4m3": x.to(torch.float8_e4m3fn), "after relu": x.relu(), "mean 3 std": x + 3, "1e-20 squares": x**2 * 1e-20,
        "3 in 10 -inf": x.masked_fill(holes, -torch.inf), "20 nans": x.index_fill(0, torch.tensor(5), torch.nan),
        "a ramp": torch.arange(10**6).float(),
    }  # fmt: skip
    print(f"\nother layouts and values, 1e6 elements, checksum included, threads {torch.get_num_threads()}")
    for name, tensor in cases.items():
        summed = tensor if tensor.dtype is not torch.float8_e4m3fn else tensor.view(torch.uint8)
        best = best_of({"sum": summed.sum, "native": measured_by(kernel, tensor, True)}, seconds)
        rate, ratio = tensor.numel() / best["native"] / 1e9, best["native"] / best["sum"]
        print(f"{name:>22}: {best['native'] * 1e6:>7.1f} us, {rate:>6.1f} G/s, {ratio:>5.2f}x its sum()", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=float, default=1e8, help="most elements of one tensor")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each contender in each line")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, of sum() and of the kernels")
    options = parser.parse_args()

    path = find_library()
    every = {} if path is None else {isa: Library(path, isa) for isa in ISAS}
    libraries = {isa: library for isa, library in every.items() if library.implementation == isa}
    print(
        f"{datetime.date.today()}; {machine()}; torch {torch.__version__}; native {native.implementation}; "
        f"row {ROW_DTYPE.itemsize} B; load {os.getloadavg()[0]:.1f}"
    )
    for num_threads in map(int, options.threads.split(",")):
        torch.set_num_threads(num_threads)
        table(libraries, options.largest, options.seconds)
    torch.set_num_threads(1)
    many(options.seconds)
    layouts(options.seconds)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
