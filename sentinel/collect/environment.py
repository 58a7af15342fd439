"""The environment variables that `attach` reads. With cli/, the only reader of os.environ."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
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
    """Return the variables as os.environ has them now."""
    env = os.environ
    job = launch = None
    torchrun = env.get("TORCHELASTIC_RUN_ID")
    if torchrun and torchrun != "none":
        job, launch = f"torchrun-{torchrun}", f"torchrun-{torchrun}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    elif env.get("SLURM_JOB_ID"):
        job = f"slurm-{env['SLURM_JOB_ID']}"
        launch = f"{job}-{env.get('SLURM_RESTART_COUNT', '0')}-{env.get('SLURM_STEP_ID', '0')}"
    elif _is_on_one_node(env) and (parent := _parent()):
        # torchrun without an id, mpirun, a script of one's own: the ranks of one launch have one parent.
        job, launch = parent, f"{parent}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Environment(
        is_disabled=env.get("SENTINEL_DISABLE", "0") not in ("", "0"),
        directory=Path(env.get("SENTINEL_DIR") or "sentinel_runs"),
        run=env.get("SENTINEL_RUN") or None,
        rank=_number(env.get("RANK") or env.get("SLURM_PROCID")),
        world_size=_number(env.get("WORLD_SIZE") or env.get("SLURM_NTASKS")),
        launch=launch,
        job=job,
    )


def _is_on_one_node(env: Mapping[str, str]) -> bool:
    size = _number(env.get("WORLD_SIZE"))
    return size is not None and size > 1 and size == _number(env.get("LOCAL_WORLD_SIZE"))


def _parent() -> str | None:
    """Return a name that the children of our parent share, and no others on this machine: when it began, and its id."""
    try:
        ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text("utf-8").rpartition(")")[2].split()[19])
        boot = int(Path("/proc/stat").read_text("utf-8").partition("\nbtime ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return None
    began = time.localtime(boot + ticks // os.sysconf("SC_CLK_TCK"))
    return time.strftime("%Y%m%d-%H%M%S", began) + f"-{os.getppid()}"


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
