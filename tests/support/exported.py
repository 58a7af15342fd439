"""What `sentinel export` prints, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sentinel.cli.main import run_cli


def strict_json(line: str) -> Any:
    """Return what a line says; fails where it holds NaN or an infinity, which are no JSON."""
    return json.loads(line, parse_constant=_refuse)


def _refuse(word: str) -> float:
    raise AssertionError(f"not strict JSON: {word}")


def exported_rows(capsys: pytest.CaptureFixture[str], run_dir: Path, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Return the JSON lines of a run's export; fails where it ends with another exit code."""
    capsys.readouterr()
    assert run_cli(["export", str(run_dir), "--json", *arguments]) == code
    return [strict_json(line) for line in capsys.readouterr().out.splitlines()]
