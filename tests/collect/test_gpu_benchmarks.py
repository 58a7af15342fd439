"""benchmarks/gpu without a GPU: every part runs dry, and the command that runs them goes on behind what fails."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUN_ALL = ROOT / "benchmarks" / "gpu" / "run_all.sh"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_", "SENTINEL_"))},
    "PYTHON": sys.executable,
}

MACHINE = {"date": "2026-01-02", "machine": "a machine", "torch": "2.0", "triton": "3.0", "is_dry_run": True, "code": "c0de"}
ABOUT = f"print({json.dumps(json.dumps(MACHINE))})"
WRITE = f"""
import json, sys
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
machine = json.loads({json.dumps(json.dumps(MACHINE))})
def write(name, **more):
    (out / f"2026-01-02-gpu-{{name}}.json").write_text(json.dumps({{**machine, **more}}))
"""
SCRIPTS = {
    "results": ABOUT,
    "good": WRITE + "write('good', is_complete=True, headline='all is well', seconds=1.5)",
    "bad": WRITE + "write('bad', is_complete=False, half='of it')\nprint('so far')\nraise SystemExit('it broke')",
    "slow": "import time\nprint('waits', flush=True)\ntime.sleep(60)",
    "silent": "",
    "signalled": WRITE
    + "import os, signal, time\nwrite('signalled', is_complete=False, half='of it')\nprint('so far', flush=True)\n"
    "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)",
    "leaving": WRITE + "import subprocess\nleft = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "(out / 'left').write_text(str(left.pid))\nwrite('leaving', is_complete=True, headline='all is well')",
}


def run_all(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RUN_ALL, *args], capture_output=True, text=True, env=ENVIRONMENT)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """run_all.py with parts of this test's own."""
    spec = importlib.util.spec_from_file_location("run_all_of_a_test", RUN_ALL.with_suffix(".py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "out").mkdir()
    limits = {"bad": 30, "slow": 1, "silent": 30, "good": 30}
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "PARTS", parts(module, **limits))
    return module


@pytest.fixture
def call(runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Calls the runner and returns its exit code."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]

    def call(*args: str | Path) -> int:
        out = [] if "--out" in args else ["--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["run_all", "--dry", *out, *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            runner.main()
        return int(ended.value.code or 0)

    yield call
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def parts(runner: ModuleType, **limits: int) -> tuple[Any, ...]:
    return tuple(runner.Part(name, name, limit, "says so") for name, limit in limits.items())


@pytest.fixture
def gpu_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of benchmarks/gpu, whose names are its own."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(RUN_ALL.parent))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(RUN_ALL.parent)):
            del sys.modules[name]


def states(printed: str) -> dict[str, str]:
    """Return the state of each part in the table that ends the output."""
    lines = printed.partition("result\n")[2].splitlines()
    return {line.split()[0]: line[21:33].strip() for line in lines if line}


def test_a_part_that_fails_is_recorded_and_the_next_goes_on(call, tmp_path, capsys) -> None:
    assert call() == 1

    printed = capsys.readouterr().out
    assert states(printed) == {"bad": "failed", "slow": "failed", "silent": "failed", "good": "done"}
    assert "all is well" in printed
    bad, slow, silent = (json.loads((tmp_path / "out" / f"2026-01-02-gpu-{name}.json").read_text()) for name in
                         ("bad", "slow", "silent"))  # fmt: skip
    assert bad["error"] == "ended with code 1: it broke"
    assert bad["last_lines"] == ["so far", "it broke"]
    assert bad["half"] == "of it" and bad["is_complete"] is False
    assert slow["error"] == "ended after 1 s, its limit: waits"
    assert silent["error"] == "ended with code 0: it said nothing"
    assert slow["machine"] == "a machine"


def test_what_is_done_is_not_run_again_unless_asked(call, tmp_path, capsys) -> None:
    assert call("--only", "good") == 0
    assert states(capsys.readouterr().out) == {"good": "done"}

    assert call("--only", "good") == 0
    again = capsys.readouterr().out
    assert states(again) == {"good": "done before"} and "all is well" in again and "== good" not in again
    assert call("--only", "good", "--again") == 0
    assert states(capsys.readouterr().out) == {"good": "done"}


@pytest.mark.parametrize("other", [
    {"machine": "another"}, {"code": "other sources"}, {"is_dry_run": False}, {"is_complete": False}, {"torch": "1.0"},
])  # fmt: skip
def test_a_result_of_something_else_does_not_count(call, tmp_path, capsys, other) -> None:
    earlier = tmp_path / "out" / "2026-01-01-gpu-good.json"
    earlier.write_text(json.dumps({**MACHINE, "is_complete": True, **other}))

    assert call("--only", "good") == 0

    assert states(capsys.readouterr().out) == {"good": "done"}


@pytest.mark.parametrize("text", ["", '{"is_complete": tr', "[]", "\x00\xff"])
def test_a_broken_earlier_result_is_named_and_taken_for_none(call, tmp_path, capsys, text) -> None:
    broken = tmp_path / "out" / "2026-01-01-gpu-good.json"
    broken.write_bytes(text.encode("latin-1"))

    assert call("--only", "good") == 0

    printed = capsys.readouterr()
    assert states(printed.out) == {"good": "done"}
    assert f"{broken}: not a result" in printed.err


def test_a_broken_result_of_today_is_replaced(call, tmp_path, capsys) -> None:
    for name in ("good", "bad"):
        (tmp_path / "out" / f"2026-01-02-gpu-{name}.json").write_text("{")

    assert call("--only", "good", "bad") == 1

    assert json.loads((tmp_path / "out" / "2026-01-02-gpu-good.json").read_text())["is_complete"] is True
    assert "it broke" in json.loads((tmp_path / "out" / "2026-01-02-gpu-bad.json").read_text())["error"]


def test_nothing_is_begun_when_the_minutes_are_over(call, capsys) -> None:
    assert call("--minutes", "0.01", "--only", "good") == 1

    assert states(capsys.readouterr().out) == {"good": "not begun"}


def test_a_part_that_may_not_fit_is_not_begun_and_a_shorter_one_is(call, runner, monkeypatch, capsys) -> None:
    monkeypatch.setattr(runner, "PARTS", parts(runner, slow=90, good=30))

    assert call("--minutes", "1") == 1

    assert states(capsys.readouterr().out) == {"slow": "not begun", "good": "done"}


def test_what_failed_before_comes_last(call, capsys) -> None:
    assert call("--only", "bad") == 1
    capsys.readouterr()

    assert call("--only", "bad", "good") == 1

    printed = capsys.readouterr().out
    assert printed.index("== good:") < printed.index("== bad:")


def test_a_missing_package_is_named_and_costs_no_time(call, runner, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(runner, "PARTS", (runner.Part("good", "good", 30, "says so", packages=("no_such_thing",)),))

    assert call() == 1

    assert states(capsys.readouterr().out) == {"good": "failed"}
    (written,) = (tmp_path / "out").glob("20*-gpu-good.json")
    assert json.loads(written.read_text())["error"] == "cannot import no_such_thing (No module named 'no_such_thing')"


def test_nothing_is_begun_on_a_device_that_does_not_answer(call, tmp_path, capsys) -> None:
    once = (
        "import pathlib\nasked = pathlib.Path(__file__).with_name('asked')\nif asked.exists():\n    raise SystemExit('gone')"
    )
    (tmp_path / "results.py").write_text(f"{once}\nasked.touch()\n{ABOUT}")

    assert call("--only", "bad", "good") == 1

    printed = capsys.readouterr().out
    assert states(printed) == {"bad": "failed", "good": "not begun"}
    assert "run_all.sh: gone" in printed


def test_a_signal_ends_the_part_and_leaves_what_there_was(call, runner, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(runner, "PARTS", parts(runner, signalled=30, good=30))

    assert call("--gather", tmp_path / "all.json") == 1

    printed = capsys.readouterr().out
    assert states(printed) == {"signalled": "not begun", "good": "not begun"}
    found = json.loads((tmp_path / "all.json").read_text())["signalled"]
    assert (found["half"], found["stopped"], found["last_lines"]) == ("of it", "stopped by SIGTERM", ["so far"])
    assert "error" not in found


@pytest.mark.timeout(60)
def test_what_a_part_leaves_behind_holds_nobody_up(call, runner, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(runner, "PARTS", parts(runner, leaving=30))
    monkeypatch.setattr(runner, "DIES_S", 0.1)
    try:
        assert call() == 0
    finally:
        os.kill(int((tmp_path / "out" / "left").read_text()), signal.SIGKILL)

    assert states(capsys.readouterr().out) == {"leaving": "done"}


def test_one_file_carries_all_results_to_another_folder(call, tmp_path, capsys) -> None:
    gathered = tmp_path / "back" / "all.json"
    assert call("--only", "bad", "good", "--gather", gathered) == 1
    assert set(json.loads(gathered.read_text())) == {"bad", "good"}
    capsys.readouterr()

    assert call("--only", "bad", "good", "--out", tmp_path / "elsewhere", "--gather", gathered) == 1

    assert states(capsys.readouterr().out) == {"bad": "failed", "good": "done before"}
    gathered.write_text("[1")
    assert call("--gather", gathered) == 2
    assert "does not hold results" in capsys.readouterr().err


def test_a_wrong_name_says_the_nearest(tmp_path: Path) -> None:
    for name, said in (
        ("step-tme", 'unknown part "step-tme"; did you mean "step-time"?'),
        ("qqq", "known are correctness,"),
    ):
        done = run_all("--dry", "--out", tmp_path, "--only", name)

        assert done.returncode == 2
        assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_without_wheels_is_an_error(tmp_path: Path) -> None:
    done = run_all("--wheels", tmp_path, "--list")

    assert done.returncode == 2
    assert f'expected a folder with wheels (*.whl), got "{tmp_path}"' in done.stderr


@pytest.mark.long
def test_a_wheel_that_does_not_fit_is_named_and_the_others_are_installed(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "nice_thing-1.0.dist-info"
    files = {
        "nice_thing.py": "", f"{info}/METADATA": "Metadata-Version: 2.1\nName: nice-thing\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", f"{info}/RECORD": "",
    }  # fmt: skip
    for name in ("nice_thing-1.0-py3-none-any", "nice_thing-1.0-cp27-cp27m-win32"):
        with zipfile.ZipFile(wheels / f"{name}.whl", "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)

    done = subprocess.run(
        [RUN_ALL, "--wheels", wheels, "--list"], capture_output=True, text=True, env={**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    )

    assert done.returncode == 0
    assert "run_all.sh: nice_thing-1.0-cp27-cp27m-win32.whl cannot be installed" in done.stderr
    assert len(list(tmp_path.glob("sentinel-gpu-wheels-*/nice_thing.py"))) == 1


def test_every_part_is_listed_with_a_limit_below_ten_minutes() -> None:
    done = run_all("--list")

    assert done.returncode == 0, done.stderr
    limits = {line.split()[0]: int(line[21:25]) for line in done.stdout.splitlines()}
    assert len(limits) == 12
    assert max(limits.values()) < 600
    first = list(limits)[:5]
    assert first == ["correctness", "step-time", "bandwidth", "no-wait", "same-training"]
    # Two calls of ten minutes, half a minute of which is gone before the first part begins.
    assert sum(limits[name] for name in first[:2]) <= 570 and sum(limits[name] for name in first[2:]) <= 570


def test_a_part_that_was_cut_short_finds_what_it_had(gpu_module, tmp_path) -> None:
    results = gpu_module("results")
    options = argparse.Namespace(device="cpu", tiny=True, out=tmp_path)

    first = results.Result("long", options)
    first.note("pieces", {"one": 1})
    second = results.Result("long", options)
    (written,) = tmp_path.glob("20*-gpu-long.json")
    second.note("pieces", {"one": 1, "two": 2})
    written.write_text(written.read_text().replace(second.cell["code"], "other sources"))
    third = results.Result("long", options)
    third.note("pieces", {"three": 3})
    third.complete("all three")

    assert first.before == {} == third.before
    assert second.before["pieces"] == {"one": 1}
    assert results.Result("long", options).before == {}


def test_only_waits_of_threads_that_launch_kernels_count(gpu_module) -> None:
    def event(name: str, tid: int, cat: str = "cuda_runtime") -> dict[str, Any]:
        return {"name": name, "tid": tid, "cat": cat}

    trace = [
        event("cudaLaunchKernel", 7), event("cuLaunchKernelEx", 8, "cuda_driver"), event("cudaEventSynchronize", 9),
        event("cudaStreamSynchronize", 7), event("cudaDeviceSynchronize", 8), event("cudaDeviceSynchronize", 8),
        event("cudaStreamSynchronize", 7, "cpu_op"), {"ph": "M", "name": "process_name"},
    ]  # fmt: skip

    assert gpu_module("no_wait").waits_of_launchers(trace) == {
        "cudaDeviceSynchronize": 2, "cudaStreamSynchronize": 1, "cudaEventSynchronize": 0,
    }  # fmt: skip


def test_a_child_that_hangs_is_killed_and_every_end_has_a_name(gpu_module, tmp_path) -> None:
    crash = gpu_module("crash")
    codes = [
        crash.ended([sys.executable, "-c", program], tmp_path / "words", limit_s)
        for program, limit_s in (
            ("import sys; sys.exit('over')", 60), ("import os; os.abort()", 60), ("import time; time.sleep(60)", 0.2)
        )
    ]  # fmt: skip

    assert [crash.end_in_words(code) for code in codes] == ["exit 1", "SIGABRT", f"hung, killed after {crash.CHILD_S} s"]
    nothing = crash.left(tmp_path / "no such run")
    assert crash.fault_of("illegal", {"end": "SIGSEGV", **nothing}) == "illegal: expected exit 1 or SIGABRT, got SIGSEGV"
    assert "rows of the steps before are missing" in crash.fault_of("assert", {"end": "SIGABRT", **nothing})


@pytest.mark.parametrize("first", [["a", "b"], [RuntimeError("no deterministic way")]], ids=["other bits", "an error"])
def test_attention_that_adds_in_no_fixed_order_is_replaced(gpu_module, monkeypatch, tmp_path, first) -> None:
    same_training = gpu_module("same_training")
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

    seen = []

    def bits_of(*_: object) -> tuple[list[str], str]:
        if first:
            found = first.pop(0)
            if isinstance(found, RuntimeError):
                raise found
            return [found], found
        seen.append(_cur_sdpa_kernel_backends())
        return ["c"], "c"

    monkeypatch.setattr(same_training, "bits_of", bits_of)
    monkeypatch.setattr(sys, "argv", ["same_training", "--device", "cpu", "--tiny", "--out", str(tmp_path)])
    try:
        same_training.main()
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)

    assert seen == [[SDPBackend.MATH]] * 4
    (written,) = tmp_path.glob("20*-gpu-same-training.json")
    assert json.loads(written.read_text())["is_complete"] is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_that_it_needs_one(tmp_path: Path) -> None:
    done = run_all("--out", tmp_path, "--only", "bandwidth")

    assert done.returncode == 1
    assert "needs an NVIDIA GPU" in done.stderr


@pytest.mark.long
def test_a_part_runs_dry(tmp_path: Path) -> None:
    done = run_all("--dry", "--out", tmp_path, "--only", "bandwidth")

    assert done.returncode == 0, done.stdout + done.stderr
    assert states(done.stdout) == {"bandwidth": "done"}
    (written,) = tmp_path.glob("20*-gpu-bandwidth.json")
    assert json.loads(written.read_text())["is_dry_run"] is True


COMPILE = r"""
import re, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import variants
from sentinel.collect.kernels import triton_entries, triton_moments

def instructions(changes, name):
    with variants.taken(changes):
        kernel, code = getattr(triton_entries, name), name.split("_")[1]
        options = {"num_warps": triton_moments.NUM_WARPS, "maxnreg": triton_moments.MOST_REGISTERS[code]}
        options["enable_fp_fusion"] = True
        source = ASTSource(kernel, {arg: "i64" for arg in kernel.arg_names}, {})
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin = Path(sys.argv[1]) / "one.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    printed = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,5}\*/ +(.*?);", printed)

changes = {"product": {}, "tiles": {"beside": 1}} | variants.VARIANTS
print("\n".join(instructions(changes[sys.argv[2]], sys.argv[3])))
"""


def compiled(variant: str, kernel: str, tmp_path: Path) -> list[str]:
    """Return the instructions for Hopper of one kernel of a variant; "tiles": measure_tiles as it stands."""
    folder = tmp_path / f"{variant} {kernel}"
    folder.mkdir()
    path = os.pathsep.join([str(ROOT), str(RUN_ALL.parent)])
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, folder, variant, kernel], capture_output=True, text=True,
        env={**ENVIRONMENT, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernel", ["one_fp32", "many_bf16"])
def test_the_tile_as_a_parameter_is_the_product_instruction_for_instruction(kernel: str, tmp_path: Path) -> None:
    """What a parameter gains in the benchmark's kernel it gains in the product's."""
    pytest.importorskip("triton", reason="needs Triton")

    assert compiled("tiles", kernel, tmp_path) == compiled("product", kernel, tmp_path) != []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("variant", "load"), [
    ("32 x 4 bytes", r"LDG\.E R"), ("16 x 8 bytes", r"LDG\.E\.64"), ("8 x 16 bytes, beside", r"LDG\.E\.128"),
    ("evict first", r"LDG\.E\.EF\.128"), ("two passes", r"LDG\.E\.128"), ("in turn 264", r"LDG\.E\.128"),
])  # fmt: skip
def test_variants_compile_for_hopper_and_load_as_they_say(variant: str, load: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs Triton")

    found = compiled(variant, "many_fp32", tmp_path)

    assert len([line for line in found if re.search(load, line)]) >= 16


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_part_runs_dry(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs Triton")

    done = run_all("--dry", "--out", tmp_path)

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert len(states(done.stdout)) == 12
    assert set(states(done.stdout).values()) == {"done"}
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(found) == 12
    assert all(cell["is_complete"] and cell["headline"] for cell in found.values())
    crash = next(cell for name, cell in found.items() if name.endswith("-crash.json"))
    assert crash["ends"]["exception"]["last_words"] == "exception: ValueError the child dies"
    variants = next(cell for name, cell in found.items() if name.endswith("-variants.json"))
    assert [name for name, cell in variants["variants"].items() if "error" in cell] == []
