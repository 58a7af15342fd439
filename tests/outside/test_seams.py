"""A package that is not ours adds a detector, a sink, a probe, an adapter, an export and a mirror, and all of them work."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import sentinel
from sentinel.testing.battery import BATTERY, DetectorUnderTest

from ..support.warm import interpreter

HERE = Path(__file__).parent
RULES = """
rules:
  - name: record
    detector: AboveRecord
    match: {kind: scalar, name: weight_range}
    args: {factor: 3.0}
    severity: critical
    actions: [notify]
"""


def install(folder: Path, points: dict[str, dict[str, str]]) -> str:
    """Lay down what pip would beside a package with these entry points; returns the PYTHONPATH that finds both."""
    info = folder / "sentinel_outside-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sentinel-outside\nVersion: 1.0\n")
    lines = [
        line for group, names in points.items() for line in (f"[{group}]", *(f"{one} = {at}" for one, at in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return os.pathsep.join([str(folder), str(HERE)])


def offered() -> dict[str, dict[str, str]]:
    """Return the entry points that the package's own pyproject.toml declares."""
    return dict(tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["entry-points"])


def run(tmp_path: Path, path: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [interpreter(), *command], text=True, capture_output=True, timeout=240, check=False, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "SENTINEL_DIR": str(tmp_path / "runs"), "PYTHON_EXEC": interpreter()},
    )  # fmt: skip


@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
def test_its_detector_passes_the_battery(
    check: Callable[[DetectorUnderTest], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    detectors = importlib.import_module("sentinel_outside.detectors")

    check(DetectorUnderTest(detectors.AboveRecord()))


@pytest.mark.slow
def test_a_package_of_a_stranger_adds_one_part_at_each_seam_and_each_works(tmp_path: Path) -> None:
    path = install(tmp_path / "site", offered())
    (tmp_path / "record.yaml").write_text(RULES)
    (tmp_path / "daemon.yaml").write_text(
        f"notify:\n  sinks:\n  - {{type: notebook, path: {tmp_path / 'notebook'}}}\n"
        f"mirrors:\n- {{type: lines, path: {tmp_path / 'lines'}}}\n"
    )
    (tmp_path / "monitor.yaml").write_text("outside_probes: [weight_range, saturated]\n")

    done = run(
        tmp_path, path, "-m", "sentinel.cli", "run", "--name", "tiny", "--rules", "record.yaml", "--config", "daemon.yaml",
        "--", interpreter(), str(HERE / "train.py"), "monitor.yaml",
    )  # fmt: skip
    export = ("-m", "sentinel.cli", "export", "runs/tiny", "--format")
    listed = run(tmp_path, path, *export, "steps", "--steps", "40:43", "-o", "steps")
    table = run(tmp_path, path, *export, "jsonl", "--kind", "scalar", "--name", "saturated/1")

    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for file in sorted((tmp_path / "runs/tiny/anomalies").glob("*.jsonl")) for line in file.open()]
    record = [one for one in found if one["rule"] == "record"]
    assert [(one["step"], one["detector"], one["kind"]) for one in record][:1] == [(40, "AboveRecord", "scalar")]
    assert any("record" in line and "40" in line for line in (tmp_path / "notebook").read_text().splitlines())
    mirrored = (tmp_path / "lines").read_text().splitlines()
    assert [line.split()[1] for line in mirrored if "'weight_range'" in line] == [str(step) for step in range(60)]
    assert any(line.startswith("tiny opened: ") for line in mirrored)
    assert listed.returncode == 0, listed.stderr
    assert (tmp_path / "steps").read_text().split() == ["40", "41", "42", "43"]
    shares = {row["step"]: row["value"] for row in map(json.loads, table.stdout.splitlines())}
    assert len(shares) == 60 and shares[30] < shares[50], "one unit of the Tanh saturates when its weight blows up"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "name", "at", "code", "says"),
    [
        ("sentinel.probes", "weight_range", "nowhere:Probe", 1, "outside_probes[0]: entry point"),
        ("sentinel.adapters", "attach_tiny", "nowhere:attach", 1, "sentinel.attach_tiny: entry point"),
        ("sentinel.probes", "other", "nowhere:Probe", 0, ""),
        ("sentinel.adapters", "other", "nowhere:attach", 0, ""),
    ],
)
def test_a_broken_package_is_an_error_for_who_names_it_and_harms_nobody_else(
    group: str, name: str, at: str, code: int, says: str, tmp_path: Path
) -> None:
    points = offered()
    path = install(tmp_path / "site", points | {group: points[group] | {name: at}})
    (tmp_path / "monitor.yaml").write_text("outside_probes: [weight_range]\n")

    done = run(tmp_path, path, str(HERE / "train.py"), "monitor.yaml")

    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert code == 0 or 'package "sentinel-outside"' in done.stderr


@pytest.mark.slow
def test_a_probe_that_nobody_offers_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = install(tmp_path / "site", offered())
    (tmp_path / "monitor.yaml").write_text("outside_probes: [weight_rage]\n")

    done = run(tmp_path, path, str(HERE / "train.py"), "monitor.yaml")

    assert done.returncode == 1
    assert "probes[0]: no probe 'weight_rage'" in done.stderr and 'did you mean "weight_range"?' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "at", "code", "says"),
    [
        ("weight_range", None, 0, "monitor.yaml: ok, for the trainer"),
        (
            "weight_rage",
            None,
            3,
            "outside_probes[0]: no probe 'weight_rage' among the entry points of sentinel.probes; did you",
        ),
        (
            "weight_range",
            "nowhere:Probe",
            3,
            'outside_probes[0]: entry point "weight_range" of sentinel.probes (nowhere:Probe,',
        ),
    ],
)
def test_a_checked_configuration_says_which_probe_cannot_be_loaded(
    name: str, at: str | None, code: int, says: str, tmp_path: Path
) -> None:
    points = offered()
    path = install(tmp_path / "site", points | {"sentinel.probes": points["sentinel.probes"] | ({name: at} if at else {})})
    (tmp_path / "monitor.yaml").write_text(f"outside_probes: [{name}]\n")

    done = run(tmp_path, path, "-m", "sentinel.cli", "check-config", "monitor.yaml")

    assert done.returncode == code, done.stderr
    assert says in done.stdout


@pytest.mark.slow
def test_a_probe_that_fails_is_named_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(
        "class Failing:\n    def __init__(self, context):\n        raise OSError('no such sensor')\n"
    )
    path = install(tmp_path / "site", offered() | {"sentinel.probes": {"failing": "failing:Failing"}})
    (tmp_path / "monitor.yaml").write_text("outside_probes: [failing]\n")

    done = run(tmp_path, os.pathsep.join([path, str(tmp_path)]), str(HERE / "train.py"), "monitor.yaml")

    assert done.returncode == 0, done.stderr
    failing = tmp_path / "failing.py"
    assert f"probe Failing: OSError: no such sensor ({failing}:3); probe Failing measures nothing" in done.stderr


@pytest.mark.slow
def test_a_detector_that_fails_is_off_and_the_end_of_the_run_says_so(tmp_path: Path) -> None:
    detectors = (HERE / "sentinel_outside/detectors.py").read_text()
    failing = tmp_path / "failing.py"
    failing.write_text(detectors.replace("limit = ", "limit = self.no_such_field + "))
    path = install(tmp_path / "site", offered() | {"sentinel.detectors": {"AboveRecord": "failing:AboveRecord"}})
    (tmp_path / "record.yaml").write_text(RULES)
    (tmp_path / "monitor.yaml").write_text("outside_probes: [weight_range]\n")

    done = run(
        tmp_path, os.pathsep.join([path, str(tmp_path)]), "-m", "sentinel.cli", "run", "--rules", "record.yaml", "--",
        interpreter(), str(HERE / "train.py"), "monitor.yaml",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    (off,) = [line for line in done.stderr.splitlines() if "OFF" in line]
    assert 'detector "AboveRecord" of rule "record" is off, because it failed: AttributeError' in off
    assert f"({failing}:" in off


def test_a_name_that_nobody_offers_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'sentinel' has no attribute 'attach_nothing'"):
        sentinel.attach_nothing  # noqa: B018
