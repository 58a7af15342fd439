"""benchmarks/gpu without a GPU: every part runs dry, and the command that runs them goes on behind what fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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
    monkeypatch.setattr(module, "PARTS", tuple(module.Part(name, name, limit, "says so") for name, limit in limits.items()))
    return module


@pytest.fixture
def call(runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Calls the runner and returns its exit code."""

    def call(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["run_all", "--dry", "--out", str(tmp_path / "out"), *args])
        with pytest.raises(SystemExit) as ended:
            runner.main()
        return int(ended.value.code or 0)

    return call


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


def test_every_part_is_listed_with_a_limit_below_ten_minutes() -> None:
    done = run_all("--list")

    assert done.returncode == 0, done.stderr
    limits = [int(line[21:25]) for line in done.stdout.splitlines()]
    assert len(limits) == 12
    assert max(limits) < 600


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_that_it_needs_one(tmp_path: Path) -> None:
    done = run_all("--out", tmp_path, "--only", "bandwidth")

    assert done.returncode == 1
    assert "needs an NVIDIA GPU" in done.stderr


def test_parts_run_dry_and_are_found_again(tmp_path: Path) -> None:
    first = run_all("--dry", "--out", tmp_path, "--only", "waiting")
    second = run_all("--dry", "--out", tmp_path, "--only", "waiting")

    assert first.returncode == 0, first.stdout + first.stderr
    assert states(first.stdout) == {"waiting": "done"}
    assert states(second.stdout) == {"waiting": "done before"}
    (written,) = tmp_path.glob("20*-gpu-waiting.json")
    assert json.loads(written.read_text())["is_dry_run"] is True


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
