"""docs/rules.md says what the code does: every detector, argument, default, rule, key, verb and option; its example runs."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from sentinel.cli.main import FOUND, run_cli
from sentinel.detect import DETECTORS, ENTRY_POINTS, dotted, state_bytes
from sentinel.rules.language.building import detector_arguments
from sentinel.rules.language.fields import MATCH_KEYS
from sentinel.rules.language.loader import PACK_KEYS, RULE_KEYS, builtin_packs, load_pack
from sentinel.rules.language.schema import RULE_KINDS
from sentinel.testing import BlowUp, SyntheticRun

TEXT = (Path(__file__).parents[2] / "docs" / "rules.md").read_text()
DECLARE = "from sentinel.detect import Declaration\n"
SECTIONS = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))


def section_of(detector: str) -> str:
    found = [body for title, body in SECTIONS.items() if f"`{detector}`" in title]
    assert found, f"docs/rules.md: expected a heading ### `{detector}`, found none"
    return found[0]


def shown(value: object) -> str:
    """Return a default as the page writes it."""
    if value is ... or value is None or value == "":
        return {...: "needed", None: "none", "": "empty"}[value]
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


def rows(body: str, columns: int) -> list[list[str]]:
    """Return the cells of the tables of so many columns, heads left out."""
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in found if len(cells) == columns]


def test_every_detector_has_a_section_and_no_other_name_has_one() -> None:
    titles = {name for title in SECTIONS for name in re.findall(r"`(\w+)`", title)}

    assert titles - set(builtin_packs()) == set(DETECTORS)


@pytest.mark.parametrize("detector", [name for name in DETECTORS if name != "GradNormSpike"])
def test_every_argument_stands_there_with_the_default_of_the_code(detector: str) -> None:
    expected = {name: shown(value) for name, value in detector_arguments(DETECTORS[detector]).items()}

    table = {cells[0].strip("`"): cells[1] for cells in rows(section_of(detector), 3) if cells[0] != "argument"}

    assert table == expected
    assert expected or "no arguments" in section_of(detector)


def test_defaults_that_differ_between_detectors_of_one_section_are_said() -> None:
    ours, base = (detector_arguments(DETECTORS[name]) for name in ("GradNormSpike", "LossSpike"))
    expected = {name: shown(value) for name, value in ours.items() if base[name] != value}

    line = re.search(r"Other defaults of `GradNormSpike`: ([^\n]*)", TEXT)

    assert line is not None and expected
    assert dict(re.findall(r"`(\w+)` ([\w.`-]+?)(?=[,.]?(?:\s|$))", line[1])) == expected


def test_what_a_series_costs_and_when_it_is_judged_is_as_measured() -> None:
    table = {cells[0].strip("`"): cells[1:] for cells in rows(TEXT, 6) if cells[0] != "detector"}
    assert set(table) == set(DETECTORS)
    for name, cls in DETECTORS.items():
        detector = cls(above=1.0) if name == "Threshold" else cls()
        arguments = detector_arguments(cls)
        warmup = arguments.get("warmup", arguments.get("after", 0)) * (2 if "Spike" in name and "window" in arguments else 1)
        assert table[name][2:] == [
            f"{state_bytes(detector.state(1000)) / 1000:.0f}", str(warmup), str(arguments.get("settle_after", "")),
        ], name  # fmt: skip


@pytest.mark.parametrize("name", list(builtin_packs()))
def test_every_rule_of_every_pack_stands_there_as_it_is(name: str) -> None:
    default = load_pack()
    pack = default if name == "default" else load_pack([name])
    body = SECTIONS["The default pack" if name == "default" else f"`{name}`"]
    table = {cells[0].strip("`"): cells[1:] for cells in rows(body, 4) if cells[0] != "rule"}
    reported = [rule for rule in pack.rules if pack is default or rule not in default.rules]
    assert [rule.name for rule in reported] == list(table)
    for rule in reported:
        detector, watches, severity = table[rule.name]
        assert detector.startswith(f"`{rule.detector}`"), rule.name
        assert severity == rule.severity.value + (", escalates" if "escalate" in rule.actions else ""), rule.name
        kinds = () if rule.match.kind in (RULE_KINDS, ("scalar",)) else rule.match.kind
        for word in (*kinds, *(glob for glob in rule.match.name if glob != "*")):
            assert f"`{word}`" in watches, (rule.name, word)
        for statistic in rule.match.statistic:
            assert re.search(rf"\b{statistic}\b", watches), (rule.name, statistic)
        for key, value in rule.args.items():
            as_yaml = json.dumps(value) if isinstance(value, bool) else value
            assert f"{key}: {as_yaml}" in detector, (rule.name, key)


def test_every_key_of_a_pack_stands_in_the_table_of_keys() -> None:
    keys = TEXT[TEXT.index("## Keys of a rule") : TEXT.index("## Groups of tensors")]

    for key in (*RULE_KEYS, *MATCH_KEYS, *PACK_KEYS):
        assert f"`{key}`" in keys, key


def test_every_verb_stands_there_and_every_option_shown_exists() -> None:
    from sentinel.cli.rules import rules

    assert isinstance(rules, click.Group)
    shown_options = re.findall(r"sentinel rules (\w+)([^\n`#]*)", TEXT)
    assert {verb for verb, _ in shown_options} == set(rules.commands)
    for verb, words in shown_options:
        known = {option for parameter in rules.commands[verb].params for option in parameter.opts}
        assert set(re.findall(r"(?<=\s)--?[a-z-]+", words)) <= known, (verb, words)


def blocks(language: str, mark: str) -> str:
    """Return the code block of this language that holds `mark`."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return next(block for block in found if mark in block)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the page's own detector and its pack."""
    (tmp_path / "my_detectors.py").write_text(blocks("python", "class AboveRecord"))
    (tmp_path / "record.yaml").write_text(blocks("yaml", "my_detectors:AboveRecord"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(dotted, "_permission", {"is_given": False})
    yield tmp_path
    sys.modules.pop("my_detectors", None)


def replayed(own: Path, *words: str) -> list[str]:
    """Judge a run in which layers.0.mlp blows up at step 30 by the pack, and return the anomaly lines of rule `record`."""
    source = SyntheticRun(own / "run", layers=2, d_model=16, elements=8)
    source.plant(BlowUp(step=30, module="layers.0.mlp"))
    source.write(33)
    source.end()
    code = run_cli(["replay", str(own / "run"), "--recompute", "--rules", "record.yaml", "-o", str(own / "out"), *words])
    assert code == FOUND
    lines = "".join(path.read_text() for path in (own / "out" / "anomalies").glob("*.jsonl")).splitlines()
    return [line for line in lines if '"rule":"record"' in line]


def test_the_pages_own_detector_runs_by_its_path_where_code_is_allowed(own: Path, capsys: Any) -> None:
    assert run_cli(["rules", "check", "record.yaml", "--allow-code"]) == 0

    found = replayed(own, "--allow-code")

    assert any('"step":30' in line and '"tag_name":"layers.0.mlp"' in line for line in found)
    assert not any('"step":29' in line for line in found)


@pytest.mark.parametrize("words", [["rules", "check"], ["rules", "list"], ["replay", ".", "--recompute", "--rules"]])
def test_a_path_is_refused_unasked_and_says_what_to_do(own: Path, capsys: Any, words: list[str]) -> None:
    assert run_cli([*words, "record.yaml"]) != 0

    said = capsys.readouterr()
    expected = 'detector "my_detectors:AboveRecord" is a path to code, which is not run unasked; give --allow-code, or'
    assert f'record.yaml:3: rule "record": {expected}' in said.out + said.err
    assert "my_detectors" not in sys.modules


def test_one_permission_is_not_the_next_commands(own: Path, capsys: Any) -> None:
    assert run_cli(["rules", "check", "record.yaml", "--allow-code"]) == 0
    assert run_cli(["rules", "check", "record.yaml"]) == 1


@pytest.mark.slow
def test_the_same_class_runs_by_name_from_an_entry_point(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(own))
    point = importlib.metadata.EntryPoint("AboveRecord", "my_detectors:AboveRecord", ENTRY_POINTS)
    monkeypatch.setattr("sentinel.entry_points.installed", lambda group: [point])
    pack = own / "record.yaml"
    pack.write_text(pack.read_text().replace("my_detectors:AboveRecord", "AboveRecord"))

    assert len(replayed(own)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise RuntimeError('no')", "cannot be loaded: RuntimeError: no"),
        pytest.param("import sys; sys.exit(5)", "cannot be loaded: SystemExit: 5", marks=pytest.mark.long),
        pytest.param("import no_such_module", "cannot be loaded: ModuleNotFoundError", marks=pytest.mark.long),
        ("import os; os._exit(3)", "cannot be loaded: its import ends the process that imports it, with exit code 3"),
        pytest.param("x = 1", "cannot be loaded: AttributeError", marks=pytest.mark.long),
        ("class Plug: pass", 'is no detector: expected a class attribute declares = Declaration(summary="...", statistics='),
        (
            DECLARE + "class Plug: declares = Declaration(summary='any')",
            "is no detector: it has no state and no score and no learn",
        ),
        (
            DECLARE + "class Plug: declares = Declaration(summary='any', over='ends')",
            'is no detector: it declares over="ends"',
        ),
        (
            DECLARE + "class Plug:\n  declares = Declaration(summary='any')\n  state = learn = print\n"
            "  def score(self, values: list[int]): ...",
            "is no detector: score(values, state) is called, and it takes (values: list[int]); see the contract",
        ),
        (
            DECLARE + "class Plug: declares = Declaration(summary='any', statistics='norm')",
            "cannot be loaded: ConfigError: declares.statistics must be a tuple of names, got 'norm'",
        ),
        (
            DECLARE + "class Plug: declares = Declaration(summary='any'); state = score = learn = print; __signature__ = 3",
            "is no detector: its arguments cannot be read",
        ),
    ],
)
def test_a_broken_package_is_named_and_only_a_rule_that_names_it_is_refused(
    body: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    info = tmp_path / "plug_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sentinel.detectors]\nPlug = plug_in_question:Plug\n")
    (tmp_path / "plug_in_question.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plug_in_question", raising=False)
    (tmp_path / "other.yaml").write_text("rules: [{name: loss-spike, severity: critical}]")
    (tmp_path / "asks.yaml").write_text("rules:\n- name: a\n  detector: Plug\n")

    assert run_cli(["rules", "check", str(tmp_path / "other.yaml")]) == 0
    assert run_cli(["rules", "list"]) == 0
    assert run_cli(["rules", "list", "--detectors"]) == 0
    capsys.readouterr()
    (said,) = [one.getMessage() for one in caplog.records if "Plug" in one.getMessage()]
    assert (
        'entry point "Plug" of sentinel.detectors (plug_in_question:Plug, package "plug-package")' in said and says in said
    )
    assert run_cli(["rules", "check", str(tmp_path / "asks.yaml")]) == 1
    out = capsys.readouterr().out
    assert 'asks.yaml:3: rule "a": entry point "Plug"' in out and says in out


@pytest.mark.slow
def test_a_name_that_two_packages_offer_is_neithers(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(own))
    points = [
        importlib.metadata.EntryPoint("AboveRecord", f"{module}:AboveRecord", ENTRY_POINTS) for module in ("one", "two")
    ]
    monkeypatch.setattr("sentinel.entry_points.installed", lambda group: points)
    pack = own / "record.yaml"
    pack.write_text(pack.read_text().replace("my_detectors:AboveRecord", "AboveRecord"))

    assert run_cli(["rules", "check", "record.yaml"]) == 1
    assert "is offered a second time, by " in (said := capsys.readouterr().out) and "uninstall all packages but one" in said
    assert run_cli(["rules", "check"]) == 0


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("my_detectors:Nothing", "cannot be loaded: AttributeError"),
        ("no_such_module:Thing", "cannot be loaded: ModuleNotFoundError"),
        ("my_detectors:np.float64", "is no detector: expected a class attribute declares"),
        ("my_detectors:np", "is no detector: expected a class, got module"),
        ("my_detectors.AboveRecord", ""),
    ],
)
def test_a_path_that_leads_to_no_detector_says_why(own: Path, capsys: Any, path: str, says: str) -> None:
    pack = own / "record.yaml"
    pack.write_text(pack.read_text().replace("my_detectors:AboveRecord", path))

    code = run_cli(["rules", "check", "record.yaml", "--allow-code"])

    assert code == (1 if says else 0)
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["return Scores.of(score, state", "take = np.isfinite"])
def test_a_detector_that_fails_silences_its_own_rule_and_says_so(own: Path, caplog: Any, broken: str) -> None:
    module = own / "my_detectors.py"
    module.write_text(module.read_text().replace(broken, f"raise ZeroDivisionError('mine')\n        {broken}"))

    found = replayed(own, "--allow-code")

    assert found == []
    assert any('"step":30' in path.read_text() for path in (own / "out" / "anomalies").glob("*.jsonl"))
    said = 'detector "my_detectors:AboveRecord" of rule "record" is off, because it failed: ZeroDivisionError: mine'
    assert caplog.text.count(said) == 1


@pytest.mark.slow
def test_the_pages_test_of_rules_passes_and_would_fail_without_the_spike(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "tests.yaml"
    file.write_text(blocks("yaml", "a spike pages"))

    assert run_cli(["rules", "test", str(file)]) == 0
    file.write_text(file.read_text().replace("2x60 9 2x10", "2x71"))
    assert run_cli(["rules", "test", str(file)]) == 1
