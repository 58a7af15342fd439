"""The tutorial notebook, cell by cell as IPython runs them: what it says of its planted fault is what it finds."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.ipynb"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    interactive = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    config = pytest.importorskip("traitlets.config").Config()
    pytest.importorskip("matplotlib").use("Agg")
    config.HistoryManager.enabled = False
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("SENTINEL_DIR", str(tmp_path / "elsewhere"))  # The notebook sets another: it is put back.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    former = sys.excepthook
    one = interactive.instance(config=config)
    yield one
    interactive.clear_instance()
    sys.excepthook = former


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(TUTORIAL.read_text("utf-8"))["cells"]
    return found


def test_the_tutorial_is_kept_without_outputs() -> None:
    assert all(one["outputs"] == [] and one["execution_count"] is None for one in cells() if one["cell_type"] == "code")


@pytest.mark.slow
def test_the_tutorial_runs_and_finds_its_fault(shell: Any) -> None:
    shown = []
    for one in cells():
        if one["cell_type"] == "code":
            result = shell.run_cell("".join(one["source"]), store_history=False)
            assert result.success, (one["source"], result.error_before_exec, result.error_in_exec)
            shown.append(result.result)

    names = shell.user_ns
    assert "<table>" in names["run"].incidents()._repr_html_()
    assert names["run"].incidents()["title"] == [
        "NaN born in layers.2.mlp (forward) on rank 1, micro_step 0, step 60",
    ]
    assert (names["first"]["tag_name"], names["first"]["rank"], names["first"]["micro_step"]) == ("layers.2.mlp", 1, 0)
    assert shown[-1]["name"][0] == "layers.2.mlp" and set(shown[-1]["step"]) == {60}
    assert names["loss"]["bad_steps"].index(1) == 60 and len(names["loss"]) == 120
