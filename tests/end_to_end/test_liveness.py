"""Real ranks that stop, die, hang, fall behind, or hold a flipped bit: who is named, by a daemon that only reads along."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.anomaly import Anomaly, Severity

from ..support.ports import free_port
from ..support.results import anomalies, incidents, revisions
from ..support.spools import SaidSoFar
from ..support.waiting import wait_for
from ..support.warm import cli, interpreter
from .ranks import EXAMPLE, ROOT, SMALL, train_example

PACK = """
rules:
  - name: stale-rank
    args: {stale_after_s: 6, hang_after_s: 6, quiet_after_s: 6}
"""


class Ranks:
    """The example's ranks, each a process that the test holds, and a daemon beside them."""

    def __init__(self, folder: Path, num_ranks: int, *arguments: str, faults: list[dict[str, Any]] | None = None) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir(parents=True, mode=0o700)
        folder.chmod(0o700)
        (folder / "pack.yaml").write_text(PACK)
        (folder / "faults.json").write_text(json.dumps(faults or []))
        port = free_port()
        clean = {key: value for key, value in os.environ.items() if not key.startswith("SENTINEL_")}
        common = {
            **clean, "PYTHONPATH": str(ROOT), "SENTINEL_DIR": str(folder), "SENTINEL_RUN": "run", "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        self.logs = [(folder / f"rank{rank}.log").open("wb") for rank in range(num_ranks)]
        command = [interpreter(), str(EXAMPLE / "train.py"), "--faults", str(folder / "faults.json"), *SMALL, *arguments]
        self.ranks = [
            subprocess.Popen(
                command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=self.logs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        self.log = (folder / "daemon.log").open("wb")
        serve = [*cli(), "serve", str(self.run_dir), "--no-http"]
        self.daemon = subprocess.Popen(
            [*serve, "--rules", str(folder / "pack.yaml")], env=common, stdout=self.log, stderr=subprocess.STDOUT
        )

    def close(self) -> None:
        for process in [*self.ranks, self.daemon]:
            if process.poll() is None:
                process.kill()
            process.wait()
        for log in [*self.logs, self.log]:
            log.close()

    def pid_of(self, rank: int) -> int:
        """Return the trainer's own process, not the one that stands for it here."""
        descriptor = SaidSoFar(self.run_dir, rank).descriptor
        assert descriptor is not None
        return int(descriptor.environment["pid"])

    @property
    def found(self) -> list[Anomaly]:
        """What is said of ranks but that one is slow: with more ranks than cores that is true now and then."""
        return [one for one in anomalies(self.run_dir) if one.rule in ("stale-rank", "run-ended", "replica-divergence")]

    def has_trained(self, num_steps: int) -> bool:
        """Whether all ranks have come so far, with the daemon beside them: it accuses nobody whom it has not heard live."""
        assert self.daemon.poll() is None
        is_followed = len(list(self.run_dir.glob("spool/*/ack"))) == len(self.ranks)
        return is_followed and all(len(SaidSoFar(self.run_dir, rank).ends) >= num_steps for rank in range(len(self.ranks)))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    with contextlib.ExitStack() as stack:

        def begin(*arguments: Any, **options: Any) -> Ranks:
            ranks = Ranks(tmp_path, *arguments, **options)
            stack.callback(ranks.close)
            return ranks

        yield begin


def test_a_stopped_rank_is_named_and_its_return_told(start: Callable[..., Ranks]) -> None:
    run = start(3, "--steps", "100000", "--step-time", "0.3", "--pp", "1")
    wait_for(lambda: run.has_trained(8), "training", timeout_s=240.0, interval_s=0.3)
    assert run.found == []

    pid = run.pid_of(2)
    os.kill(pid, signal.SIGSTOP)
    (onset,) = wait_for(lambda: run.found, "the stop", timeout_s=240.0, interval_s=0.3)
    time.sleep(8.0)
    assert len(run.found) == 1, "those that wait are not accused"
    os.kill(pid, signal.SIGCONT)
    end = wait_for(lambda: run.found[1:], "the return", timeout_s=240.0, interval_s=0.3)[0]

    assert (onset.rank, onset.ranks, onset.statistic) == (2, (2,), "stopped_s")
    assert "rank 2 is stopped: nothing was heard for" in onset.message
    assert f"process {pid} on " in onset.message and "is stopped (state T)" in onset.message
    assert f"kill -CONT {pid}" in onset.message
    assert f"last seen in step {onset.step}" in onset.message
    assert (end.event, end.message) == ("end", "rank 2: goes on")
    # The step in which it stood still was a slow one too: that joins later, as a further revision of the same incident.
    (held,) = {one.id for one in revisions(run.run_dir) if onset.id in one.members}
    assert [one.ranks for one in incidents(run.run_dir) if one.id == held] == [(2,)]


@pytest.mark.long
def test_a_killed_rank_is_named(start: Callable[..., Ranks]) -> None:
    run = start(2, "--steps", "100000", "--step-time", "0.3", "--pp", "1")
    wait_for(lambda: run.has_trained(8), "training", timeout_s=240.0, interval_s=0.3)

    run.ranks[1].kill()
    onset = wait_for(lambda: run.found, "the end", timeout_s=240.0, interval_s=0.3)[0]

    assert (onset.rule, onset.rank) == ("run-ended", 1)


def test_a_rank_that_hangs_in_its_step_is_named_with_its_module(start: Callable[..., Ranks]) -> None:
    fault = {"type": "sleep", "module": "blocks.1.mlp", "dp_rank": 1, "micro_step": 0, "steps": [12], "seconds": 100000}
    run = start(3, "--steps", "100000", "--step-time", "0.3", "--pp", "1", faults=[fault])

    onset = wait_for(lambda: run.found, "the hang", timeout_s=240.0, interval_s=0.3)[0]
    time.sleep(3.0)

    assert len(run.found) == 1
    assert (onset.rank, onset.step, onset.statistic) == (1, 12, "idle_s")
    assert onset.message.startswith("rank 1 hangs: no progress for")
    assert "forward of " in onset.message
    assert onset.message.endswith("ranks 0, 2 wait")


@pytest.mark.long
def test_a_straggler_among_synchronous_ranks_is_named(tmp_path: Path) -> None:
    """All step times are alike; only the straggler does not wait."""
    where = {"module": "blocks.1.mlp", "dp_rank": 2, "micro_step": 0}
    fault = {"type": "sleep", "steps": list(range(25, 60)), "seconds": 0.4, **where}
    ended = train_example(tmp_path, "--steps", "50", "--pp", "1", "--micro-batches", "1", num_ranks=3, faults=[fault])

    found = [one for one in anomalies(ended.run_dir) if one.rule == "slow-rank"]
    ends = {one.onset_id: one.step for one in found if one.event == "end"}
    onsets = [one for one in found if one.event == "onset"]
    steps = [SaidSoFar(ended.run_dir, rank).ends[40].step_time_s for rank in range(3)]
    assert max(steps) < 1.5 * min(steps)
    # Another may be slow before, for want of a core, but not slower than this one.
    lasts = [one for one in onsets if one.severity is not Severity.INFO and one.step <= 32 and ends.get(one.id, 60) > 45]
    assert {one.rank for one in lasts} == {2}
    # A single step of another, longer than all before, may be written down for want of a core; nothing is told of it.
    assert {one.rank for one in onsets if one.step >= 27 and one.severity is not Severity.INFO} <= {2}


def test_a_bit_flipped_in_a_weight_names_the_rank(tmp_path: Path) -> None:
    fault = {"type": "flip", "module": "blocks.1.mlp.fc1", "dp_rank": 1, "steps": [12]}
    ended = train_example(tmp_path, "--steps", "20", "--pp", "1", "--micro-batches", "1", num_ranks=3, faults=[fault])

    found = [one for one in anomalies(ended.run_dir) if one.rule == "replica-divergence"]
    assert [(one.step, one.kind, one.tag_name, one.ranks, one.group_mates) for one in found] == [
        (12, "param", "blocks.1.mlp.fc1.weight", (1,), (0, 1, 2))
    ]
