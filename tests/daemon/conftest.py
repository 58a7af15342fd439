"""What the tests of a served run share."""

from __future__ import annotations

import pytest


@pytest.fixture
def snapshots_may_take_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes long over a snapshot; the daemon would then wait before the next, and these tests are short."""
    monkeypatch.setattr("sentinel.daemon.snapshots.SNAPSHOT_SHARE", float("inf"))
