"""Where traces lie: of thousands of ranks a folder is listed once for each change of it, and none that nobody asks for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel import trace
from sentinel.trace import TraceRings, ring_dir, step_path, trace_paths

RANKS = 3000


def put(run_dir: Path, attempt: int, rank: int, *steps: int) -> Path:
    """Put files in a rank's ring that hold nothing; return its folder."""
    folder = ring_dir(run_dir, attempt, rank)
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        step_path(folder, step).touch()
    return folder


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Returns the folders that were listed since the last call, by their names."""
    found: list[str] = []
    listdir = os.listdir

    def counted(folder: str) -> list[str]:
        found.append(Path(folder).name)
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", counted)

    def since() -> list[str]:
        taken = sorted(found)
        found.clear()
        return taken

    return since


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which thousands of ranks traced one step, longer ago than the clock of any file system is coarse."""
    run_dir = tmp_path_factory.mktemp("runs") / "wide"
    folders = [put(run_dir, 0, rank, 7) for rank in range(RANKS)]
    for folder in (*folders, folders[0].parent, folders[0].parent.parent):
        os.utime(folder, (1e9, 1e9))
    return run_dir


def test_one_rank_of_thousands_costs_one_folder(wide: Path, listed: Callable[[], list[str]]) -> None:
    rings = TraceRings(wide)

    assert rings.newest_attempt() == 0 and len(rings.ranks(0)) == RANKS and rings.steps(0, 1234) == (7,)
    assert listed() == ["attempt0", "rank0", "rank1234", "trace"]
    assert rings.newest_attempt() == 0 and len(rings.ranks(0)) == RANKS and rings.steps(0, 1234) == (7,)
    assert listed() == []


def test_what_changed_is_listed_again_and_nothing_else(wide: Path, listed: Callable[[], list[str]]) -> None:
    rings = TraceRings(wide)
    assert len(rings.paths()) == RANKS
    assert len(listed()) == RANKS + 2
    folder = put(wide, 0, 41, 8)
    os.utime(folder, (1.1e9, 1.1e9))

    assert rings.paths()[-1][:3] == (0, 41, 8)
    assert listed() == ["rank41"]
    step_path(folder, 8).unlink()
    os.utime(folder, (1e9, 1e9))
    assert len(rings.paths()) == RANKS and listed() == ["rank41"]


def test_a_change_in_the_tick_of_the_list_shows(tmp_path: Path) -> None:
    folder = put(tmp_path, 0, 3, 1)
    rings = TraceRings(tmp_path)
    assert rings.steps(0, 3) == (1,)
    changed = folder.stat()
    step_path(folder, 2).touch()
    os.utime(folder, ns=(changed.st_atime_ns, changed.st_mtime_ns))

    assert rings.steps(0, 3) == (1, 2)


def test_the_newest_attempt_is_one_of_which_anything_is_there(tmp_path: Path) -> None:
    assert TraceRings(tmp_path).newest_attempt() is None
    put(tmp_path, 0, 1, 5)
    put(tmp_path, 2, 0)

    assert TraceRings(tmp_path).newest_attempt() == 0
    put(tmp_path, 2, 1, 0)
    assert TraceRings(tmp_path).newest_attempt() == 2


def test_what_is_called_otherwise_is_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "SETTLED_NS", 0)
    folder = put(tmp_path, 0, 1, 5, 12)
    for name in ("step7.safetensors.tmp", "step-1.safetensors", "step007.safetensors", "notes"):
        (folder / name).touch()
    (folder.parent / "rank01").mkdir()
    (folder.parent / "rank2").touch()

    assert [(one.rank, one.step, one.path.name) for one in trace_paths(tmp_path)] == [
        (1, 5, "step5.safetensors"), (1, 12, "step12.safetensors"),
    ]  # fmt: skip
    assert trace_paths(tmp_path / "nowhere") == []
