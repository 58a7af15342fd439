import json

import pytest

from sentinel.cli.main import run_cli


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("rules: [{name: a, detector: AnomalyNan}]", 0),
        ("rules: [{name: a, detector: AnomalyNam}]", 1),
        ("rules: [{name: a, detector: AnomalyNan, severity: critical, actions: []}]", 3),
    ],
)
def test_check_exit_codes(tmp_path, capsys, text, code):
    pack = tmp_path / "mine.yaml"
    pack.write_text(text)

    assert run_cli(["rules", "check", str(pack), "--json"]) == code
    result = json.loads(capsys.readouterr().out)
    assert bool(result["errors"]) == (code == 1) and bool(result["lint"]) == (code == 3)


def test_check_names_file_and_line(tmp_path, capsys):
    pack = tmp_path / "mine.yaml"
    pack.write_text("rules:\n  - name: a\n    detector: AnomalyNam")

    run_cli(["rules", "check", str(pack)])

    assert f'{pack}:3: rule "a": unknown detector "AnomalyNam"; did you mean "AnomalyNan"?' in capsys.readouterr().out


def test_bad_usage_is_2(tmp_path, capsys):
    assert run_cli(["rules", "list", str(tmp_path / "nothing.yaml")]) == 2
    assert run_cli(["rules", "check", "--nonsense"]) == 2


def test_list_is_one_object_a_line(capsys):
    assert run_cli(["rules", "list", "--json"]) == 0
    names = [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()]
    assert "loss-spike" in names

    assert run_cli(["rules", "list", "--detectors", "--json"]) == 0
    assert "KurtosisSpike" in capsys.readouterr().out
