"""The systemd unit: read and rated by systemd where it is installed, and run by it where it runs."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from sentinel.cli.serve import serve

from ..support.warm import cli

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "sentinel.service"


def of(name):
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_it_starts_the_daemon_with_options_that_there_are():
    [line] = of("ExecStart")
    program, verb, *words = shlex.split(line)

    options = serve.make_context("serve", words).params

    assert (Path(program).name, verb) == ("sentinel", "serve")
    # What the sandbox leaves writable is what the daemon writes.
    assert of("ReadWritePaths") == [options["directory"]]
    assert options["state_dir"] == f"/var/lib/{of('StateDirectory')[0]}"
    assert options["drain_s"] < float(of("TimeoutStopSec")[0])
    assert of("Type") == ["notify"] and of("WatchdogSec") and of("ExecReload") == ["/bin/kill -HUP $MAINPID"]


@pytest.fixture
def unit(tmp_path):
    """The unit with a program and a user that every machine has."""
    path = tmp_path / "sentinel.service"
    path.write_text(UNIT.read_text().replace("/opt/sentinel/bin/sentinel", "/bin/true").replace("User=train", "User=daemon"))
    return path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_it_without_a_complaint(unit):
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=240)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_rates_it_as_closed(unit):
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=25", str(unit)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip

    if "unrecognized option" in done.stderr or "Unknown" in done.stderr:
        pytest.skip("a systemd that does not rate files")
    assert done.returncode == 0, done.stdout[-300:]


def is_run_by_systemd():
    if os.getuid() != 0 or shutil.which("systemd-run") is None or not Path("/run/systemd/system").is_dir():
        return False
    return subprocess.run(["systemctl", "show", "-p", "Version"], capture_output=True, timeout=240).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not is_run_by_systemd(), reason="no systemd runs here, or not as root")
def test_the_daemon_works_in_the_sandbox_of_the_unit(tmp_path):
    kept = ("NoNewPrivileges", "Protect", "Restrict", "LockPersonality", "SystemCall", "CapabilityBoundingSet", "Private",
            "MemoryMax", "TasksMax", "UMask", "KeyringMode", "DevicePolicy", "RemoveIPC")  # fmt: skip
    # Temporary folders of the test would be hidden by these two.
    left_out = ("PrivateTmp", "ProtectHome")
    lines = [line for line in UNIT.read_text().splitlines() if line.startswith(kept) and not line.startswith(left_out)]
    properties = [f"--property={line}" for line in lines if not line.startswith("ReadWritePaths")]
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o700)

    done = subprocess.run(
        ["systemd-run", "--wait", "--pipe", "--quiet", f"--property=ReadWritePaths={tmp_path}", *properties,
         "timeout", "--signal=TERM", "5", *cli(), "serve", str(runs), "--listen", "127.0.0.1:0"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip

    assert "serving" in done.stderr and done.returncode in (0, 124), done.stderr
