"""Variants of the GPU's kernel, timed beside each other: what its parameters allow without another kernel.

    as it is        128 threads a program, 8 vectors of 16 bytes a thread and tile, at most 384 or 512 programs a tensor
    threads N       programs of N threads (N / 32 warps): tiles of N * 128 bytes
    registers N     registers that a thread may have; fewer let more programs share a multiprocessor, and may spill
    programs N      programs of a tensor at most: each goes through its share of the tiles, as a persistent kernel does

Each is a process of its own, because the kernel reads its parameters once, when it is compiled. A tensor of 1e8 elements
(rotated, so that no cache holds it) and the parameters of a 1B model in one call, in fp32 and bf16: the share of a copy's
bytes a second.

Not among them: other widths of vectors (16 bytes is the widest load, and the kernel's main loop is written for eight of
them), and a kernel in two passes (the kernel keeps a tile in registers and passes over memory once; two passes are another
kernel, which could at best reach half of a copy's bytes a second).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import results
import torch

VARIANTS: dict[str, dict[str, int]] = {
    "as it is": {},
    "threads 64": {"threads": 64},
    "threads 256": {"threads": 256},
    "registers 96": {"registers": 96},
    "registers 128": {"registers": 128},
    "registers 168": {"registers": 168},
    "registers 255": {"registers": 255},
    "programs 132": {"programs": 132},
    "programs 264": {"programs": 264},
    "programs 396": {"programs": 396},
    "programs 512": {"programs": 512},
}
VARIANT_S = 60


def take(changes: dict[str, int]) -> None:
    """Set the kernel's parameters, before anything is compiled."""
    import triton.language as tl

    from sentinel.collect.kernels import triton_moments

    if threads := changes.get("threads"):
        triton_moments.THREADS, triton_moments.NUM_WARPS = threads, threads // 32
        triton_moments._THREADS = tl.constexpr(threads)
        triton_moments.TILE_BYTES = threads * triton_moments.STEPS * 16
    if registers := changes.get("registers"):
        triton_moments.MOST_REGISTERS = dict.fromkeys(triton_moments.MOST_REGISTERS, registers)
    if programs := changes.get("programs"):
        triton_moments.MOST_PARTS = dict.fromkeys(triton_moments.MOST_PARTS, programs)


def times(options: argparse.Namespace) -> dict[str, float]:
    """Return shares of a copy's bytes a second, in this process."""
    import bandwidth
    import numpy as np

    from sentinel.collect.kernels.triton_kernel import TritonKernel
    from sentinel.collect.rows.buffer import StepRows
    from sentinel.moments import Moments
    from tests.collect.accelerator import device_rows

    # Under the interpreter tensors of the host are those of a device, and so are the rows.
    buffer = StepRows if options.device == "cuda" else device_rows
    kernel = TritonKernel()
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = bandwidth.name_of(dtype)
        size = 9000 if options.tiny else 10**8
        number = 1 if options.tiny else 4
        sources = [torch.randn(size, device=options.device).to(dtype) for _ in range(number)]
        target = torch.empty_like(sources[0])
        rows = bandwidth.rows_for(number, buffer)
        tasks = {
            "copy": bandwidth.captured(
                lambda sources=sources, target=target: [target.copy_(x) for x in sources], options.device
            ),
            "read": bandwidth.launches(kernel, sources, rows, options.device, checksum=True),
        }
        rounds, repeats = (1, 1) if options.tiny else (9, 5)
        took = results.medians(tasks, options.device, rounds=rounds, repeats=repeats)
        found[f"{name}, one"] = round(took["copy"][0] / 2 / took["read"][0], 3)
        rows.begin_copy()
        assert rows.finish() == 0
        expected = sources[0].double()
        mean, std = float(expected.mean()), float(expected.std(correction=0))
        moments = Moments.from_rows(rows.array)
        assert abs(float(moments.mean()[0]) - mean) < 1e-5 * std and np.isclose(moments.std()[0], std, rtol=1e-5), "wrong"
        del sources, target, expected
        tensors = [torch.randn(shape, device=options.device).to(dtype) for shape in bandwidth.shapes_of_1b(options.tiny)]
        tensors = tensors[:3] if options.tiny else tensors
        flat = torch.cat([x.view(-1) for x in tensors])
        target, rows = torch.empty_like(flat), bandwidth.rows_for(len(tensors), buffer)
        tasks = {
            "copy": lambda target=target, flat=flat: target.copy_(flat),
            "read": lambda tensors=tensors, rows=rows: kernel.measure(tensors, rows, 0, checksum=True),
        }
        took = results.medians(tasks, options.device, rounds=rounds, repeats=repeats)
        found[f"{name}, many"] = round(took["copy"][0] / 2 / took["read"][0], 3)
        del tensors, flat, target
    assert kernel.name == "triton", kernel.name
    return found


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time one variant in a process of its own; what went wrong there is its result."""
    command = [
        sys.executable,
        __file__,
        "--device",
        options.device,
        "--variant",
        name,
        *(["--tiny"] if options.tiny else []),
    ]
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if options.device == "cpu" else {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VARIANT_S, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {VARIANT_S} s"}
    if done.returncode != 0:
        return {"error": done.stderr.strip()[-600:]}
    cell: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=sorted(VARIANTS), help="time this one alone, and print its figures as JSON")
    options = results.options_of(parser)
    if options.variant:
        take(VARIANTS[options.variant])
        print(json.dumps(times(options)))
        return
    result = results.Result("variants", options)
    table: dict[str, dict[str, Any]] = {}
    for name in ("as it is", "threads 256", "programs 132") if options.tiny else VARIANTS:
        table[name] = measured(name, options)
        result.note("variants", table)
        print(f"{name:<14} " + "  ".join(f"{key} {value}" for key, value in table[name].items()))
    timed = {name: cell for name, cell in table.items() if "error" not in cell}
    if "as it is" not in timed:
        raise SystemExit(f"the kernel as it is could not be timed: {table['as it is']['error']}")
    best = {key: max(timed, key=lambda name: timed[name][key]) for key in timed["as it is"]}
    result.complete(
        "; ".join(f"{key}: {timed[name][key]} with {name}, {timed['as it is'][key]} as it is" for key, name in best.items())
        + (f"; {len(table) - len(timed)} could not be timed" if len(timed) < len(table) else "")
    )


if __name__ == "__main__":
    main()
