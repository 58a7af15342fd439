"""Settings of every test: threads, how many examples a property is tried on, which worker runs what, garbage collection."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Before anybody imports torch, here or in a process that a test starts: workers that share two cores, each with a thread for
# each core, wait for one another in every small operation (a file of tests took 68 s so, and 3 s with one thread).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples each time: what fails here fails again. The first profile stands unless --hypothesis-profile names one.
for name, max_examples in (("default", 50), ("quick", 10), ("all", 500)):
    settings.register_profile(name, max_examples=max_examples, derandomize=True, database=None, deadline=None)
if settings.get_current_profile_name() not in ("quick", "all"):
    settings.load_profile("default")


WHOLE_RUNS = Path(__file__).parent / "end_to_end"


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


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        config.pluginmanager.register(NoProcess())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have each worker of `-n N --dist worksteal` run its share of the whole runs all along its queue.

    They would all lie in one worker's queue, which would end long after the others. At the beginning of each they would run
    beside one another, several processes each, on as few cores as there are: while one waits another computes.
    """
    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    waiting = [one for one in items if WHOLE_RUNS in one.path.parents]
    computing = [one for one in items if WHOLE_RUNS not in one.path.parents]
    ordered: list[pytest.Item] = []
    for worker in range(num_workers):
        # xdist gives each worker as many tests as the next, in their order.
        size = (len(items) - len(ordered)) // (num_workers - worker)
        share = waiting[worker::num_workers]
        num_more = max(0, size - len(share))
        ordered += spread(share, computing[:num_more])
        del computing[:num_more]
    items[:] = [*ordered, *computing]


def spread(waiting: list[pytest.Item], computing: list[pytest.Item]) -> list[pytest.Item]:
    """Return all of them, the waiting ones evenly before the files of the others: between two tests of a file they would
    have what the file's tests share made anew."""
    files = [list(tests) for _, tests in itertools.groupby(computing, key=lambda one: one.path)]
    ordered: list[pytest.Item] = []
    for at, tests in enumerate(files):
        ordered += [*waiting[len(waiting) * at // len(files) : len(waiting) * (at + 1) // len(files)], *tests]
    return ordered if files else waiting


def pytest_collection_finish() -> None:
    """Freeze what was imported: some tests collect garbage many times."""
    from .support import frozen  # noqa: F401  (what it does when it is imported, and not before)
