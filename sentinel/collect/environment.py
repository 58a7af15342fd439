"""The environment variables that `attach` reads. With cli/, the only reader of os.environ."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sentinel.rank_identity import LABEL, MAX_LABEL_CHARS, MAX_LABELS, label_problem


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
    identity: dict[str, str] = {}
    """What the scheduler calls this process by, as entries of a descriptor's `environment`: `job`, `pod`, `node`, and the
    labels of SENTINEL_LABELS. Only what is set."""
    visible_gpus: str = ""
    """CUDA_VISIBLE_DEVICES: which GPUs of the host this process numbers from 0 on."""
    label_problems: tuple[str, ...] = ()
    """What is wrong with SENTINEL_LABELS; such parts are left out."""


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
    labels, problems = parse_labels(env.get("SENTINEL_LABELS", ""))
    return Environment(
        is_disabled=env.get("SENTINEL_DISABLE", "0") not in ("", "0"),
        directory=Path(env.get("SENTINEL_DIR") or "sentinel_runs"),
        run=env.get("SENTINEL_RUN") or None,
        rank=_number(env.get("RANK") or env.get("SLURM_PROCID")),
        world_size=_number(env.get("WORLD_SIZE") or env.get("SLURM_NTASKS")),
        launch=launch,
        job=job,
        identity={**_scheduler_names(env), **{LABEL + name: value for name, value in labels.items()}},
        visible_gpus=env.get("CUDA_VISIBLE_DEVICES", ""),
        label_problems=problems,
    )


_JOB = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "AWS_BATCH_JOB_ID", "RAY_JOB_ID", "JOB_ID", "JOB_NAME")
"""Variables of schedulers that hold the id or name of a job: Slurm, LSF, PBS, AWS Batch, Ray, Grid Engine, Kubeflow."""
_NODE = ("NODE_NAME", "SLURMD_NODENAME")
"""Variables that hold the machine's name: set in a pod by the downward API; by Slurm."""


def _scheduler_names(env: Mapping[str, str]) -> dict[str, str]:
    """Return `job`, `node` and `pod`, as far as they are known, each within the bounds of a descriptor."""
    job = next((env[name] for name in _JOB if env.get(name)), "")
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        job = f"{array}_{task}"  # What squeue and scancel call it.
    torchrun = env.get("TORCHELASTIC_RUN_ID")
    if not job and torchrun and torchrun != "none":
        job = torchrun
    index = env.get("JOB_COMPLETION_INDEX")
    is_kubernetes = bool(env.get("KUBERNETES_SERVICE_HOST"))
    found = {
        "job": f"{job} index {index}" if job and index else f"index {index}" if index else job,
        "node": next((env[name] for name in _NODE if env.get(name)), ""),
        # The host name of a pod is the pod's name, unless it was given another.
        "pod": env.get("POD_NAME") or (env.get("HOSTNAME", "") if is_kubernetes else ""),
    }
    return {name: value[:MAX_LABEL_CHARS] for name, value in found.items() if value}


def parse_labels(text: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the labels of `team=nlp,cluster=a`, and in words what of it is none."""
    labels: dict[str, str] = {}
    problems: list[str] = []
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, equals, value = (one.strip() for one in part.partition("="))
        why = label_problem(name, value) if equals else f"expected NAME=VALUE, got {part[:80]!r}"
        if not why and len(labels) == MAX_LABELS and name not in labels:
            why = f"expected at most {MAX_LABELS} labels, {name} is left out"
        if why:
            problems.append(f"SENTINEL_LABELS: {why}")
        else:
            labels[name] = value
    return labels, tuple(problems)


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
