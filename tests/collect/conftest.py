"""What a test that trains begins with: the directory of its run, and one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the run that attach makes in this test."""
    monkeypatch.setenv("SENTINEL_DIR", str(tmp_path))
    monkeypatch.setenv("SENTINEL_RUN", "run")
    for name in ("SENTINEL_DISABLE", "RANK", "WORLD_SIZE", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    return tmp_path / "run"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch in this test: threads that wait for a core that others use take longer than the work."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
