"""Where the suite's processor time goes: a plugin of pytest, and what it found.

    PYTHONPATH=benchmarks make test PYTEST_FLAGS="-p suite_cost" SUITE_COST=DIRECTORY
    python benchmarks/suite_cost.py DIRECTORY

Each worker writes a line a test into DIRECTORY: the processor time of the test with its fixtures, in its own process and in
those that it waited for. Processes that outlive the test that began them are counted at the one that waits for them, or
nowhere.
"""

from __future__ import annotations

import collections
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

COLLECTING = "collecting"


def _spent() -> tuple[float, float]:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


def _write(name: str, before: tuple[float, float]) -> None:
    own, children = (after - since for after, since in zip(_spent(), before, strict=True))
    with (Path(os.environ["SUITE_COST"]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"test": name, "own_s": own, "children_s": children}) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count one test with its fixtures."""
    before = _spent()
    try:
        return (yield)
    finally:
        _write(item.nodeid, before)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Count what collecting takes a worker."""
    before = _spent()
    try:
        return (yield)
    finally:
        _write(COLLECTING, before)


def main() -> None:
    """Print the sum, and what folders and the dearest tests take."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit(f"expected the directory that SUITE_COST named, got {sys.argv[1:]}")
    found = [json.loads(line) for file in Path(sys.argv[1]).glob("*.jsonl") for line in file.read_text().splitlines()]
    tests = [one for one in found if one["test"] != COLLECTING]
    print("collecting, each process:", *(f"{one['own_s']:.1f} s" for one in found if one["test"] == COLLECTING))
    own, children = (sum(one[key] for one in tests) for key in ("own_s", "children_s"))
    print(f"{len(tests)} tests: {own:.0f} s, and {children:.0f} s of processes that they waited for")
    folders: collections.Counter[str] = collections.Counter()
    for one in tests:
        folders[one["test"].split("::")[0].split("/")[1]] += one["own_s"] + one["children_s"]
    for name, seconds in folders.most_common(20):
        print(f"{seconds:8.1f} s  {name}")
    for one in sorted(tests, key=lambda one: -one["own_s"] - one["children_s"])[:20]:
        print(f"{one['own_s'] + one['children_s']:8.1f} s  {one['test']}")


if __name__ == "__main__":
    main()
