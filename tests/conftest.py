"""Settings of every test: threads, how many examples a property is tried on, which worker runs what, garbage collection."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Before anybody imports torch, here or in a process that a test starts: workers that share two cores, each with a thread for
# each core, wait for one another in every small operation (a file of tests took 68 s so, and 3 s with one thread).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files of tests lie in memory where there is room: a journal waits for its disk at each commit, and thousands are made.
IN_MEMORY = Path("/dev/shm")
ROOM_BYTES = 4 * 2**30
"""A run of all tests leaves 0.8 GB."""
if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free >= ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# The same examples each time: what fails here fails again. The first profile stands unless --hypothesis-profile names one.
for name, max_examples in (("default", 50), ("quick", 10), ("all", 500)):
    settings.register_profile(name, max_examples=max_examples, derandomize=True, database=None, deadline=None)
if settings.get_current_profile_name() not in ("quick", "all"):
    settings.load_profile("default")


WAITING = tuple(Path(__file__).parent / folder for folder in ("end_to_end", "layouts", "web"))
"""Folders whose files take longest, and wait most of that time: for ranks, daemons, a browser."""


class NoProcess:
    """Where slow tests are left out, let none of the others start a process."""

    STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")

    def __init__(self) -> None:
        self._is_in_test = False
        sys.addaudithook(self._refuse)

    def _refuse(self, event: str, _: object) -> None:
        if self._is_in_test and event in self.STARTS:
            raise RuntimeError("the test starts a process: mark it slow, `make quick` has none")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        self._is_in_test = True
        try:
            return (yield)
        finally:
            self._is_in_test = False


class NamedAtOnce:
    """Writes the name of a test as it fails: where the run itself is ended, nobody would learn of it from the summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = (crash.message if crash else report.longreprtext).partition("\n")[0]
            self._terminal.write_line(f"\nFAILED {report.nodeid} - in {report.when}, after {report.duration:.0f} s: {why}")


class NotAgain:
    """In a worker: a test in which another worker ended is not run again. xdist would hand it to each worker in turn."""

    def __init__(self, begun: Path) -> None:
        """begun: a folder of all workers, with a file for each test that runs."""
        self._begun = begun
        begun.mkdir(exist_ok=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # Whoever ends while no test runs takes the folder away.
        self._begun.mkdir(exist_ok=True)
        try:
            self._mark(item.nodeid).touch(exist_ok=False)
        except FileExistsError:
            pytest.fail("the process of another worker ended in this test")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._mark(nodeid).unlink(missing_ok=True)

    def pytest_sessionfinish(self) -> None:
        with contextlib.suppress(OSError):  # The others still run theirs.
            self._begun.rmdir()

    def _mark(self, nodeid: str) -> Path:
        return self._begun / f"{zlib.crc32(nodeid.encode()):08x}"


HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """What a test runs here handles signals no longer than it runs: processes that later tests fork off would have them."""
    former = [signal.getsignal(number) for number in HANDLED]
    yield
    left = [signal.getsignal(number) for number in HANDLED]
    for number, handler in zip(HANDLED, former, strict=True):
        signal.signal(number, handler)
    assert left == former


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A command that a test runs here sets the level of all logs: the next test has it as it was."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        config.pluginmanager.register(NoProcess())


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    begun = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()))
    if worker := getattr(session.config, "workerinput", None):
        plugins.register(NotAgain(begun / f"sentinel-begun-{worker['testrunuid']}"))
    elif (terminal := plugins.get_plugin("terminalreporter")) is not None:
        plugins.register(NamedAtOnce(terminal))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files that wait evenly over those that compute, for the workers take file by file in this order.

    Side by side, several processes each, they would share as few cores as there are; beside tests that compute one waits
    while another computes.
    """
    by_file = [list(tests) for _, tests in itertools.groupby(items, key=lambda one: one.path)]
    waiting, computing = [], []
    for tests in by_file:
        (waiting if any(folder in tests[0].path.parents for folder in WAITING) else computing).append(tests)
    # Each at its place on a line from 0 to 1. Those that wait are over before the others: nobody waits for one at the end.
    placed = [(0.7 * at / len(waiting), tests) for at, tests in enumerate(waiting)]
    placed += [((at + 0.5) / len(computing), tests) for at, tests in enumerate(computing)]
    items[:] = [one for _, tests in sorted(placed, key=lambda one: one[0]) for one in tests]


def pytest_collection() -> None:
    """Look for no garbage among what is only being made: a sixth of the time that collecting takes."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Freeze what was imported: some tests collect garbage many times."""
    gc.enable()
    from .support import frozen  # noqa: F401  (what it does when it is imported, and not before)
