"""Bandwidth of the GPU's kernel against a copy on the device, for one tensor and for all of a 1B model.

    python benchmarks/gpu/bandwidth.py      # 24 GB of the GPU's memory

A copy of n bytes moves 2n; the kernel reads n. `share` is the kernel's bytes a second over the copy's, in turns in one run:
1.00 reads as fast as memory can be read and written. Launches are captured in a CUDA graph and replayed, each on another
tensor until half a gigabyte is through, so that neither launching nor caches are measured. `host` is the time of a launch
for one tensor on the host.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import results
import torch

from sentinel.collect.kernels import Kernel, TorchKernel, choose_kernel
from sentinel.collect.rows.buffer import StepRows
from sentinel.record import Kind

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROTATED_BYTES = 1 << 29


def rows_for(number: int, buffer: Callable[[int], StepRows] = StepRows) -> StepRows:
    """Return a buffer with `number` rows begun."""
    rows = buffer(number)
    for row in range(number):
        rows.add(row, Kind.PARAM, 0, -1, row, row)
    return rows


def shapes_of_1b(tiny: bool) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a dense model of 1.0e9 parameters."""
    width, layers, words = (2048, 16, 50_304) if not tiny else (32, 2, 100)
    block = [(width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width)]
    return [(words, width), *(block * layers), (width,), (words, width)]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).partition(".")[2]


def captured(task: Callable[[], object], device: str) -> Callable[[], object]:
    """Return what replays `task` as a CUDA graph."""
    if device != "cuda":
        return task
    task()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        task()
    return graph.replay


def bandwidth(options: argparse.Namespace, kernel: Kernel, result: results.Result) -> list[dict[str, Any]]:
    """Measure one tensor a launch, sizes 1e5 to 1e9."""
    sizes = [1000, 20_000] if options.tiny else [10**5, 10**6, 10**7, 10**8, 10**9]
    table = []
    print(f"{'elements':>9} {'dtype':>9} {'copy GB/s':>10} {'read GB/s':>10} {'share':>6} {'+checksum':>9} {'us':>8}  range")
    for size in sizes:
        for dtype in DTYPES:
            nbytes = size * dtype.itemsize
            if nbytes > 4 << 30:
                continue
            number = max(1, min(64, ROTATED_BYTES // nbytes)) if options.device == "cuda" else 2
            sources = [torch.randn(size, device=options.device, dtype=torch.float32).to(dtype) for _ in range(number)]
            target = torch.empty_like(sources[0])
            rows = rows_for(number)
            tasks = {
                "copy": captured(lambda sources=sources, target=target: [target.copy_(x) for x in sources], options.device),
                "read": launches(kernel, sources, rows, options.device, checksum=False),
                "checksum": launches(kernel, sources, rows, options.device, checksum=True),
            }
            rounds, repeats = (2, 1) if options.tiny else (9, 5)
            took = results.medians(tasks, options.device, rounds=rounds, repeats=repeats)
            copied = 2 * nbytes * number / took["copy"][0]
            share = {name: nbytes * number / took[name][0] / copied for name in ("read", "checksum")}
            table.append(
                {
                    "elements": size, "dtype": name_of(dtype), "tensors": number, "copy_gb_s": round(copied / 1e9, 1),
                    "read_gb_s": round(nbytes * number / took["read"][0] / 1e9, 1), "share": round(share["read"], 3),
                    "share_checksum": round(share["checksum"], 3), "us": round(took["read"][0] / number * 1e6, 2),
                    "us_least": round(took["read"][1] / number * 1e6, 2),
                    "us_most": round(took["read"][2] / number * 1e6, 2),
                }
            )  # fmt: skip
            cell = table[-1]
            result.note("bandwidth", table)
            print(
                f"{size:>9.0e} {cell['dtype']:>9} {cell['copy_gb_s']:>10} {cell['read_gb_s']:>10} {cell['share']:>6.2f} "
                f"{cell['share_checksum']:>9.2f} {cell['us']:>8}  {cell['us_least']} - {cell['us_most']}"
            )
    return table


def launches(
    kernel: Kernel, sources: list[torch.Tensor], rows: StepRows, device: str, *, checksum: bool
) -> Callable[[], object]:
    """Return what measures each tensor once: replayed from a graph where there is one."""
    if device != "cuda" or isinstance(kernel, TorchKernel):
        return lambda: [kernel.measure((x,), rows, row, checksum=checksum) for row, x in enumerate(sources)]
    from sentinel.collect.kernels.triton_kernel import CaptureSwitch, TritonKernel

    assert isinstance(kernel, TritonKernel)
    gate = CaptureSwitch(torch.device("cuda", torch.cuda.current_device()))
    gate.open(rows.on(sources[0].device), range(len(sources)))
    return captured(lambda: [kernel.capture(x, gate, row, checksum=checksum) for row, x in enumerate(sources)], device)


def many(options: argparse.Namespace, kernel: Kernel) -> list[dict[str, Any]]:
    """Measure all parameters of a 1B model in one call."""
    table = []
    print("\nparameters of a 1B dense model, one call")
    print(f"{'dtype':>9} {'tensors':>7} {'ms':>8} {'copy ms':>8} {'share':>6} {'call us':>8}")
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.randn(shape, device=options.device).to(dtype) for shape in shapes_of_1b(options.tiny)]
        flat = torch.cat([x.view(-1) for x in tensors])
        target = torch.empty_like(flat)
        rows = rows_for(len(tensors))
        called: list[float] = []

        def call(tensors: list[torch.Tensor] = tensors, rows: StepRows = rows, called: list[float] = called) -> None:
            began = time.perf_counter()
            kernel.measure(tensors, rows, 0, checksum=True)
            called.append(time.perf_counter() - began)

        took = results.medians(
            {"copy": lambda target=target, flat=flat: target.copy_(flat), "call": call}, options.device,
            rounds=2 if options.tiny else 9, repeats=1 if options.tiny else 5,
        )  # fmt: skip
        # A copy moves twice the bytes; what counts is bytes a second.
        share = took["copy"][0] / 2 / took["call"][0]
        table.append(
            {
                "dtype": name_of(dtype), "tensors": len(tensors), "elements": flat.numel(), "ms": took["call"][0] * 1e3,
                "copy_ms": took["copy"][0] * 1e3, "share": round(share, 3), "call_us": float(np.median(called)) * 1e6,
            }
        )  # fmt: skip
        cell = table[-1]
        print(
            f"{cell['dtype']:>9} {cell['tensors']:>7} {cell['ms']:>8.3f} {cell['copy_ms']:>8.3f} {share:>6.2f} "
            f"{cell['call_us']:>8.0f}"
        )
        del tensors, flat, target
    return table


def host_time(options: argparse.Namespace, kernel: Kernel) -> dict[str, float]:
    """Return microseconds of the host for a launch for one tensor, and for a sum: with nothing in the device's way."""
    x = torch.ones(1000, device=options.device)
    number = 20 if options.tiny else 500
    rows = rows_for(number)
    cell = {}
    tasks = {"measure": lambda row: kernel.measure((x,), rows, row), "sum": lambda row: x.sum()}
    for name, task in tasks.items():
        best = float("inf")
        for _ in range(5):
            results.synchronize(options.device)
            began = time.perf_counter()
            for row in range(number):
                task(row)
            best = min(best, (time.perf_counter() - began) / number)
        cell[name] = best * 1e6
    print(f"\nhost, one tensor of 1000 elements: {cell['measure']:.2f} us a launch; its sum() {cell['sum']:.2f} us")
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = results.options_of(parser)
    result = results.Result("bandwidth", options)
    kernel = choose_kernel(options.device)
    result.note("kernel", kernel.name)
    result.note("host_us", host_time(options, kernel))
    together = many(options, kernel)
    result.note("many", together)
    alone = bandwidth(options, kernel, result)
    # Sizes grow: the last of a type is its largest.
    largest = {cell["dtype"]: cell["share"] for cell in alone}
    said = ", ".join(f"{dtype} {share:.2f}" for dtype, share in largest.items())
    many_said = ", ".join(f"{cell['dtype']} {cell['share']:.2f}" for cell in together)
    result.complete(f"of a copy's bytes a second (>= 0.85): {said}; parameters of 1B in one call: {many_said}")


if __name__ == "__main__":
    main()
