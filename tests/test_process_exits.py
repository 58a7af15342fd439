"""How other processes end, told at once, and when nobody else may ask any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from sentinel.process import PROC, START, ProcessId, stat_fields
from sentinel.process_exits import ProcessExits

from .support.open_files import open_files

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no descriptors of processes here"),
]


class Received:
    """What was told of whom; `any` is set when something is."""

    def __init__(self) -> None:
        self.reported: dict[int, int | None] = {}
        self.any = threading.Event()

    def __call__(self, process: ProcessId, status: int | None, wall_ns: int) -> None:
        self.reported[process.pid] = status
        self.any.set()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def process_of(pid: int) -> ProcessId:
    start = stat_fields((PROC / str(pid) / "stat").read_bytes())[START]
    return ProcessId(pid=pid, start=start, space="s", boot="b")


def test_the_signal_that_ended_a_process_is_told(sleeper: subprocess.Popen[bytes]) -> None:
    received = Received()
    exits = ProcessExits(received, "sentinel-test")
    exits.add(process_of(sleeper.pid))

    sleeper.send_signal(signal.SIGKILL)

    assert received.any.wait(240)
    assert received.reported == {sleeper.pid: int(signal.SIGKILL)}
    exits.close()


def test_another_process_with_its_number_is_not_waited_for(sleeper: subprocess.Popen[bytes]) -> None:
    received = Received()
    exits = ProcessExits(received, "sentinel-test")
    exits.add(ProcessId(pid=sleeper.pid, start=1, space="s", boot="b"))

    sleeper.kill()
    sleeper.wait()

    assert not received.any.wait(0.2)
    exits.close()


def test_nothing_is_left_when_it_is_closed(sleeper: subprocess.Popen[bytes]) -> None:
    before = len(open_files("[pidfd]")), len(open_files("[eventpoll]"))
    exits = ProcessExits(Received(), "sentinel-test", rescan=lambda: [process_of(sleeper.pid)])
    exits.start()
    exits.add(process_of(sleeper.pid))
    assert (len(open_files("[pidfd]")), len(open_files("[eventpoll]"))) > before

    exits.close()
    exits.close()

    assert not [one for one in threading.enumerate() if one.name == "sentinel-test"]
    assert (len(open_files("[pidfd]")), len(open_files("[eventpoll]"))) <= before
