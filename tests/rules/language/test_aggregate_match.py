"""`aggregate` in a rule pack: its forms, and every error with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.aggregate import Aggregate
from sentinel.cli.main import run_cli
from sentinel.errors import RuleError
from sentinel.judge.packs import decode_pack, encode_pack
from sentinel.rules.language.listing import check_packs, list_rules
from sentinel.rules.language.loader import load_pack
from sentinel.rules.language.schema import Pack
from sentinel.testing import SyntheticRun


def pack_of(directory: Path, match: str, detector: str = "AnomalyTurbulence") -> Pack:
    path = directory / "r.yaml"
    head = f"builtin: false\nrules:\n  - name: groups\n    detector: {detector}\n    match:\n      kind: wgrad\n"
    path.write_text(head + match)
    return load_pack([path])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"layers.*.mlp.*"', [("layers.*.mlp.*", "layers.*.mlp.*")]),
        ('"mlp=layers.*.mlp.*"', [("mlp", "layers.*.mlp.*")]),
        ('["a.*", "b=c.*,d.*"]', [("a.*", "a.*"), ("b", "c.*", "d.*")]),
        ("{mlp: layers.*.mlp.*}", [("mlp", "layers.*.mlp.*")]),
        ("{ends: [embed.*, head.*], all: '*'}", [("ends", "embed.*", "head.*"), ("all", "*")]),
        ('{"expert{}": "layers.*.experts.{}.*"}', [("expert{}", "layers.*.experts.{}.*")]),
    ],
)
def test_forms_of_aggregate(tmp_path: Path, text: str, expected: list[tuple[str, ...]]) -> None:
    pack = pack_of(tmp_path, f"      aggregate: {text}\n      statistic: norm\n")

    (rule,) = pack.rules
    assert rule.match.aggregate == tuple(Aggregate(name=name, globs=tuple(globs)) for name, *globs in expected)
    assert decode_pack(encode_pack(pack)).pack_hash == pack.pack_hash


@pytest.mark.parametrize(
    ("match", "line", "what"),
    [
        ("      aggregate: 3\n", 7, "expected a glob, a list of globs, or NAME: GLOB, got 3"),
        ("      aggregate: []\n", 7, "expected a glob, a list of globs, or NAME: GLOB, got none"),
        ("      aggregate: {}\n", 7, "expected a glob, a list of globs, or NAME: GLOB, got none"),
        ("      aggregate: {a: {b: c}}\n", 7, "expected a glob or a list of globs, got a mapping"),
        ("      aggregate:\n        a:\n          - x\n          - 3\n", 8, "expected a glob or a list of globs, got 3"),
        ("      aggregate:\n        - x\n        - [y]\n", 9, "got a list"),
        ("      aggregate: {a: []}\n", 7, "got none"),
        ("      aggregate:\n        - a=x.*\n        - a=y.*\n", 9, '"a" is there twice'),
        ('      aggregate: "layers.{}*"\n', 7, "has no bounds"),
        ("      aggregate: {a: ['x.{}', 'y.*']}\n", 7, 'equally many "{}"'),
        ("      aggregat: x\n", 7, 'unknown key "aggregat"; did you mean "aggregate"?'),
        ("      aggregate: x\n      rank: 3\n", 8, "match.rank: says nothing about groups"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, match: str, line: int, what: str) -> None:
    with pytest.raises(RuleError) as error:
        pack_of(tmp_path, match)

    (said,) = [text for text in str(error.value).splitlines() if what in text]
    assert said.startswith(f'{tmp_path / "r.yaml"}:{line}: rule "groups": ')


def test_scalars_are_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("rules:\n  - name: x\n    detector: LossSpike\n    match:\n      kind: [scalar]\n      aggregate: '*'\n")

    with pytest.raises(RuleError, match=r"r.yaml:5: .*logged values are not merged"):
        load_pack([path])


def test_a_detector_that_compares_ranks_takes_no_groups(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"match.aggregate: ReplicaDivergence watches no series"):
        pack_of(tmp_path, "      aggregate: '*'\n", detector="ReplicaDivergence")


def test_a_detector_of_scalars_needs_a_statistic(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r'GradNormSpike watches scalars; .*"statistic"'):
        pack_of(tmp_path, "      aggregate: '*'\n", detector="GradNormSpike")

    assert pack_of(tmp_path, "      aggregate: '*'\n      statistic: norm\n", detector="GradNormSpike").rules


def test_check_and_list_know_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = pack_of(tmp_path, "      aggregate: {third: layers.3}\n")

    assert list_rules(pack)[0].aggregates == ("third=layers.3",)
    (note,) = check_packs([tmp_path / "r.yaml"]).lint
    assert 'match.aggregate "layers.3" takes that one name only' in note.message
    assert run_cli(["rules", "list", "--no-builtin", str(tmp_path / "r.yaml")]) == 0
    assert "merged to third=layers.3" in capsys.readouterr().out


def test_the_rules_of_the_docs_can_be_used(tmp_path: Path) -> None:
    docs = (Path(__file__).parents[3] / "docs" / "rules.md").read_text()
    section = docs.partition("## Groups of tensors")[2]
    (tmp_path / "docs.yaml").write_text(section.partition("```yaml\n")[2].partition("```")[0])

    pack = load_pack([tmp_path / "docs.yaml"], builtin=False)

    assert [rule.name for rule in pack.rules] == ["global-grad-norm", "layer-gradients", "experts", "ends"]
    assert all(rule.match.aggregate for rule in pack.rules)


def test_globs_are_checked_against_the_names_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SyntheticRun(tmp_path / "run", layers=3, d_model=8, elements=4).write(1)
    pack_of(tmp_path, "      aggregate: {good: 'layers.{}.*', bad: ['layer.*.mlp.*', '*']}\n      statistic: norm\n")
    path = str(tmp_path / "r.yaml")

    assert run_cli(["rules", "check", path]) == 0
    assert run_cli(["rules", "check", path, "--run", str(tmp_path / "run")]) == 3

    out = capsys.readouterr().out
    assert 'match.aggregate "layer.*.mlp.*" matches no name of wgrad in that run; nearest: layers.0.mlp.weight' in out
    assert len(out.splitlines()) == 1, "what matches, and the built-in rules, are not told of"
