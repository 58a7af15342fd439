"""What the README shows runs, parses, and is what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import torch
import yaml
from torch import nn

from sentinel.anomaly import Anomaly
from sentinel.cli.main import VERBS
from sentinel.rules.loader import load_pack

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


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
    (block,) = blocks("yaml")
    path = tmp_path / "pack.yaml"
    path.write_text(block)

    pack = load_pack([path])

    named = [rule["name"] for rule in yaml.safe_load(block)["rules"]]
    assert set(named) <= {rule.name for rule in pack.rules}


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
    tree = README.split("## The files")[1].split("```")[1]
    for path in re.findall(r"^ {0,2}([\w./-]+(?: [\w]+\.py)*)  ", tree, re.MULTILINE):
        for word in path.split():
            assert (ROOT / word).exists() or (ROOT / "sentinel" / word).exists(), word
