"""A stand-in for the Python interpreter whose programs begin with torch imported, which takes longer than most tests.

`interpreter()` names an executable that takes a script, `-c CODE` or `-m MODULE`. It hands its arguments, environment,
working directory and standard streams to a server, which forks the program off itself, in a session of its own. Signals
sent to the stand-in reach the program's whole process group, it ends with the program's exit code or signal, and when it
is killed the program is too. Two things differ from an interpreter: SIGSTOP stops the stand-in alone, and the program's
parent is the server. Where a test is about either, it takes `sys.executable`. With $PYTHON_EXEC set to the stand-in, as
torchrun reads it, what the program starts with its own `sys.executable` begins warm too.
"""

from __future__ import annotations

import fcntl
import functools
import os
import secrets
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

STAND_IN = Path(__file__).with_name("warm_client.py")
SERVER = Path(__file__).with_name("warm_server.py")
START_S = 120.0
"""Longest that the server's imports may take."""


@functools.cache
def interpreter(*modules: str) -> str:
    """Return the path of the executable. All workers of a test run share one server, which ends with their controller.

    modules: what its programs begin with beside torch and Sentinel; each such list has a server of its own.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    owner = os.getppid() if run else os.getpid()
    which = f"{run or secrets.token_hex(16)}{zlib.crc32(repr(modules).encode()):08x}"
    folder = Path(tempfile.gettempdir()) / f"sentinel-warm-{which}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.geteuid()
    address, executable = folder / "socket", folder / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not executable.exists():
            start_server(address, owner, modules)
            executable.write_text(f"#!{sys.executable} -ISE\nADDRESS = {str(address)!r}\n{STAND_IN.read_text()}")
            executable.chmod(0o700)
    return str(executable)


def start_server(address: Path, owner: int, modules: Sequence[str]) -> None:
    """Start the server that ends, and removes the folder of its address, when the process `owner` is over."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SENTINEL_")}
    server = subprocess.Popen(
        [sys.executable, str(SERVER), str(address), str(owner), *modules],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
    )
    until = time.monotonic() + START_S
    while not address.exists():
        assert server.poll() is None and time.monotonic() < until, "the server of warm interpreters did not come up"
        time.sleep(0.02)


def cli() -> list[str]:
    """Return the first words of a command of Sentinel, begun warm."""
    return [interpreter(), "-m", "sentinel.cli"]
