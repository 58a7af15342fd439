"""Is what the kernel measures on the device right, and the same bits every time?

    cases      every case of tests/collect/triton_cases.py on the device, in all float types: accuracy against float64, NaN
               and infinities in every place, strided, empty, converted (integers, fp8), many tensors in one launch. Each
               is measured twice and must give the same bits
    large      a tensor of more than 2**31 elements in bf16 (4.3 GB), with NaN, infinities and zeros at places that 32 bits
               cannot hold; its statistics against chunks in float64 on the device. Skipped where memory is short
    kurtosis   ten million elements in every float type, mean over std 0 to 1e4, three runs

On a CPU a few of the cases run under Triton's interpreter, and the others measure with the kernel of CPU tensors.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from typing import Any

import results
import torch

from sentinel.collect.kernels import Kernel, choose_kernel
from sentinel.collect.rows.buffer import StepRows
from sentinel.moments import Moments
from sentinel.record import Kind

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LARGE = 2**31 + 100_003
CASES = "tests/collect/triton_cases.py"
CASES_S = 170


def cases(options: argparse.Namespace) -> dict[str, Any]:
    """Run the kernel's cases and return how many passed, which failed, and pytest's exit code."""
    # Whoever calls this may interpret or not; the cases have an interpreter of their own, or none.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_INTERPRET", "PYTEST_"))}
    environment |= {"TRITON_CASES": "all", "TRITON_CASES_DEVICE": options.device}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", CASES]
    if options.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
        command += ["-k", "test_a_copy or test_nothing_finite or parts_cover"]
    try:
        done = subprocess.run(command, cwd=results.ROOT, env=environment, capture_output=True, text=True, timeout=CASES_S)
    except subprocess.TimeoutExpired as error:
        # What there is: a dot or an F for each case, and which came last.
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        print(said[-6000:])
        return {"failed_cases": [f"not done after {CASES_S} s"], "code": -1, "output": said[-2000:]}
    counted = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    print(f"cases: {counted}")
    if done.returncode != 0:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
    return {**counted, "failed_cases": failed, "code": done.returncode}


def measured(kernel: Kernel, tensor: torch.Tensor) -> Moments:
    """Return the statistics of one tensor."""
    rows = StepRows(1)
    rows.add(0, Kind.PARAM, 0, -1, 0, 0)
    kernel.measure((tensor,), rows, 0, checksum=True)
    rows.begin_copy()
    assert rows.finish() == 0, "the row did not arrive"
    return Moments.from_rows(rows.array)


def in_chunks(tensor: torch.Tensor, chunk: int = 1 << 27) -> dict[str, float]:
    """Return count, mean, standard deviation and kurtosis of the finite elements: two passes in float64 on the device."""
    parts = tensor.split(chunk)
    finite = [torch.isfinite(part) for part in parts]
    count = sum(int(mask.sum()) for mask in finite)
    mean = sum(float(part.double().where(mask, 0.0).sum()) for part, mask in zip(parts, finite, strict=True)) / count
    squares = fourths = 0.0
    for part, mask in zip(parts, finite, strict=True):
        d2 = (part.double() - mean).where(mask, 0.0).square_()
        squares += float(d2.sum())
        fourths += float(d2.square_().sum())
    return {"count": count, "mean": mean, "std": (squares / count) ** 0.5, "kurtosis": count * fourths / squares**2}


def large(options: argparse.Namespace, kernel: Kernel) -> dict[str, Any]:
    """Measure a tensor whose places 32 bits do not hold."""
    numel = 100_003 if options.tiny else LARGE
    if options.device == "cuda" and torch.cuda.mem_get_info()[0] < 4 * LARGE * 2:
        print("large: skipped, the device has not enough memory free")
        return {"skipped": "not enough memory"}
    # One piece over and over; it is odd, so that no tile looks like another.
    piece = (torch.randn(99_991, device=options.device) + 0.5).bfloat16()
    x = piece.repeat(-(-numel // piece.numel()))[:numel]
    x[-2], x[-7], x[-11], x[-13] = torch.nan, torch.inf, -torch.inf, 0.0
    expected = in_chunks(x)
    runs = [measured(kernel, x) for _ in range(2)]
    stats = runs[0].stats[0]
    assert [int(stats[name]) for name in ("num_nan", "num_pos_inf", "num_neg_inf")] == [1, 1, 1], stats
    assert int(stats["count"]) == expected["count"], (stats["count"], expected)
    assert int(stats["num_zero"]) == sum(int((part == 0).sum()) for part in x.split(1 << 27)), stats
    assert runs[0].stats.tobytes() == runs[1].stats.tobytes(), "the same memory gave other bits"
    found = {"mean": float(runs[0].mean()[0]), "std": float(runs[0].std()[0]), "kurtosis": float(runs[0].kurtosis()[0])}
    errors = {name: abs(value / expected[name] - 1) for name, value in found.items()}
    assert max(errors.values()) < 1e-5, (found, expected)
    print(f"large: {numel} elements of bf16; relative errors {errors}")
    return {"elements": numel, "relative_errors": errors}


def kurtosis(options: argparse.Namespace, kernel: Kernel) -> dict[str, Any]:
    """Compare with float64 on the host, and three runs with each other, bit by bit."""
    size = 5000 if options.tiny else 10_000_000
    generator = torch.Generator().manual_seed(0)
    worst: dict[str, float] = {}
    for dtype in DTYPES:
        for mean in (0.0, 10.0, 1e4):
            x = (torch.randn(size, generator=generator) + mean).to(dtype)
            x[1], x[size // 2], x[-1] = torch.nan, torch.inf, -torch.inf
            on_device = x.to(options.device)
            runs = [measured(kernel, on_device) for _ in range(3)]
            assert len({run.stats.tobytes() for run in runs}) == 1, (dtype, mean, "the same memory gave other bits")
            expected = Moments.of(x.double().numpy())
            for name in ("count", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero", "min", "max"):
                assert runs[0].stats[name] == expected.stats[name], (dtype, mean, name, runs[0].stats, expected.stats)
            error = abs(float(runs[0].kurtosis()[0] / expected.kurtosis()[0]) - 1)
            name = str(dtype).partition(".")[2]
            worst[name] = max(worst.get(name, 0.0), error)
    print(f"kurtosis: worst relative error, mean over std 0 to 1e4, {size} elements: {worst}")
    assert max(worst.values()) < 1e-5, worst
    return {"elements": size, "worst_relative_error": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = results.options_of(parser)
    result = results.Result("correctness", options)
    kernel = choose_kernel(options.device)
    result.note("kernel", kernel.name)
    accuracy = kurtosis(options, kernel)
    result.note("kurtosis", accuracy)
    result.note("large", large(options, kernel))
    counted = cases(options)
    result.note("cases", counted)
    if counted["code"] != 0:
        raise SystemExit(f"cases that failed: {', '.join(counted['failed_cases']) or 'see above'}")
    error = max(accuracy["worst_relative_error"].values())
    result.complete(f"{counted.get('passed', 0)} cases; kurtosis within {error:.1e}; the same bits in every run")


if __name__ == "__main__":
    main()
