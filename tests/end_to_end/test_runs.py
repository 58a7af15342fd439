"""Whole runs with real ranks and a real daemon: nothing is missed, nothing is told that is not so."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from sentinel.order.causes import leading_causes
from sentinel.order.origin import origin
from sentinel.store.journal import Journal

from ..support.results import anomalies, anomalies_but_of_pace, decisions, incidents
from ..support.spools import SaidSoFar
from ..support.waiting import wait_for
from ..support.warm import cli
from .ranks import EVERYTHING, ROOT, train_example

NUM_PARAMETERS = 2 + 4 * 12 + 2 + 1
"""Of the example's GPT with 4 blocks: two embeddings, the blocks, the last norm, the head."""


def rows_a_step(num_chunks: int, num_replicas: int) -> int:
    """Rows of params, wgrads and the black box, all ranks: each chunk has the input of its first block and the output of
    each of its blocks, the last chunk its own output beside them; each forward and backward."""
    return num_replicas * (2 * NUM_PARAMETERS + 2 * (num_chunks + 4 + 1))


def assert_all_was_judged(run_dir: Path, num_steps: int, num_ranks: int, expected: int) -> None:
    closed = decisions(run_dir)
    spoken = [SaidSoFar(run_dir, rank) for rank in range(num_ranks)]
    assert [one.step for one in closed] == list(range(num_steps))
    assert all(len(one.ranks) == num_ranks and not one.missing for one in closed)
    judged = sum(part.num_rows for one in closed for part in one.ranks)
    assert judged == sum(one.num_rows for one in spoken) == expected
    assert not any(end.num_dropped_rows or end.num_folded_rows for one in spoken for end in one.ends.values())
    assert not any(one.health for one in spoken)


@pytest.mark.parametrize(
    ("arguments", "num_chunks"),
    [
        pytest.param((), 2, marks=pytest.mark.long),
        (("--schedule", "interleaved1f1b"), 4),
        # Rows of tensor-parallel ranks are counted one by one in tests/layouts.
        pytest.param(("--tp", "2"), 2, marks=pytest.mark.long),
    ],
    ids=["1f1b", "interleaved1f1b", "tensor-parallel"],
)
def test_rows_judged_are_rows_expected_on_every_layout(arguments: tuple[str, ...], num_chunks: int, tmp_path: Path) -> None:
    run = train_example(tmp_path, "--steps", "8", *arguments)

    assert_all_was_judged(run.run_dir, 8, 4, 8 * rows_a_step(num_chunks, 2))
    names = Counter(name for rank in range(4) for name in SaidSoFar(run.run_dir, rank).of(3, "wgrad"))
    assert len(names) == NUM_PARAMETERS
    assert set(names.values()) == {2}
    assert not anomalies_but_of_pace(run.run_dir)


def test_a_rank_that_attaches_late_is_waited_for(tmp_path: Path) -> None:
    run = train_example(tmp_path, "--steps", "6", "--attach-late-s", "3")

    assert_all_was_judged(run.run_dir, 6, 4, 6 * rows_a_step(2, 2))
    assert not anomalies_but_of_pace(run.run_dir)


def test_rows_that_come_late_never_reopen_a_step(tmp_path: Path) -> None:
    """Rank 2's spool reaches the daemon when all is judged: a slow file system."""
    fault = {"module": "blocks.3.mlp.fc1", "dp_rank": 1, "micro_step": 1, "steps": [5]}
    recorded = train_example(
        tmp_path / "recorded", "--steps", "9", is_judged=False, faults=[fault], config=EVERYTHING
    ).run_dir
    run_dir = tmp_path / "seen" / "run"
    run_dir.mkdir(parents=True, mode=0o700)
    for name in ("attempts", "control"):
        if (recorded / name).is_dir():
            shutil.copytree(recorded / name, run_dir / name)
    late = list((recorded / "spool").glob("r00002-*"))
    shutil.copytree(recorded / "spool", run_dir / "spool", ignore=shutil.ignore_patterns("r00002-*"))

    daemon = subprocess.Popen(
        [*cli(), "serve", str(run_dir), "--late-after-s", "1", "--listen", "127.0.0.1:0"],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        wait_for(lambda: is_told(run_dir, 9), "the files", timeout_s=240.0, interval_s=0.1)
        before = [one for one in anomalies(run_dir) if one.step == 5]
        shutil.copytree(late[0], run_dir / "spool" / late[0].name)
        time.sleep(2)
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=240)

    assert daemon.returncode == 0
    closed = decisions(run_dir)
    assert [one.step for one in closed] == list(range(9))
    assert all([part.rank for part in one.ranks] == [0, 1, 3] and list(one.missing) == [2] for one in closed)
    assert [one for one in anomalies(run_dir) if one.step == 5] == before
    first = origin(before[leading_causes(before)[0]], before)
    assert (first.module, first.rank, first.micro_step) == ("blocks.3.mlp.fc1", 3, 1)


def is_told(run_dir: Path, num_steps: int) -> bool:
    """Return whether so many steps are judged, and what was found in them is in the files, which are written behind that."""
    path = run_dir / ".daemon" / "journal.sqlite"
    if not path.exists():
        return False
    with contextlib.closing(Journal(path, read_only=True)) as journal:
        judged, found = journal.judged, journal.found.count("anomalies")
    return judged >= num_steps and len(anomalies(run_dir)) == found


@pytest.mark.parametrize("healthy", [100, pytest.param(500, marks=pytest.mark.long)])
def test_nobody_is_paged_in_many_healthy_steps_and_a_fault_after_them_is_found(tmp_path: Path, healthy: int) -> None:
    num_steps = healthy + 5
    fault = {"module": "blocks.2.attn.proj", "micro_step": 1, "steps": [healthy + 1]}

    run = train_example(
        tmp_path, "--steps", str(num_steps), "--pp", "1", "--micro-batches", "2",
        num_ranks=1, faults=[fault], config={**EVERYTHING, "max_overhead": None},
    )  # fmt: skip

    assert [one.step for one in decisions(run.run_dir)] == list(range(num_steps))
    spoken = SaidSoFar(run.run_dir, 0)
    due = sum(sum(end.due.values()) for end in spoken.ends.values())
    judged = sum(part.num_rows for one in decisions(run.run_dir) for part in one.ranks)
    assert judged == spoken.num_rows > due == num_steps * 2 * NUM_PARAMETERS
    early = [one for one in incidents(run.run_dir) if one.opened_step < healthy]
    assert not [one.title for one in early if one.paged]
    found = [one for one in anomalies(run.run_dir) if one.step == healthy + 1]
    first = origin(found[leading_causes(found)[0]], found)
    assert (first.module, first.rank, first.micro_step) == ("blocks.2.attn.proj", 0, 1)
    assert [one for one in incidents(run.run_dir) if one.paged and one.module == "blocks.2.attn.proj"]
