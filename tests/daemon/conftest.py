"""What the tests of a served run share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel.store.journal import Journal


@pytest.fixture
def snapshots_may_take_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes long over a snapshot; the daemon would then wait before the next, and these tests are short."""
    monkeypatch.setattr("sentinel.daemon.snapshots.SNAPSHOT_SHARE", float("inf"))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """A new journal."""
    opened = Journal(tmp_path / "journal.sqlite")
    yield opened
    opened.close()
