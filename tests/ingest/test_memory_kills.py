"""Which processes the kernel killed for want of memory, by its counters of the machine and of memory groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.ingest.memory_kills import MemoryKills
from sentinel.process import ProcessId

RANK, OTHER = (ProcessId(pid=pid, start=5, space="s", boot="b") for pid in (77, 78))
GROUPS = {
    "v1": ("4:memory:/job/step\n3:cpu:/\n", "memory/job/step", "memory.oom_control", "memory.limit_in_bytes"),
    "v2": ("0::/job/step\n", "job/step", "memory.events", "memory.max"),
}


class Machine:
    """Counters that a test sets."""

    def __init__(self, folder: Path, version: str = "") -> None:
        self.proc, self.groups = folder / "proc", folder / "cgroup"
        self.proc.mkdir()
        self.group: Path | None = None
        if version:
            cgroup, path, self.file, limit = GROUPS[version]
            self.group = self.groups / path
            self.group.mkdir(parents=True)
            (self.group / limit).write_text(f"{2**30}\n")
            (self.proc / "77").mkdir()
            (self.proc / "77" / "cgroup").write_text(cgroup)
        self.count(0, 0)

    def count(self, machine: int, group: int) -> None:
        (self.proc / "vmstat").write_text(f"nr_free 1\noom_kill {machine}\n")
        if self.group is not None:
            (self.group / self.file).write_text(f"under_oom 0\noom_kill {group}\n")

    def kills(self) -> MemoryKills:
        return MemoryKills(self.proc, self.groups)


def test_a_kill_is_remembered_until_the_process_has_let_go_of_its_memory(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    kills = machine.kills()
    kills.look(0.0)
    machine.count(1, 0)
    kills.look(0.05)
    kills.look(0.10)

    assert kills.near(RANK, 3.0)
    assert not kills.near(RANK, 60.0)


def test_kills_from_before_are_none_of_its(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.count(4, 0)
    kills = machine.kills()
    kills.look(0.0)
    kills.look(0.05)

    assert not kills.near(RANK, 0.05)


@pytest.mark.parametrize("version", GROUPS)
def test_the_counter_of_its_own_group_decides(tmp_path: Path, version: str) -> None:
    machine = Machine(tmp_path, version)
    kills = machine.kills()
    kills.add(RANK)
    kills.look(0.0)

    machine.count(1, 0)
    kills.look(0.05)
    assert not kills.near(RANK, 0.05), "somebody else's"
    assert not kills.denies(RANK, 0.05), "and yet nobody knows in which group it was at last"
    machine.count(2, 1)
    kills.look(0.10)

    assert kills.near(RANK, 0.10)
    assert kills.limit(RANK) == 2**30
    assert not kills.denies(RANK, 0.10)
    assert (kills.denies(RANK, 60.0), kills.denies(OTHER, 60.0)) == (True, False)


@pytest.mark.parametrize("version", GROUPS)
def test_a_process_that_was_moved_is_looked_for_in_its_new_group(tmp_path: Path, version: str) -> None:
    machine = Machine(tmp_path, version)
    kills = machine.kills()
    kills.add(RANK)
    kills.look(0.0)
    lines, path, file, _ = GROUPS[version]
    moved = machine.groups / path.replace("step", "other")
    moved.mkdir()
    (moved / file).write_text("under_oom 0\noom_kill 3\n")
    (machine.proc / "77" / "cgroup").write_text(lines.replace("step", "other"))
    kills.add(RANK)
    assert not kills.near(RANK, 0.05), "those of the new group are older than it"

    (moved / file).write_text("under_oom 0\noom_kill 4\n")
    machine.count(1, 0)
    # Whoever is being ended is shown in the root.
    (machine.proc / "77" / "cgroup").write_text(lines.replace("job/step", ""))
    kills.add(RANK)
    kills.look(0.10)

    assert kills.near(RANK, 0.10)


def test_without_counters_nothing_is_told(tmp_path: Path) -> None:
    kills = MemoryKills(tmp_path / "none", tmp_path / "none")
    kills.add(RANK)
    kills.look(0.0)

    assert (kills.near(RANK, 0.0), kills.limit(RANK), kills.denies(RANK, 0.0)) == (False, None, False)
