"""`sentinel rules test`: promtool's manners, and the packs that come with Sentinel under tests of their own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sentinel.cli.main import run_cli
from sentinel.errors import ConfigError
from sentinel.ingest.synthetic_views import SyntheticSeries, stats_of, synthetic_views
from sentinel.moments import Moments
from sentinel.rules.language.notation import BadNotation, expand

PACK_TESTS = sorted((Path(__file__).parents[1] / "rules" / "packs").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("path", PACK_TESTS, ids=lambda path: path.stem)
def test_packs_that_come_with_sentinel_pass_their_tests(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["rules", "test", str(path), "--json"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert results and all(one["num_points"] > 0 and one["num_steps"] > 0 for one in results)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("5", [5.0]),
        ("5x2", [5.0, 5.0, 5.0]),
        ("1+2x3", [1.0, 3.0, 5.0, 7.0]),
        ("1-0.5x2", [1.0, 0.5, 0.0]),
        ("-2+1x2", [-2.0, -1.0, 0.0]),
        ("1*10x2", [1.0, 10.0, 100.0]),
        ("1e-3 _ 2", [0.001, None, 2.0]),
        ("_x3 1", [None, None, None, 1.0]),
        ("inf -inf", [math.inf, -math.inf]),
        ("", []),
    ],
)
def test_notation_is_promtools(text: str, values: list[float | None]) -> None:
    assert expand(text) == values


def test_nan_may_last() -> None:
    assert all(value is not None and math.isnan(value) for value in expand("nanx2"))


@pytest.mark.parametrize("text", ["1+2", "one", "1x", "1x-3", "_+1x3", "1..2", "1x9999999", "1+x3"])
def test_what_is_no_notation_is_named(text: str) -> None:
    with pytest.raises(BadNotation, match=r"expected|how often|cannot grow"):
        expand(text)


@pytest.mark.parametrize(
    "given",
    [
        {"norm": 5.0, "kurtosis": 9.0}, {"rms": 0.1, "mean": 0.05}, {"std": 2.0, "mean": -7.0, "skew": 0.5}, {"var": 4.0},
        {"norm": 3.0, "absmax": 1.5}, {"norm": 2.0, "min": -0.25, "max": 0.75}, {"norm": 1.0, "zeros": 0.5}, {"norm": 0.0},
    ],
)  # fmt: skip
def test_rows_on_paper_have_the_statistics_that_are_written(given: dict[str, float]) -> None:
    moments = Moments(np.array([stats_of(given, "a")]))

    for name, value in given.items():
        assert moments.statistic(name)[0] == pytest.approx(value, rel=1e-9, abs=1e-12)


def test_what_contradicts_itself_is_said() -> None:
    with pytest.raises(ConfigError, match="expected one of norm, rms, std and var, got norm and std"):
        stats_of({"norm": 1.0, "std": 1.0}, '"a"')
    with pytest.raises(ConfigError, match="expected a norm of at least that of its mean"):
        stats_of({"norm": 1.0, "mean": 1.0}, '"a"')


def test_noise_is_the_same_in_each_run_and_on_each_rank() -> None:
    series = [SyntheticSeries(name="loss", kind="scalar", values={"value": [2.0] * 50}, noise=0.1)]

    one, two = ([view.scalars["loss"] for view in synthetic_views("a", series, num_ranks=2)] for _ in range(2))

    assert one == two and all(each.by_rank[0] == each.by_rank[1] for each in one)
    assert 0.05 < np.std([math.log(each.mean) for each in one]) < 0.2


def write(path: Path, tests: str, head: str = "") -> Path:
    path.write_text(f"{head}tests:\n{tests}")
    return path


EXPECT = """\
    expect:
      - {rule: loss-spike, step: STEP}
"""
SPIKE = f"""\
  - name: spike
    noise: 0.02
    input:
      - {{scalar: loss, values: "2x60 9 2x10"}}
{EXPECT}"""


def test_expected_against_got_with_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.yaml", SPIKE.replace("STEP", "62"))

    assert run_cli(["rules", "test", str(path)]) == 1
    out = capsys.readouterr().out

    assert f'{path}:7: test "spike":' in out
    assert "expected: an alarm: rule loss-spike, step 62" in out and "got:      rule loss-spike, step 61, scalar loss" in out
    write(path, SPIKE.replace("STEP", "61"))
    assert run_cli(["rules", "test", str(path)]) == 0
    assert "ok" in capsys.readouterr().out


def test_values_may_be_a_list_and_stand_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.yaml", SPIKE.replace('"2x60 9 2x10"', "[2x60, 9, 2x10]").replace("STEP", "61"))

    assert run_cli(["rules", "test", str(path)]) == 0
    series = '      - {scalar: loss, values: "2x60 9 2x10"}\n'
    write(path, SPIKE.replace(series, 2 * series).replace("STEP", "61"))
    assert run_cli(["rules", "test", str(path)]) == 2
    assert f'{path}:6: test "spike": input "loss" is there twice, first at line 5' in capsys.readouterr().err


def test_what_nobody_expected_fails_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.yaml", SPIKE.replace(EXPECT, "    expect: []\n"))

    assert run_cli(["rules", "test", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"{path}:2: " in out and "expected: no more alarms" in out and "rule loss-spike, step 61" in out


def test_incidents_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    incidents = SPIKE.replace(EXPECT, "    expect_incidents:\n      - {INCIDENT}\n")
    path = write(tmp_path / "a.yaml", incidents.replace("INCIDENT", "opened: 61, severity: critical"))

    assert run_cli(["rules", "test", str(path)]) == 0
    write(path, incidents.replace("INCIDENT", "opened: 60, severity: critical"))
    assert run_cli(["rules", "test", str(path)]) == 1
    assert "expected: an incident: opened 60" in capsys.readouterr().out


def test_rules_beside_the_file_are_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("rules:\n  - {name: loss-spike, args: {k: 1000, floor: 100}}\n")
    path = write(tmp_path / "a.yaml", SPIKE.replace("STEP", "61"), "rules: [mine.yaml]\n")

    assert run_cli(["rules", "test", str(path)]) == 1
    assert "got:      none" in capsys.readouterr().out
    assert run_cli(["rules", "test", str(path), "--rules", str(tmp_path / "gone.yaml")]) == 2


def one(series: str, rest: str = "expect: []", name: str = "a") -> str:
    """Return a file of one test: its series on line 4, what it expects from line 5 on."""
    return f"tests:\n  - name: {name}\n    input:\n      - {{{series}}}\n    {rest}\n"


FINE = 'scalar: loss, values: "1x3"'
BROKEN: dict[str, tuple[str, int, str]] = {
    "unknown key": ("tests:\n  - name: a\n    inputs: []\n", 3, 'unknown key "inputs"; did you mean "input"?'),
    "rules in the place of files": (
        "rules: [{name: a, detector: Drift}]\n" + one(FINE),
        1,
        "got a mapping; rules stand in a file",
    ),
    "no tests": ("rules: []\n", 1, 'expected "tests:"'),
    "no yaml": ("tests: [\n", 2, "not YAML"),
    "notation": (one('scalar: loss, values: "1+2"'), 4, "how often?"),
    "statistic": (one('tensor: w, kind: wgrad, values: {nrom: "1"}'), 4, 'unknown statistic "nrom"; did you mean "norm"?'),
    "kind": (one('tensor: w, values: "1x3"'), 4, 'a tensor needs a "kind"'),
    "rank": (one('scalar: loss, rank: 3, values: "1x3"'), 4, "expected ranks of 0 to 0, got [3]"),
    "nothing expected": (one(FINE, "ranks: 1"), 2, 'add "expect: []"'),
    "unknown rule": (one(FINE, "expect: {rule: los-spike}"), 5, 'no rule "los-spike" is on; did you mean "loss-spike"?'),
    "verdict": (one(FINE, "expect_incidents: {verdict: btach}"), 5, 'unknown verdict "btach"; did you mean "batch"?'),
    "twice": (one(FINE) + one(FINE).partition("\n")[2], 6, "is there twice, first at line 2"),
    "noise": (one(FINE + ", noise: 2"), 4, '"noise" must be'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_mistakes_are_named_with_file_and_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, line, words = BROKEN[case]
    path = tmp_path / "a.yaml"
    path.write_text(text)

    assert run_cli(["rules", "test", str(path)]) == 2
    captured = capsys.readouterr()
    assert f"{path}:{line}: " in captured.err and words in captured.err and captured.out == ""


def test_a_missing_file_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["rules", "test", "no/such.yaml"]) == 2
    assert "no/such.yaml:1: cannot be read" in capsys.readouterr().err


def test_json_is_one_object_a_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.yaml", SPIKE.replace("STEP", "60"))

    assert run_cli(["rules", "test", str(path), "--json"]) == 1
    (result,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    failure: dict[str, Any] = result["failures"][0]
    assert (result["test"], failure["line"], failure["file"]) == ("spike", 7, str(path))
    assert run_cli(["rules", "test", str(path), "--run", "nothing*"]) == 2
