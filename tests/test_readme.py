"""What the README shows runs, parses, and is what the code does; so do the tables of trainers and layouts in docs/."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import msgspec
import pytest
import torch
import yaml
from torch import nn

from sentinel import ADAPTERS
from sentinel.anomaly import Anomaly
from sentinel.cli.main import FOUND, VERBS, run_cli
from sentinel.monitor_config import parse_config
from sentinel.rules.language.loader import load_pack

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TRAINERS = (ROOT / "docs" / "trainers.md").read_text()
LAYOUT_PAGE = (ROOT / "docs" / "layouts.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_ten_lines_attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DIR", str(tmp_path))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names = {"model": model, "optimizer": optimizer, "batches": range(3), "loss": torch.tensor(1.0), "lr": 0.1}
    (block,) = blocks("python")
    assert len(block.splitlines()) <= 10

    exec(compile(block, "README.md", "exec"), names)
    names["monitor"].detach()  # type: ignore[attr-defined]

    assert list(tmp_path.glob("*/spool/r00000-*/*.spool"))


def test_the_rules_load(tmp_path: Path) -> None:
    (block,) = [block for block in blocks("yaml") if block.startswith("rules:")]
    path = tmp_path / "pack.yaml"
    path.write_text(block)

    pack = load_pack([path])

    named = [rule["name"] for rule in yaml.safe_load(block)["rules"]]
    assert set(named) <= {rule.name for rule in pack.rules}


def test_the_config_loads() -> None:
    (block,) = [block for block in blocks("yaml") if not block.startswith("rules:")]

    config = parse_config(block.encode(), "README.md")

    assert config.stagger == 8
    assert config.schedule_of("attention").step_interval == 100
    assert config.schedule_of("update").histogram


def test_the_anomaly_is_one() -> None:
    (block,) = blocks("jsonc")
    shown = json.loads(re.sub(r"\s//.*", "", block))

    anomaly = msgspec.convert(shown, Anomaly)

    assert anomaly.segment == "blocks.1"
    assert list(shown) == [name for name in Anomaly.__struct_fields__ if name in shown]


def test_verbs_and_files_exist() -> None:
    for verb in re.findall(r"(?:^    |`)sentinel ([a-z][a-z-]+)", README, re.MULTILINE):
        assert verb in VERBS, verb
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)`?", README):
        assert f"\n{target}:" in makefile, target


def test_it_is_short_and_its_first_commands_are_the_demo_and_the_tests() -> None:
    commands = re.findall(r"^    (\S.*)$", README, re.MULTILINE)

    assert len(README.encode()) <= 12 * 1024
    assert max(map(len, README.splitlines())) <= 200
    assert commands[:2] == ["make demo", "make test"]


def test_the_one_minute_backtest_says_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(1)
    lines = ["step,loss,grad_norm"]
    for step in range(400):
        loss = 4 * math.exp(-step / 150) + 2 + draw.gauss(0, 0.03) + (2.4 if step == 250 else 0)
        lines.append(f"{step},{loss:.4f},{9.5 if step == 310 else 1 + draw.gauss(0, 0.05):.4f}")
    log = tmp_path / "yours.csv"
    log.write_text("\n".join(lines) + "\n")
    (shown,) = [block for block in blocks("") if block.startswith("file ")]

    assert run_cli(["rules", "backtest", str(log)]) == FOUND

    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    exact = [0, 1, 2, 3, 7, 8, 9]  # file, row, step, channel, rule, verdict, severity: not the draws' own digits
    assert [[row[at] for at in exact] for row in said] == [[line.split()[at] for at in exact] for line in shown.splitlines()]


def test_each_cell_of_the_trainers_is_a_test() -> None:
    cells = re.findall(r'\[yes\]\(\.\./(tests/[\w/.]+) "(\w+)"\)', TRAINERS)
    rows = re.findall(r"^\| \[[^\]]+\]\(\.\./(examples/[\w/.]+)\) \|.*$", TRAINERS, re.MULTILINE)

    assert len(rows) == 8
    assert len(cells) >= 9 * len(rows)
    for path, name in cells:
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)
    for example in rows:
        assert (ROOT / example).is_file(), example


def test_each_layout_of_the_table_is_tested_and_each_tested_one_is_in_it() -> None:
    table = LAYOUT_PAGE[LAYOUT_PAGE.index("| layout | how") : LAYOUT_PAGE.index("Compared are parameters")]
    named = set(re.findall(r"`([a-z0-9_]+)`", table)) - {"use_orig_params"}

    # Here, for it imports all of torch.distributed: a third of what collecting `make quick` took.
    from .layouts.builds import LAYOUTS

    assert named == set(LAYOUTS)
    for path, name in re.findall(r"`(tests/[\w/.]+)::(\w+)`", table):
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)


def test_docs_name_every_adapter() -> None:
    for name in ADAPTERS:
        assert f"sentinel.{name}(" in TRAINERS, name
