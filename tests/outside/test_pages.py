"""What the pages show of a package of one's own works as it stands there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel.testing.battery import BATTERY, DetectorUnderTest

from ..support.warm import interpreter
from .test_seams import install, run

DOCS = Path(__file__).parents[2] / "docs"
TRAIN = """
import torch
import sentinel

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model[0].weight.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
monitor = sentinel.attach(model, optimizer, "monitor.yaml")
for step in range(20):
    model(torch.randn(32, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def module(page: str, path: str) -> str:
    """Return the block of a page that begins with the path of the file that it is."""
    (found,) = [block for block in blocks(page, "python") if block.startswith(f'"""{path}"""')]
    return found


@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
def test_the_detector_of_the_page_passes_the_battery(check: Callable[[DetectorUnderTest], None]) -> None:
    names: dict[str, type] = {}
    exec(module("extending.md", "frozen/frozen_weights.py"), names)

    check(DetectorUnderTest(names["Unmoved"]()))


@pytest.mark.slow
def test_detector_probes_and_formats_of_the_pages_work_together(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (folder,) = [tomllib.loads(block) for block in blocks("extending.md", "toml")]
    path = install(
        site,
        folder["project"]["entry-points"]
        | {
            "sentinel.probes": {
                "relu_zeros": "my_package.relu_zeros:ReluZeros",
                "weight_range": "my_package.weight_range:WeightRange",
            },
            "sentinel.exports": {"markdown": "my_package.markdown:Markdown", "steps": "my_package.steps:Steps"},
        },
    )
    (site / "frozen_weights.py").write_text(module("extending.md", "frozen/frozen_weights.py"))
    (site / "my_package").mkdir()
    for page, name in (
        ("probes.md", "relu_zeros"),
        ("probes.md", "weight_range"),
        ("exports.md", "markdown"),
        ("exports.md", "steps"),
    ):
        (site / "my_package" / f"{name}.py").write_text(module(page, f"my_package/{name}.py"))
    (tmp_path / "unmoved.yaml").write_text(blocks("extending.md", "yaml")[0])
    (tmp_path / "monitor.yaml").write_text("outside_probes: [relu_zeros, weight_range]\n")
    (tmp_path / "train.py").write_text(TRAIN)
    sentinel = ("-m", "sentinel.cli")
    export = (*sentinel, "export", "runs/it", "--format")

    done = run(tmp_path, path, *sentinel, "run", "--name", "it", "--rules", "unmoved.yaml", "--", interpreter(), "train.py")
    table = run(tmp_path, path, *export, "markdown", "--kind", "scalar", "--steps", "3:4", "-o", "table.md")
    steps = run(tmp_path, path, *export, "steps", "--steps", "3:4")

    assert done.returncode == 0, done.stderr
    told = "".join(file.read_text() for file in (tmp_path / "runs/it/anomalies").glob("*.jsonl"))
    assert "rms of param 0.weight is" in told and "exactly what it was before" in told and "nobody trains it" in told
    assert table.returncode == 0, table.stderr
    head, line, *rows = (tmp_path / "table.md").read_text().splitlines()
    assert head.startswith("| attempt | step | time |") and set(line) == {"|", "-"}
    assert sum("| zeros/1 |" in row for row in rows) == sum("| weight_range |" in row for row in rows) == 2
    assert steps.stdout.split() == ["3", "4"], steps.stderr
