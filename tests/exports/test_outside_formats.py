"""An export format of another package, by entry point: chosen and written like ours; a broken one harms who named it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.exports.formats import FORMATS, KnownFormats
from sentinel.testing import SyntheticRun

STEPS = """
from sentinel.exports.request import Written

class Steps:
    name = "steps"
    goes_to = "text"
    options = frozenset({"times"})
    takes = "lists steps: --steps, times and --attempt choose them"

    def write(self, request, setting):
        with setting.open_run(request.paths) as recorded, setting.stdout() as out:
            steps = [view.step for view, _ in recorded.views() if request.steps[0] <= view.step <= request.steps[1]]
            out.write("".join(f"{step}\\n" for step in steps).encode())
        setting.to_stderr("that was all")
        return Written(num_rows=len(steps), num_steps=len(steps))
"""


pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    SyntheticRun(tmp_path / "run").write(4)
    return tmp_path / "run"


def exported(tmp_path: Path, body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return what `sentinel export` says where a package offers `Steps` of this body as `steps` and as `csv`."""
    info = tmp_path / "packages" / "steps_format-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steps-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sentinel.exports]\nsteps = steps_format:Steps\ncsv = steps_format:Steps\n")
    (tmp_path / "packages" / "steps_format.py").write_text(body)
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'packages')!r})\nfrom sentinel.cli.main import main\nmain()"
    command = [sys.executable, "-c", script, "export", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_format_of_another_package_is_chosen_and_written_like_ours(tmp_path: Path, run: Path) -> None:
    done = exported(tmp_path, STEPS, str(run), "--format", "steps", "--steps", "1:2")

    assert (done.returncode, done.stdout) == (0, "1\n2\n") and "that was all" in done.stderr


def test_it_refuses_what_it_does_not_take_in_its_own_words(tmp_path: Path, run: Path) -> None:
    done = exported(tmp_path, STEPS, str(run), "--format", "steps", "--kind", "wgrad")

    said = "--format steps lists steps: --steps, times and --attempt choose them; it does not take --kind"
    assert done.returncode == 2 and said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param("import no_such_module", "cannot be loaded: ModuleNotFoundError", marks=pytest.mark.long),
        pytest.param("import sys; sys.exit(5)", "cannot be loaded: SystemExit: 5", marks=pytest.mark.long),
        ("class Steps:\n    def __init__(self): 1 / 0", "cannot be made: ZeroDivisionError"),
        ("import os; os._exit(3)", "cannot be loaded: its import ends the process that imports it, with exit code 3"),
        ("class Steps: name = 'steps'", "is no export format: it has no goes_to and no options and no takes and no write"),
        (
            STEPS.replace('"text"', '"screen"'),
            "is no export format: goes_to must be one of text, file, directory, got",
        ),
        (
            STEPS.replace('frozenset({"times"})', '["times"]'),
            "is no export format: options must be a set of aggregate,",
        ),
        (
            STEPS.replace("self, request, setting", "self, request"),
            "is no export format: write(request, setting) is",
        ),
        (STEPS.replace("return Written", "Written"), "failed: write() gave NoneType, expected a sentinel.exports.request"),
        (STEPS.replace("steps = [", "steps = request.step + ["), "failed: AttributeError: 'ExportRequest' object has no"),
    ],
)
def test_one_that_is_broken_is_named_and_only_where_it_is_asked_for(tmp_path: Path, run: Path, body: str, says: str) -> None:
    named = exported(tmp_path, body, str(run), "--format", "steps")

    where = 'entry point "steps" of sentinel.exports (steps_format:Steps, package "steps-format")'
    assert named.returncode == 2 and f"{where} {says}" in named.stderr


def test_the_place_in_a_format_that_failed_is_named(tmp_path: Path, run: Path) -> None:
    failed = exported(tmp_path, STEPS.replace("steps = [", "steps = request.step + ["), str(run), "--format", "steps")

    assert f"({tmp_path / 'packages' / 'steps_format.py'}:12)" in failed.stderr


def test_a_format_that_leaves_no_file_is_not_believed(tmp_path: Path, run: Path) -> None:
    output = tmp_path / "steps.txt"
    failed = exported(tmp_path, STEPS, str(run), "--format", "steps", "-o", str(output))

    assert failed.returncode == 2 and f"it says that it wrote 4 rows, and {output} is not there" in failed.stderr


def test_a_broken_one_harms_nobody_else_and_no_name_of_ours_is_taken(tmp_path: Path, run: Path) -> None:
    other = exported(tmp_path, "raise RuntimeError('no')", str(run), "--format", "csv", "--kind", "wgrad")

    assert other.returncode == 0 and other.stdout.startswith("attempt,step,")


def test_every_format_says_what_it_is() -> None:
    for name, form in FORMATS.items():
        assert KnownFormats()[name] is form and form.name == name
        assert form.goes_to in ("text", "file", "directory") and form.takes
