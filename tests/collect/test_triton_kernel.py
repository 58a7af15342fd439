"""The GPU's kernel without a GPU: its logic under Triton's interpreter, its code compiled for Hopper and read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton")

ROOT = Path(__file__).parents[2]
CASES = "tests/collect/triton_cases.py"
CODES = ["fp32", "bf16", "fp16", "fp64"]


def python(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the checkout, with Triton's own switches set."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env={**inherited, **environment}
    )


# Triton decides when it is imported whether it interprets, so the cases have processes of their own. What each float type
# goes through is tried on fp32, by those cases that no other one covers; the long form has every case and float type.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("floats", "which"), [
    ("fp32", ["-m", "not long"]),
    pytest.param("all", ["-k", "kurtosis or size or random or unequal or bulk"], marks=pytest.mark.long),
    pytest.param("all", ["-k", "not (kurtosis or size or random or unequal or bulk)"], marks=pytest.mark.long),
], ids=["fp32", "all, accuracy", "all, everything else"])  # fmt: skip
def test_cases_under_the_interpreter(floats, which):
    done = python(
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", CASES, *which,
        TRITON_INTERPRET="1", TRITON_CASES=floats,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d\d passed", done.stdout) and "skipped" not in done.stdout


COMPILE = """
import json, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sentinel.collect.kernels import triton_entries, triton_moments

tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
code = sys.argv[1]
for kind in sys.argv[3:]:
    kernel = getattr(triton_entries, f"{kind}_{code}")
    compiled = triton.compile(
        ASTSource(kernel, {name: "i64" for name in kernel.arg_names}, {}), target=GPUTarget("cuda", 90, 32),
        options={
            "num_warps": triton_moments.NUM_WARPS, "maxnreg": triton_moments.MOST_REGISTERS[code], "enable_fp_fusion": True
        },
    )
    cubin = Path(sys.argv[2]) / f"{kind}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    read = [
        subprocess.run([tools / tool, *options, cubin], capture_output=True, text=True, check=True).stdout
        for tool, options in (("cuobjdump", ["--dump-resource-usage"]), ("nvdisasm", ["-c"]))
    ]
    print(json.dumps({"usage": read[0], "sass": read[1]}))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("code", "kind"), [
    pytest.param(code, kind, marks=pytest.mark.long)
    for code in CODES for kind in ("one", "many")
])  # fmt: skip
def test_compiles_for_hopper_without_spills_and_reads_whole_vectors(code, kind, tmp_path):
    """What can be known of the kernel's speed without a GPU. Both kinds have the same loop."""
    import json

    from sentinel.collect.kernels import triton_moments

    done = python("-c", COMPILE, code, str(tmp_path), kind, TRITON_CACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=str(ROOT))

    assert done.returncode == 0, done.stderr[-4000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(compiled) == 1
    for one in compiled:
        registers, stack = (int(re.search(rf"{name}:(\d+)", one["usage"]).group(1)) for name in ("REG", "STACK"))
        assert registers <= triton_moments.MOST_REGISTERS[code]
        loop = main_loop(one["sass"])
        # Eight vectors of 16 bytes a thread are on their way while the former eight are summed.
        assert len([line for line in loop if re.search(r"LDG\.E\.128", line)]) >= triton_moments.STEPS
        spilled = len([line for line in loop if re.search(r"\b(LDL|STL)", line)])
        assert stack <= 32 and spilled <= 16, f"{stack} bytes of stack, {spilled} spills in the loop"
        # No thread hands a number to another one within a tile, but for the look whether all is finite.
        until_branch = plain_path(loop)
        assert len([line for line in until_branch if "SHFL" in line]) <= 2
        assert len([line for line in until_branch if "REDUX" in line]) >= 1
        # What counts non-finite values lies behind that branch: equality with an infinity is asked nowhere before it.
        assert len(until_branch) < len(loop) * 0.8


def main_loop(sass: str) -> list[str]:
    """Return the instructions of the longest loop that reads vectors."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label.group(1)] = len(lines)
        elif re.search(r"/\*[0-9a-f]{4,5}\*/", line):
            lines.append(line)
    loops = [
        lines[labels[jump.group(1)] : at + 1]
        for at, line in enumerate(lines)
        if (jump := re.search(r"BRA.*`\(\.(L_x_\d+)\)", line)) and labels.get(jump.group(1), at + 1) <= at
    ]
    return max((loop for loop in loops if any("LDG.E.128" in line for line in loop)), key=len)


def plain_path(loop: list[str]) -> list[str]:
    """Return the instructions up to the end of the vote that the branch to counting depends on."""
    vote = next(at for at, line in enumerate(loop) if "REDUX" in line)
    return loop[: vote + 20]


def test_importing_sentinel_imports_no_triton():
    done = python("-c", "import sys, sentinel.collect.kernels; sys.exit('triton' in sys.modules)", PYTHONPATH=str(ROOT))

    assert done.returncode == 0, done.stderr


def test_a_gpu_without_triton_is_measured_by_torch(monkeypatch, caplog):
    from sentinel.collect import kernels
    from sentinel.native import implementation

    if implementation == "numpy":
        pytest.skip("needs the C library")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.choose_kernel("cuda").name == "triton"

    monkeypatch.setitem(sys.modules, "sentinel.collect.kernels.triton_kernel", None)
    assert kernels.choose_kernel("cuda").name == "torch (cuda)"
    assert "triton" in caplog.text
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    caplog.clear()
    assert kernels.choose_kernel("cuda").name == "torch (cuda)"
    assert not caplog.text


def test_every_parameter_is_an_integer_of_64_bits_whatever_its_value():
    """A compiled kernel is launched without Triton's look at the arguments: it may depend on none of their values."""
    from sentinel.collect.kernels import triton_entries

    for kind in ("one", "many"):
        for code in CODES:
            kernel = getattr(triton_entries, f"{kind}_{code}")
            assert {param.annotation_type for param in kernel.params} == {"i64"}
            assert all(param.do_not_specialize and not param.is_constexpr for param in kernel.params)
