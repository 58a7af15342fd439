"""The child of `sentinel run`: exit codes, signals, process groups and the terminal, with real processes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..support.waiting import wait_for_words

PARENT = """
import os, sys, time
from sentinel.cli.child import Child
child = Child(sys.argv[1:], os.environ)
while child.poll() is None:
    time.sleep(0.01)
child.close()
sys.exit(child.code)
"""

LISTENER = """
import os, signal, sys, time
def heard(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write(f"{sys.argv[2]} {signal.Signals(number).name}\\n")
    if number in (signal.SIGTERM, signal.SIGINT):
        sys.exit(7)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, heard)
if sys.argv[2] == "launcher":
    import subprocess
    worker = subprocess.Popen([sys.executable, __file__, sys.argv[1], "worker"])
with open(sys.argv[1], "a") as file:
    file.write(f"{sys.argv[2]} ready\\n")
while True:
    time.sleep(0.01)
"""


def parent(*command: str, **options: object) -> subprocess.Popen[bytes]:
    # The suite itself may run under nohup, whose ignored SIGHUP is inherited.
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    return subprocess.Popen([sys.executable, "-c", PARENT, *command], **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("code", [0, 1, 42])
def test_the_exit_code_is_the_commands_own(code: int) -> None:
    assert parent("sh", "-c", f"exit {code}").wait(240) == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signals_exit_code_is_128_and_its_number(number: signal.Signals) -> None:
    assert parent("sh", "-c", f"kill -{int(number)} $$").wait(240) == 128 + number


def test_signals_reach_the_whole_group_once(tmp_path: Path) -> None:
    script, received = tmp_path / "listener.py", tmp_path / "heard"
    script.write_text(LISTENER)
    process = parent(sys.executable, str(script), str(received), "launcher")
    wait_for_words(received, "launcher ready", "worker ready")

    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        process.send_signal(number)
        wait_for_words(received, f"launcher {number.name}", f"worker {number.name}")
    process.send_signal(signal.SIGTERM)

    assert process.wait(240) == 7
    lines = wait_for_words(received, "worker SIGTERM").splitlines()
    assert sorted(lines) == sorted(set(lines))


def test_stdin_stdout_and_stderr_are_the_commands_own() -> None:
    process = parent("sh", "-c", "cat; echo err >&2", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    out, err = process.communicate(b"in", 20)

    assert (out, err) == (b"in", b"err\n")


def test_an_unknown_command_is_a_users_mistake() -> None:
    process = parent("/no/such/program", stderr=subprocess.PIPE)

    _, err = process.communicate(timeout=240)

    assert b'ConfigError: command "/no/such/program": No such file or directory' in err


def test_ctrl_c_on_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    script, received = tmp_path / "listener.py", tmp_path / "heard"
    script.write_text(LISTENER)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", PARENT, sys.executable, str(script), str(received), "alone"])
    wait_for_words(received, "alone ready")

    os.write(terminal, b"\x03")

    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.WEXITSTATUS(status) == 7
    assert received.read_text().splitlines() == ["alone ready", "alone SIGINT"]


def test_the_command_can_read_its_terminal(tmp_path: Path) -> None:
    got = tmp_path / "got"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", PARENT, "sh", "-c", f"read line; echo $line > {got}"])
    time.sleep(0.3)

    os.write(terminal, b"hello\n")

    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.WEXITSTATUS(status) == 0
    assert got.read_text() == "hello\n"
