"""Variants of the GPU's kernel, timed beside each other, so that the better can be chosen by measurement.

Of the product's own kernel, by its parameters:

    as it is        128 threads a program, 8 vectors of 16 bytes a thread and tile, at most 384 or 512 programs a tensor
    threads N       programs of N threads (N / 32 warps): tiles of N * 128 bytes
    registers N     registers that a thread may have; fewer let more programs share a multiprocessor, and may spill
    programs N      programs of a tensor at most: each goes through its share of the tiles, as a persistent kernel does

Of the kernels in other_kernels.py:

    N x M bytes     N vectors of M bytes a thread and tile. Hopper's widest load is 16 bytes: `beside` lays two of those
                    beside each other, which is 32 bytes of a thread in one piece
    not ahead       a tile is loaded when it is summed, not while the former one is
    interleaved     parts take tiles in turn, not each a stretch of its own
    evict first     loads tell the caches that nothing is read again
    two passes      mean and extremes, then the powers about that mean: twice the bytes, half of the arithmetic each
    in turn N       many tensors in one launch by N programs that take parts in turn: a persistent kernel over all of them

Each is a process of its own, because the kernel reads its parameters once, when it is compiled, and because what breaks
there breaks nothing else. There it is checked first: small tensors with NaN, infinities, zeros, any alignment and mean over
std up to 1e4, alone and together, against float64. Then a tensor of 1e8 elements (rotated, so that no cache holds it) and
the parameters of a 1B model in one call, in fp32 and bf16: the share of a copy's bytes a second.

The next process is started while one is timed, and waits for its turn before it touches the device. What was timed before
by a call that did not come to its end is not timed again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import results
import torch

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "programs 132": {"programs": 132},
    "programs 264": {"programs": 264},
    "programs 528": {"programs": 528},
    "threads 64": {"threads": 64},
    "threads 256": {"threads": 256},
    "4 x 16 bytes": {"steps": 4},
    "8 x 16 bytes, not ahead": {"is_ahead": False},
    "16 x 16 bytes, not ahead": {"steps": 16, "is_ahead": False, "registers": 168},
    "16 x 8 bytes": {"steps": 16, "vector_bytes": 8},
    "32 x 4 bytes": {"steps": 32, "vector_bytes": 4},
    "8 x 16 bytes, beside": {"beside": 2},
    "interleaved": {"is_interleaved": True},
    "interleaved, programs 264": {"is_interleaved": True, "programs": 264},
    "evict first": {"evict": "evict_first"},
    "in turn 264": {"in_turn": 264},
    "in turn 528": {"in_turn": 528},
    "two passes": {"passes": 2},
    "registers 96": {"registers": 96},
    "registers 128": {"registers": 128},
    "registers 168": {"registers": 168},
    "registers 255": {"registers": 255},
    "4 x 16 bytes, threads 256": {"steps": 4, "threads": 256},
    "8 x 8 bytes": {"vector_bytes": 8},
    "8 x 4 bytes": {"vector_bytes": 4},
    "8 x 16 bytes, not ahead, programs 1056": {"is_ahead": False, "programs": 1056},
    "programs 396": {"programs": 396},
}
"""By worth: what is not reached in time comes last. Keys of `taken`."""
TILE = {"steps": "_STEPS", "vector_bytes": "_VECTOR_BYTES", "beside": "_BESIDE", "is_ahead": "_IS_AHEAD",
        "is_interleaved": "_IS_INTERLEAVED", "evict": "_EVICT"}  # fmt: skip
"""What a key is called in other_kernels.py."""
DRY = (
    "as it is", "threads 256", "4 x 16 bytes", "8 x 16 bytes, not ahead", "16 x 8 bytes", "32 x 4 bytes",
    "8 x 16 bytes, beside", "interleaved", "in turn 264", "two passes",
)  # fmt: skip
"""Those of a dry run: every other one differs by a number, or by what an interpreter does not know."""
DRY_BF16 = ("16 x 8 bytes", "two passes")
VARIANT_S = 60
BEGINS_LAST_S = 45
"""Seconds before the end in which no other variant is begun."""


@contextlib.contextmanager
def taken(changes: dict[str, Any]) -> Iterator[None]:
    """Set the kernel's parameters, before anything is compiled.

    threads: of a program. registers: of a thread at most. programs: of a tensor at most. steps, vector_bytes, beside,
    is_ahead, is_interleaved, evict: of measure_tiles. passes: 2 for measure_twice. in_turn: programs of many_in_turn.
    """
    import other_kernels
    import triton.language as tl

    from sentinel.collect.kernels import triton_entries, triton_kernel, triton_moments

    def set_(module: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(module, name, value))

    with contextlib.ExitStack() as stack:
        threads = changes.get("threads", triton_moments.THREADS)
        steps, nbytes = changes.get("steps", triton_moments.STEPS), changes.get("vector_bytes", 16)
        for module in (triton_moments, other_kernels):
            set_(module, "_THREADS", tl.constexpr(threads))
        set_(triton_moments, "THREADS", threads)
        set_(triton_moments, "NUM_WARPS", threads // 32)
        set_(triton_moments, "TILE_BYTES", threads * steps * nbytes)
        for key, name in TILE.items():
            if key in changes:
                set_(other_kernels, name, tl.constexpr(changes[key]))
        if TILE.keys() & changes:
            set_(triton_entries, "measure_part", other_kernels.measure_tiles)
        if registers := changes.get("registers"):
            set_(triton_moments, "MOST_REGISTERS", dict.fromkeys(triton_moments.MOST_REGISTERS, registers))
        if programs := changes.get("programs"):
            set_(triton_moments, "MOST_PARTS", dict.fromkeys(triton_moments.MOST_PARTS, programs))
            most = max(512, 1 << (programs - 1).bit_length())
            set_(other_kernels, "_MOST_PARTS", tl.constexpr(most))
        launch = triton_kernel.Launcher.__call__

        def twice(self: Any, num_programs: int, stream: int, *args: int) -> None:
            at = 11 if len(args) == 13 else 9
            for which in (other_kernels.FIRST_PASS, other_kernels.SECOND_PASS):
                launch(self, num_programs, stream, *args[:at], args[at] | which, *args[at + 1 :])

        def in_turn(self: Any, num_programs: int, stream: int, *args: int) -> None:
            if len(args) == 10:
                args = (*args[:9], args[9] | num_programs << other_kernels.PARTS_SHIFT)
                num_programs = min(num_programs, changes["in_turn"])
            launch(self, num_programs, stream, *args)

        if changes.get("passes") == 2:
            set_(triton_entries, "measure_part", other_kernels.measure_twice)
            set_(triton_kernel.Launcher, "__call__", twice)
        if "in_turn" in changes:
            set_(triton_entries, "_many", other_kernels.many_in_turn)
            set_(triton_kernel.Launcher, "__call__", in_turn)
        yield


def samples(dtype: torch.dtype, tile: int) -> list[torch.Tensor]:
    """Return tensors to check with, on the host. tile: elements of a tile."""
    generator = torch.Generator().manual_seed(0)

    def drawn(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    spoiled = drawn(2 * tile + 3).to(dtype)
    spoiled[tile // 2 :: 100] = 0.0
    spoiled[[3, tile, 2 * tile]] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
    far = (drawn(2 * tile + 5) + (1e4 if dtype.itemsize > 2 else 10.0)).to(dtype)
    return [
        far,
        spoiled[1:],
        drawn(7).to(dtype)[3:],
        torch.full((300,), torch.nan, dtype=dtype),
        torch.empty(0, dtype=dtype),
    ]


def statistics_of(tensor: torch.Tensor) -> dict[str, float]:
    """Return mean, standard deviation and kurtosis of a tensor's finite elements: two passes in float64 where it lies."""
    x = tensor.double()
    x = x[torch.isfinite(x)]
    mean = x.mean()
    squares = (x - mean).square_()
    variance = squares.mean()
    found = {"mean": mean, "std": variance.sqrt(), "kurtosis": squares.square_().mean() / variance.square()}
    return {name: float(value) for name, value in found.items()}


def compare(rows: Any, tensors: list[torch.Tensor]) -> bytes:
    """Compare rows that were measured with float64; return the bytes of their statistics. AssertionError: they are wrong."""
    import numpy as np

    from sentinel.moments import Moments

    rows.begin_copy()
    assert rows.finish() == 0, "rows did not arrive"
    moments = Moments.from_rows(rows.array)
    for at, tensor in enumerate(tensors):
        counts = {
            "count": tensor.isfinite(), "num_nan": tensor.isnan(), "num_pos_inf": tensor == torch.inf,
            "num_neg_inf": tensor == -torch.inf, "num_zero": tensor == 0,
        }  # fmt: skip
        for name, places in counts.items():
            assert moments.stats[name][at] == int(places.sum()), (at, name)
        bits = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32).long()
        assert int(moments.stats["checksum"][at]) == int((bits & (1 << 8 * tensor.itemsize) - 1).sum()), (at, "checksum")
        if not counts["count"].any():
            continue
        finite = tensor[counts["count"]]
        assert moments.stats["min"][at] == float(finite.min()) and moments.stats["max"][at] == float(finite.max()), at
        expected = statistics_of(tensor)
        for name, value in expected.items():
            own, slack = float(getattr(moments, name)()[at]), 1e-5 * expected["std"] if name == "mean" else 0.0
            assert np.isclose(own, value, rtol=2e-5, atol=slack), (at, name, own, value)
    return bytes(moments.stats.tobytes())


def check(dtype: torch.dtype, options: argparse.Namespace, buffer: Any, in_one_call: tuple[bool, ...]) -> None:
    """Measure small tensors, in one call or one by one; twice on a device. AssertionError: something is wrong."""
    import bandwidth

    from sentinel.collect.kernels import triton_moments
    from sentinel.collect.kernels.triton_kernel import TritonKernel

    # As a view of what it is a view of: it begins between multiples of 16 bytes there too.
    tensors = [
        x.to(options.device) if x._base is None else x._base.to(options.device)[x.storage_offset() :]
        for x in samples(dtype, triton_moments.TILE_BYTES // dtype.itemsize)
    ]
    # One by one in two parts each, so that a part has more tiles than one.
    few = dict.fromkeys(triton_moments.MOST_PARTS, 2)
    for is_one_call in in_one_call:
        with mock.patch.object(triton_moments, "MOST_PARTS", triton_moments.MOST_PARTS if is_one_call else few):
            # One of its own: what it keeps for parts has room for as many as there may be now.
            kernel, bits = TritonKernel(), set()
            for _ in range(2 if options.device == "cuda" else 1):
                rows = bandwidth.rows_for(len(tensors), buffer)
                for first, part in enumerate([tensors] if is_one_call else [[x] for x in tensors]):
                    kernel.measure(part, rows, first, checksum=True)
                assert kernel.name == "triton", kernel.name
                bits.add(compare(rows, tensors))
            assert len(bits) == 1, "the same memory gave other bits"


def times(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Check the kernel as it stands in this process and return its shares of a copy's bytes a second.

    A dry run times nothing, and checks only what is not tried elsewhere: an interpreter takes seconds.
    """
    import bandwidth

    from sentinel.collect.kernels.triton_kernel import TritonKernel
    from sentinel.collect.rows.buffer import StepRows
    from tests.collect.accelerator import device_rows

    # Under the interpreter tensors of the host are those of a device, and so are the rows.
    buffer = StepRows if options.device == "cuda" else device_rows
    kernel = TritonKernel()
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        key = bandwidth.name_of(dtype)
        if not options.tiny or dtype is torch.float32 or name in DRY_BF16:
            check(dtype, options, buffer, (name.startswith("in turn"),) if options.tiny else (True, False))
        if options.tiny and (name, dtype) != ("as it is", torch.float32):
            found[f"{key}, one"] = found[f"{key}, many"] = 0.0
            continue
        rounds, repeats, size, number = (1, 1, 9000, 1) if options.tiny else (9, 5, 10**8, 4)
        sources = [torch.randn(size, device=options.device).to(dtype) for _ in range(number)]
        target = torch.empty_like(sources[0])
        rows = bandwidth.rows_for(len(sources), buffer)
        tasks = {
            "copy": bandwidth.captured(
                lambda sources=sources, target=target: [target.copy_(x) for x in sources], options.device
            ),
            "read": bandwidth.launches(kernel, sources, rows, options.device, checksum=True),
        }
        took = results.medians(tasks, options.device, rounds=rounds, repeats=repeats)
        compare(rows, sources)
        found[f"{key}, one"] = round(took["copy"][0] / 2 / took["read"][0], 3)
        del sources, target, tasks, rows
        shapes = bandwidth.shapes_of_1b(options.tiny)[: 3 if options.tiny else None]
        tensors = [torch.randn(shape, device=options.device).to(dtype) for shape in shapes]
        flat = torch.cat([x.view(-1) for x in tensors])
        target, rows = torch.empty_like(flat), bandwidth.rows_for(len(tensors), buffer)
        tasks = {
            "copy": lambda target=target, flat=flat: target.copy_(flat),
            "read": lambda tensors=tensors, rows=rows: kernel.measure(tensors, rows, 0, checksum=True),
        }
        took = results.medians(tasks, options.device, rounds=rounds, repeats=repeats)
        assert kernel.name == "triton", kernel.name
        compare(rows, tensors)
        found[f"{key}, many"] = round(took["copy"][0] / 2 / took["read"][0], 3)
        del tensors, flat, target, tasks, rows
    return found


def turn(options: argparse.Namespace) -> None:
    """Wait for the turn, a line on stdin; then print the figures of each variant asked for, as JSON."""
    # What takes long and needs no device is done while another one is timed.
    importlib.import_module("other_kernels")
    importlib.import_module("bandwidth")
    importlib.import_module("sentinel.collect.kernels.triton_kernel")
    sys.stdin.readline()
    for name in options.variant:
        # Small tensors have few parts: with more programs nobody would take a second one.
        with taken(VARIANTS[name] | ({"in_turn": 3} if options.tiny and "in_turn" in VARIANTS[name] else {})):
            print(json.dumps({"variant": name, **times(name, options)}), flush=True)


def begun(names: list[str], options: argparse.Namespace, cache: str) -> subprocess.Popen[str]:
    """Start a process that will time these variants when it is told."""
    command = [sys.executable, __file__, "--device", options.device, *(["--tiny"] if options.tiny else [])]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    if options.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.Popen(
        [*command, "--variant", *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", env=environment,
    )  # fmt: skip


def measured(process: subprocess.Popen[str], limit_s: float) -> list[dict[str, Any]]:
    """Give a process its turn and return what it says; what went wrong there is its result."""
    try:
        stdout, stderr = process.communicate("\n", timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return [{"error": f"took more than {limit_s:.0f} s"}]
    cells = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    return cells if process.returncode == 0 else [*cells, {"error": stderr.strip()[-1500:]}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", nargs="+", choices=sorted(VARIANTS), metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--most-s", type=float, default=500.0, help="seconds; what is not timed by then is left out")
    options = results.options_of(parser)
    if options.variant:
        turn(options)
        return
    ends_at = time.monotonic() + options.most_s
    result = results.Result("variants", options)
    table: dict[str, dict[str, Any]] = {
        name: cell for name, cell in result.before.get("variants", {}).items() if name in VARIANTS and "error" not in cell
    }
    result.note("variants", table)
    # Under the interpreter nothing is compiled, so one process may change the parameters as it goes.
    left = [name for name in (DRY if options.tiny else VARIANTS) if name not in table]
    groups = [left] if options.tiny else [[name] for name in left]
    with tempfile.TemporaryDirectory(prefix="sentinel-gpu-variants-") as folder, contextlib.ExitStack() as stack:
        coming: list[subprocess.Popen[str]] = []
        for at, names in enumerate(groups):
            if not options.tiny and time.monotonic() > ends_at - BEGINS_LAST_S:
                break
            for i in range(at + len(coming), min(at + 2, len(groups))):
                coming.append(begun(groups[i], options, str(Path(folder) / str(i))))
                stack.callback(coming[-1].kill)
            for name, cell in zip(
                names, measured(coming.pop(0), options.most_s if options.tiny else VARIANT_S), strict=False
            ):
                table[name] = {key: value for key, value in cell.items() if key != "variant"}
                print(f"{name:<40} " + "  ".join(f"{key} {value}" for key, value in table[name].items()), flush=True)
            result.note("variants", table)
    timed = {name: cell for name, cell in table.items() if "error" not in cell}
    if "as it is" not in timed:
        raise SystemExit(f"the kernel as it is could not be timed: {table.get('as it is', {}).get('error')}")
    wrong = [name for name in VARIANTS if name in table and name not in timed]
    late = [name for name in left if name not in table]
    result.note("not_reached", late)
    best = {key: max(timed, key=lambda name: timed[name][key]) for key in timed["as it is"]}
    result.complete(
        "; ".join(f"{key}: {timed[name][key]} with {name}, {timed['as it is'][key]} as it is" for key, name in best.items())
        + (f"; could not be timed: {', '.join(wrong)}" if wrong else "")
        + (f"; {len(late)} not reached" if late else "")
    )


if __name__ == "__main__":
    main()
