"""Runs on disk that nobody trained, and the part of a daemon that serves one of them, driven by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.serving import ServedRun
from sentinel.judge.packs import RulePacks
from sentinel.store.run_paths import RunPaths
from sentinel.testing import EPOCH_S, SyntheticRun

NOW = EPOCH_S
"""When all of it happens: the wall clock's time in seconds."""


def small_run(run_dir: Path, **options: Any) -> SyntheticRun:
    """Return a run of two stages of two ranks with few values; it writes when told. options: those of `SyntheticRun`."""
    return SyntheticRun(run_dir, **{"pp": 2, "dp": 2, "layers": 4, "d_model": 16, "elements": 8, **options})


def loaded_packs(*paths: Path) -> RulePacks:
    """Return the default rules, and those of these packs over them."""
    packs = RulePacks(paths)
    packs.load()
    return packs


def served(run_dir: Path, config: DaemonConfig | None = None, packs: RulePacks | None = None) -> ServedRun:
    """Return a run as a daemon serves it, before its first turn; whoever asks closes it."""
    run_dir.chmod(0o700)
    return ServedRun(RunPaths.of(run_dir), config or DaemonConfig(), packs or loaded_packs())


def catch_up(run: ServedRun, now: float = NOW) -> None:
    """Judge what there is."""
    while run.turn(now):
        pass


def wait_for_history(run: ServedRun) -> None:
    """Wait until the history of a run has what its newest snapshot has: until then it takes no other."""
    until = time.monotonic() + 60.0
    while not run._history.has(run._snapshots.seq):
        assert time.monotonic() < until, run._history.problem
        time.sleep(0.01)


def judge_run(
    run_dir: Path, config: DaemonConfig | None = None, packs: RulePacks | None = None, *, is_over: bool = False
) -> None:
    """Judge what there is, finish, and leave what a daemon leaves. is_over: nothing more will come of this run."""
    run = served(run_dir, config, packs)
    catch_up(run)
    run.finish(NOW, is_over=is_over, deadline=float("inf"))
    run.close()
