"""What the environment says about this process. With cli/, the only reader of os.environ."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The variables that Sentinel's trainer side understands, read once at attach."""

    is_disabled: bool = False
    """SENTINEL_DISABLE is set and not 0: attach is a no-op."""
    directory: Path = Path("sentinel_runs")
    """SENTINEL_DIR: where runs lie."""
    run: str | None = None
    """SENTINEL_RUN: the run's name."""
    rank: int | None = None
    """RANK or SLURM_PROCID."""
    world_size: int | None = None
    """WORLD_SIZE or SLURM_NTASKS."""
    launch: str | None = None
    """Id and restart count of the launcher (torchrun, Slurm); the same on all ranks of one attempt."""
    job: str | None = None
    """Id of the launcher without the restart count: what all attempts of a run share."""


def read_environment() -> Environment:
    """Return what os.environ says now."""
    env = os.environ
    job = launch = None
    torchrun = env.get("TORCHELASTIC_RUN_ID")
    if torchrun and torchrun != "none":
        job, launch = f"torchrun-{torchrun}", f"torchrun-{torchrun}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    elif env.get("SLURM_JOB_ID"):
        job = f"slurm-{env['SLURM_JOB_ID']}"
        launch = f"{job}-{env.get('SLURM_RESTART_COUNT', '0')}-{env.get('SLURM_STEP_ID', '0')}"
    return Environment(
        is_disabled=env.get("SENTINEL_DISABLE", "0") not in ("", "0"),
        directory=Path(env.get("SENTINEL_DIR") or "sentinel_runs"),
        run=env.get("SENTINEL_RUN") or None,
        rank=_number(env.get("RANK") or env.get("SLURM_PROCID")),
        world_size=_number(env.get("WORLD_SIZE") or env.get("SLURM_NTASKS")),
        launch=launch,
        job=job,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
