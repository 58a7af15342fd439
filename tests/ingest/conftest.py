"""What a test of reading begins with."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The directory of a run that nobody began yet."""
    return tmp_path / "run"
