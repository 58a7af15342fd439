"""`sentinel run` starts the command whatever ails its daemon, its directory or its shell, and says what was not watched."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sentinel.store.lock import RunLock

from ..support.warm import cli, interpreter

TRAIN = """
import torch, sentinel
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
monitor = sentinel.attach(model, optimizer)
assert type(monitor).__name__ == "Monitor", monitor
for step in range(20):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    (loss * (float("nan") if step == 12 else 1.0)).backward()
    optimizer.step()
    monitor.log(loss=loss)
    monitor.step()
"""


def run(home: Path, *arguments: str, mask: int = 0o022, environment: dict[str, str] | None = None,
        is_bound: bool = False) -> subprocess.CompletedProcess[str]:  # fmt: skip
    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if is_bound:  # root may read every file, unless it gave up the right to
            for capability in (1, 2):
                assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0
        os.umask(mask)

    own = {"TORCHINDUCTOR_CACHE_DIR": str(home.parent / "cache"), "PYTHON_EXEC": interpreter(), **(environment or {})}
    with tempfile.NamedTemporaryFile("w+") as said:
        done = subprocess.run(
            [*cli(), "run", "--dir", str(home), "--name", "it", *arguments],
            stdout=subprocess.PIPE, stderr=said, text=True, timeout=240, preexec_fn=prepare, cwd=home.parent,
            env={**os.environ, "SAID": said.name, **own}, check=False,
        )  # fmt: skip
        done.stderr = Path(said.name).read_text()
    return done


# The widest and the narrowest; between them lie the others.
@pytest.mark.parametrize("mask", [0o000, *(pytest.param(mask, marks=pytest.mark.long) for mask in (0o002, 0o027)), 0o077])
def test_a_command_is_watched_whatever_the_umask(mask: int, tmp_path: Path) -> None:
    home = tmp_path / "new" / "runs"
    home.parent.mkdir()

    done = run(home, "--", interpreter(), "-c", TRAIN, mask=mask)

    assert done.returncode == 0, done.stderr
    assert "UNWATCHED" not in done.stderr
    assert "it: 0 anomalies" not in done.stderr, done.stderr
    for folder, _, files in os.walk(home):
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700, folder
        for name in files:
            assert not stat.S_IMODE((Path(folder) / name).stat().st_mode) & 0o077, name


@pytest.mark.long
def test_a_command_is_watched_under_an_umask_that_hides_its_files_from_itself(tmp_path: Path) -> None:
    done = run(tmp_path / "runs", "--", sys.executable, "-c", TRAIN, mask=0o777, is_bound=os.geteuid() == 0)

    assert done.returncode == 0, done.stderr
    assert "NOT everything" not in done.stderr, done.stderr
    assert "it: 0 anomalies" not in done.stderr, done.stderr


def test_serve_takes_what_attach_made_under_a_loose_umask(tmp_path: Path) -> None:
    environment = {**os.environ, "SENTINEL_DIR": str(tmp_path / "deep" / "runs"), "SENTINEL_RUN": "it"}
    subprocess.run([interpreter(), "-c", f"import os; os.umask(2)\n{TRAIN}"], check=True, timeout=240, env=environment)
    for one in (tmp_path / "deep" / "runs", tmp_path / "deep" / "runs" / "it"):
        process = subprocess.Popen([*cli(), "serve", str(one), "--no-http"], stderr=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        process.terminate()
        _, talk = process.communicate(timeout=240)
        assert "is not served" not in talk


def test_a_run_directory_that_is_looser_is_tightened_and_watched(tmp_path: Path) -> None:
    (tmp_path / "runs" / "it" / "spool").mkdir(parents=True)
    (tmp_path / "runs" / "it").chmod(0o777)

    done = run(tmp_path / "runs", "--", interpreter(), "-c", TRAIN)

    assert done.returncode == 0
    assert "runs/it: its mode was 0777" in done.stderr
    assert "UNWATCHED" not in done.stderr
    assert "it: 0 anomalies" not in done.stderr


def unwatched(done: subprocess.CompletedProcess[str], why: str) -> None:
    """Check that the command ran with its own exit code, and that it is said once at the start and once at the end."""
    assert done.stdout == "ran\n", done.stderr
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("the command runs on UNWATCHED: ") == 1, done.stderr
    assert done.stderr.count("NOT everything was watched: ") == 1, done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr


# Goes on until its being unwatched was said: nothing ends before the daemon is found dead.
COMMAND = ("--", "sh", "-c", "until grep -q UNWATCHED $SAID; do sleep 0.05; done; echo ran; exit 3")


def test_broken_rules_do_not_keep_the_command_from_running(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rules: [{name: a, detector: Nonsense}]")

    done = run(tmp_path / "runs", "--rules", str(tmp_path / "rules.yaml"), *COMMAND)

    unwatched(done, 'unknown detector "Nonsense"')


def test_a_directory_that_cannot_be_made_does_not_keep_the_command_from_running() -> None:
    done = run(Path("/proc/runs"), *COMMAND)

    unwatched(done, "/proc/runs")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_directory_of_another_user_is_refused_and_the_command_runs(tmp_path: Path) -> None:
    (tmp_path / "runs" / "it").mkdir(parents=True)
    os.chown(tmp_path / "runs" / "it", 12345, 12345)

    done = run(tmp_path / "runs", *COMMAND)

    unwatched(done, "owned by 12345")


def test_a_run_that_another_daemon_judges_does_not_keep_the_command_from_running(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "runs" / "it" / ".daemon", "run it")

    done = run(tmp_path / "runs", *COMMAND)

    lock.close()
    unwatched(done, "another daemon judges it")


def test_a_daemon_that_crashes_at_its_start_does_not_keep_the_command_from_running(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text("import os\nos._exit(9)\n")
    (tmp_path / "rules.yaml").write_text('rules: [{name: a, detector: "crashing:A", select: {kinds: [wgrad]}}]')

    done = run(tmp_path / "runs", "--allow-code", "--rules", str(tmp_path / "rules.yaml"), *COMMAND)

    unwatched(done, "the daemon died")


def test_a_daemon_that_crashes_at_its_start_fails_a_run_that_must_be_clean(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rules: [{name: a, detector: Nonsense}]")

    done = run(tmp_path / "runs", "--rules", str(tmp_path / "rules.yaml"), "--fail-on", "critical", "--", "true")

    assert done.returncode == 1


def test_a_port_in_use_costs_the_port_alone(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        done = run(tmp_path / "runs", "--listen", f"127.0.0.1:{port}", "--", interpreter(), "-c", TRAIN)

    assert done.returncode == 0
    assert "UNWATCHED" not in done.stderr
    assert "it: 0 anomalies" not in done.stderr
    assert "a free port is tried instead" in (tmp_path / "runs" / "it" / ".daemon" / "daemon.log").read_text()


@pytest.mark.parametrize(
    "body",
    [
        "raise RuntimeError('no')",
        pytest.param("import sys; sys.exit(5)", marks=pytest.mark.long),  # an exception, as the first
        "x = 1",
        pytest.param("import os; os._exit(5)", marks=pytest.mark.long),  # the end of a process, as the last
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_a_broken_plug_in_is_named_and_harms_nobody_who_did_not_ask_for_it(body: str, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    info = packages / "plug-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sentinel.detectors]\nPlug = broken_plug:Plug\n")
    (packages / "broken_plug.py").write_text(body)
    environment = {"PYTHONPATH": str(packages)}
    (tmp_path / "rules.yaml").write_text("rules: [{name: a, detector: Plug, select: {kinds: [wgrad]}}]")

    done = run(tmp_path / "runs", "--", interpreter(), "-c", TRAIN, environment=environment)
    asked = run(
        tmp_path / "asked", "--rules", str(tmp_path / "rules.yaml"), "--fail-on", "critical", "--", "true",
        environment=environment,
    )  # fmt: skip

    assert done.returncode == 0
    assert "UNWATCHED" not in done.stderr
    assert "it: 0 anomalies" not in done.stderr
    assert 'entry point "Plug"' in (tmp_path / "runs" / "it" / ".daemon" / "daemon.log").read_text()
    assert asked.returncode == 1
    assert 'entry point "Plug"' in asked.stderr


def test_a_report_that_cannot_be_written_does_not_keep_the_command_from_running(tmp_path: Path) -> None:
    done = run(tmp_path / "runs", "--report", "/no/such/directory/report.json", "--", "sh", "-c", "echo ran; exit 3")

    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert "the report could not be written: /no/such/directory/report.json" in done.stderr


def test_nothing_is_said_to_be_unwatched_where_all_was(tmp_path: Path) -> None:
    done = run(tmp_path / "runs", "--report", str(tmp_path / "report.json"), "--", "true")

    assert done.returncode == 0
    assert "unwatched" not in done.stderr.lower() and "NOT everything" not in done.stderr
    assert "nothing was watched: the command never attached" in done.stderr, "which is true of it"
    assert json.loads((tmp_path / "report.json").read_text())["is_complete"]
