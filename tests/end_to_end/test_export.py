"""Groups of tensors of a real run: the norm of the whole gradient, in an export and in a rule alike."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..support.results import anomalies
from ..support.warm import cli
from .ranks import ROOT, train_example

NUM_STEPS = 3
PACK = """
rules:
  - name: any-gradient
    detector: AnomalyNan
    match: {kind: wgrad, aggregate: {global_grad_norm: "*"}, statistic: norm}
    args: {threshold: 1.0e-9}
    severity: warning
    episode_quiet_steps: 0
  - name: each-block
    detector: AnomalyNan
    match: {kind: wgrad, aggregate: "blocks.{}.*", statistic: norm}
    args: {threshold: 1.0e-9}
    severity: warning
    episode_quiet_steps: 0
"""


def export(run_dir: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [*cli(), "export", str(run_dir), "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def true_norms(folder: Path, num_ranks: int) -> list[float]:
    """Return the norm of the whole gradient of each step, from the norms of what each rank held of each parameter.

    Ranks hold copies, whose norms are equal to the last bit, or shards, whose norms are not.
    """
    held: dict[str, list[np.ndarray]] = {}
    for rank in range(num_ranks):
        names = json.loads((folder / f"rank{rank}.json").read_text())["names"]
        gradients = np.load(folder / f"rank{rank}.npz")["gradients"]
        for at, name in enumerate(names):
            held.setdefault(name, []).append(gradients[:, at, 0])
    squares = [
        one[0] ** 2 if all((other == one[0]).all() for other in one) else np.sum(np.square(one), axis=0)
        for one in held.values()
    ]
    return np.sqrt(np.sum(squares, axis=0)).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("num_ranks", "arguments"),
    [
        pytest.param(4, (), id="pipeline x data parallel"),
        pytest.param(2, ("--pp", "1", "--tp", "2"), id="tensor parallel", marks=pytest.mark.long),
        pytest.param(4, ("--tp", "2"), id="pipeline x tensor parallel", marks=pytest.mark.long),
    ],
)
def test_the_group_of_all_gradients_has_the_norm_of_the_whole(
    num_ranks: int, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    run = train_example(
        tmp_path, "--steps", str(NUM_STEPS), "--truth", str(tmp_path), *arguments, num_ranks=num_ranks, pack=PACK
    )
    norms = true_norms(tmp_path, num_ranks)
    if not arguments:
        said = json.loads((tmp_path / "rank0.json").read_text())["norms"]
        assert norms == pytest.approx([float.fromhex(norm) for norm in said], rel=1e-5), "the trainer's own"

    exported = export(
        run.run_dir, "--kind", "wgrad", "--statistic", "norm",
        "--aggregate", "global_grad_norm=*", "--aggregate", "blocks.{}.*", "--aggregate", "rest=tok*,pos*,norm*,head*",
    )  # fmt: skip

    of_step = {at: {one["name"]: one for one in exported if one["step"] == at} for at in range(NUM_STEPS)}
    whole = [of_step[at]["global_grad_norm"] for at in range(NUM_STEPS)]
    assert [one["norm"] for one in whole] == pytest.approx(norms, rel=1e-5)
    assert all(one["is_whole"] and one["num_excluded"] == 0 for one in whole)
    for groups in of_step.values():
        parts = [one for name, one in groups.items() if name != "global_grad_norm"]
        assert len(parts) == 5
        assert sum(one["num_tensors"] for one in parts) == groups["global_grad_norm"]["num_tensors"]
        assert sum(one["norm"] ** 2 for one in parts) == pytest.approx(groups["global_grad_norm"]["norm"] ** 2, rel=1e-9)
    # The daemon judged the same numbers by a rule.
    judged = {(one.step, one.tag_name): one for one in anomalies(run.run_dir) if one.num_members}
    assert len(judged) == NUM_STEPS * 5
    for at in range(NUM_STEPS):
        for name in ("global_grad_norm", *(f"blocks.{block}.*" for block in range(4))):
            assert judged[at, name].value == pytest.approx(of_step[at][name]["norm"], rel=1e-12)
            assert judged[at, name].num_members == of_step[at][name]["num_tensors"]
