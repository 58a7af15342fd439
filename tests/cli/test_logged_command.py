"""Commands in the background: they import what the command that starts them imports."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.cli.logged_command import LoggedCommand, sentinel_command

from ..support.waiting import wait_for


@pytest.mark.slow
def test_a_folder_here_does_not_stand_in_the_place_of_a_module_of_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "detectors.py").write_text("Mine = 1\n")
    (tmp_path / "detectors").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", str(tmp_path))])
    command = sentinel_command()
    options = command[1 : command.index("-m")]

    # As an editable package is found: behind all directories that are looked in.
    code = f"import sys; sys.path.append({str(tmp_path / 'site')!r}); import detectors; print(detectors.Mine)"
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ends_with_us", [True, False])
def test_what_is_to_end_with_us_ends_however_we_do(tmp_path: Path, ends_with_us: bool) -> None:
    code = (
        "import pathlib, signal, sys; from sentinel.cli.logged_command import LoggedCommand\n"
        f"one = LoggedCommand(['sleep', '300'], pathlib.Path({str(tmp_path / 'log')!r}), ends_with_us={ends_with_us})\n"
        "one.start(); print(one.pid, flush=True); signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    state = Path(f"/proc/{pid}/stat")

    def is_over() -> bool:
        # Nobody may have taken its exit code yet.
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"

    if ends_with_us:
        wait_for(is_over)
    else:
        assert not is_over()
        os.kill(pid, signal.SIGKILL)


def test_a_daemon_looks_where_the_command_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    assert sentinel_command("serve", "RUN")[1:] == ["-m", "sentinel.cli", "serve", "RUN"]


COUNTING = """
import pathlib, signal, sys, time
told = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: told.open("a").write("x"))
told.touch()
while not told.read_text():
    time.sleep(0.01)
time.sleep(0.3)
"""


@pytest.mark.slow
def test_a_command_is_asked_to_end_once_however_often_it_is_asked(tmp_path: Path) -> None:
    told = tmp_path / "told"
    one = LoggedCommand([sys.executable, "-c", COUNTING, str(told)], tmp_path / "log")
    for _ in range(2):
        told.unlink(missing_ok=True)
        one.start()
        wait_for(told.exists)
        one.ask()
        wait_for(lambda: told.read_text() == "x")
        assert one.end(60.0) == 0
        assert told.read_text() == "x"
